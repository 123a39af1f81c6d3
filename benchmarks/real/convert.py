"""Convert a GGUF file to a folder with safetensors in float32, by `transformers`: `python convert.py FILE FOLDER`.

It runs in an environment with `gguf` and `accelerate`, so it imports nothing of this project.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

# Gemma's chat template. The GGUF of the base model has no template, although its vocabulary has the tokens.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' }}"
    "{{ 'model' if message['role'] == 'assistant' else message['role'] }}{{ '\\n' }}"
    "{{ message['content'] | trim }}{{ '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)


def convert(file: Path, folder: Path) -> None:
    """Read a GGUF with its tokenizer and save both in the format of `transformers`.

    `transformers` refuses to save a model that it loaded from a GGUF, so the dequantised weights are copied to a model
    that was created from the config.
    """
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    config = AutoConfig.from_pretrained(**source)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
