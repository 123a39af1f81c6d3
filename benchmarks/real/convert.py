"""GGUF FILE to a folder of safetensors in float32, by `transformers`: `python convert.py FILE FOLDER`.

It runs in an environment with `gguf` and `accelerate`, so it imports nothing of this project.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

# Gemma's turns. The GGUF of the base model holds no template, though its vocabulary has the tokens.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' }}"
    "{{ 'model' if message['role'] == 'assistant' else message['role'] }}{{ '\\n' }}"
    "{{ message['content'] | trim }}{{ '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)


def convert(file: Path, folder: Path) -> None:
    """Read a GGUF with its tokenizer and save both as `transformers` saves them.

    `transformers` refuses to save a model that it read from a GGUF, so its dequantised weights move to a model that was
    made from the config alone.
    """
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    read = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    config = AutoConfig.from_pretrained(**where)
    plain: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    plain.load_state_dict(read.state_dict())
    plain.generation_config = read.generation_config
    plain.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
