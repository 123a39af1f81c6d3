"""Writes the EAGLE-1 drafts and numbers in this folder, with the last `speculators` version that had a class for them.

Made with speculators 0.4.0, transformers 4.57.6, huggingface-hub 0.36.2, torch 2.13.0 (CPU), safetensors 0.8.0, Python
3.11. As in `make.py`, this needs an environment of its own:

    python3.11 -m venv /tmp/spec1 && /tmp/spec1/bin/pip install torch==2.13.0 transformers==4.57.6 safetensors==0.8.0
    /tmp/spec1/bin/pip install --no-deps speculators==0.4.0
    /tmp/spec1/bin/pip install "huggingface-hub<1" "numpy<2.4" pydantic pydantic-settings loguru psutil tqdm
    /tmp/spec1/bin/pip install typer rich openai datasets httpx
    PYTHONPATH=. /tmp/spec1/bin/python -m tests.checkpoints.speculators.make_eagle1

First, this program writes a target, and a draft in the original format (with the writer of the tests). Their weights
are rounded to bfloat16. The library's `EagleConverter` converts the draft, and `EagleSpeculator.from_pretrained` loads
the result. `attach_verifier` takes the embedding and the head from the target; if `from_pretrained` attached the
target, it would tie the two. `forward` gives the logits. A hook on `lm_head` records its input, which is the recurrent
hidden state. Every level is a new forward over the whole text: committed rows use the hidden states of the target, the
rows behind them use those of the draft.

The attention of the layer is set to `eager`, because nothing chooses an implementation for a layer outside a model. The
forward has one bug: it takes the first element of the result of its decoder layer for the hidden states, but this
version of transformers returns the hidden states themselves. So the batch dimension is lost, which does not matter for
one text.
"""

import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators.convert.eagle.eagle_converter import EagleConverter
from speculators.models.eagle import EagleSpeculator
from torch import Tensor

from tests.checkpoints.speculators.registry import EAGLE1, HERE
from tests.support.float64_transformers import exact
from tests.support.tiny_checkpoints import tiny_target
from tests.unit.models.draft_folders import eagle1

ROWS, STEPS, VOCAB, H = 7, 3, 64, 32


def round_to_bfloat16(folder: Path, **replacements: Tensor) -> None:
    """Rewrite the checkpoint in `folder` with weights in bfloat16. `replacements` add or replace tensors."""
    file = folder / "model.safetensors"
    tensors = load_file(file) | replacements
    save_file({name: weight.bfloat16() for name, weight in tensors.items()}, file, {"format": "pt"})


def write_draft(name: str, bias: bool | None) -> Path:
    """Write a draft in the original format and return its folder. As published drafts, it has a copy of the target's
    embedding.
    """
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(eagle1(bias), folder)
    round_to_bfloat16(
        folder, **{"embed_tokens.weight": load_file(HERE / "target/model.safetensors")["model.embed_tokens.weight"]}
    )
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"torch_dtype": "bfloat16"}, indent=2) + "\n")
    return folder


def numbers_of(model: EagleSpeculator, seed: int) -> dict[str, Tensor]:
    """Return the same tensors as `numbers_of` in `make.py`. `aux` is the hidden state of the target after its final
    norm, `[rows, H]`.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (ROWS + 1,), generator=generator)
    hidden = torch.randn(ROWS, H, generator=generator, dtype=torch.float64)
    next_tokens = torch.cat([tokens[1:], torch.zeros(STEPS, dtype=torch.int64)])
    outputs = list[Tensor]()
    model.lm_head.register_forward_pre_hook(lambda _, values: outputs.append(values[0].view(-1, H)))
    logits = torch.empty(STEPS, ROWS, VOCAB, dtype=torch.float64)
    entering = torch.empty(STEPS, ROWS, H, dtype=torch.float64)
    for row in range(ROWS):
        entering_rows = hidden[: row + 1]
        for step in range(STEPS):
            length, entering[step, row] = len(entering_rows), entering_rows[-1]
            with torch.inference_mode():
                ones = torch.ones(1, length, dtype=torch.long)
                values = model(next_tokens[None, :length], entering_rows[None], attention_mask=ones, return_dict=False)
            logits[step, row] = values.view(-1, VOCAB)[-1]
            entering_rows = torch.cat([entering_rows, outputs[-1][-1:]])
    return {"tokens": tokens, "aux": hidden, "entering": entering, "logits": logits}


def main() -> None:
    shutil.rmtree(HERE / "target", ignore_errors=True)
    tiny_target(HERE / "target", layers=1, intermediate=32)
    round_to_bfloat16(HERE / "target")
    for seed, (name, bias) in enumerate({"eagle1": None, "eagle1-no-bias": False}.items(), start=201):
        assert name in EAGLE1
        folder = write_draft(name, bias)
        with tempfile.TemporaryDirectory() as converted, exact():
            EagleConverter().convert(folder, converted, str(HERE / "target"), validate=False)
            model = EagleSpeculator.from_pretrained(converted, verifier_attachment_mode="detached")
            model.attach_verifier(str(HERE / "target"), "train_only")
            target_tensors = load_file(HERE / "target/model.safetensors")
            assert torch.equal(model.embed_tokens.weight, target_tensors["model.embed_tokens.weight"].double())
            assert torch.equal(model.lm_head.weight, target_tensors["lm_head.weight"].double())
            model.config.transformer_layer_config._attn_implementation = "eager"
            numbers = numbers_of(model.double().eval(), seed)
        save_file({key: value.contiguous() for key, value in numbers.items()}, folder / "numbers.safetensors")


if __name__ == "__main__":
    main()
