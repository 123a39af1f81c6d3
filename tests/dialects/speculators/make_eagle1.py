"""Writes the EAGLE-1 fixtures in this folder with the last `speculators` that had a class for it.

Made with speculators 0.4.0, transformers 4.57.6, huggingface-hub 0.36.2, torch 2.13.0 (CPU), safetensors 0.8.0, Python
3.11; an environment of its own, as in `make.py`:

    python3.11 -m venv /tmp/spec1 && /tmp/spec1/bin/pip install torch==2.13.0 transformers==4.57.6 safetensors==0.8.0
    /tmp/spec1/bin/pip install --no-deps speculators==0.4.0
    /tmp/spec1/bin/pip install "huggingface-hub<1" "numpy<2.4" pydantic pydantic-settings loguru psutil tqdm
    /tmp/spec1/bin/pip install typer rich openai datasets httpx
    PYTHONPATH=. /tmp/spec1/bin/python -m tests.dialects.speculators.make_eagle1

A draft in the original format (the tests' own writer, weights rounded to bfloat16) and a target are written first. The
library's `EagleConverter` reads that draft, `EagleSpeculator.from_pretrained` loads what it made, `attach_verifier`
takes embedding and head from the target (asked of `from_pretrained`, it ties the two), and `forward` gives logits; a
hook on `lm_head` keeps the hidden states before it, which are the recurrent ones. Every level is a forward over the
whole text again: the rows committed with the target's hidden, those behind them with the draft's own.

The layer's attention is told to be `eager`: outside a whole model nothing chooses one. One slip of that forward: it
takes the first of what its decoder layer returns for the hidden states, and this transformers returns them alone. So
the batch dimension is gone, which for one text changes nothing.
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

from tests.dialects.speculators.registry import EAGLE1, HERE
from tests.exact import exact
from tests.tiny import tiny_target
from tests.unit.models.draft_folders import eagle1

ROWS, STEPS, VOCAB, H = 7, 3, 64, 32


def half(folder: Path, **more: Tensor) -> None:
    """The checkpoint in this folder with its weights in bfloat16, some of them replaced."""
    file = folder / "model.safetensors"
    held = load_file(file) | more
    save_file({name: weight.bfloat16() for name, weight in held.items()}, file, {"format": "pt"})


def checkpoint(name: str, bias: bool | None) -> Path:
    """A draft in the original format, with a copy of the target's embedding as the published ones have."""
    out = HERE / name
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(eagle1(bias), out)
    half(out, **{"embed_tokens.weight": load_file(HERE / "target/model.safetensors")["model.embed_tokens.weight"]})
    config = out / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"torch_dtype": "bfloat16"}, indent=2) + "\n")
    return out


def numbers_of(model: EagleSpeculator, seed: int) -> dict[str, Tensor]:
    """As in `make.py`; `aux` is the target's hidden after its final norm `[rows, H]`."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (ROWS + 1,), generator=generator)
    hidden = torch.randn(ROWS, H, generator=generator, dtype=torch.float64)
    following = torch.cat([tokens[1:], torch.zeros(STEPS, dtype=torch.int64)])
    outputs = list[Tensor]()
    model.lm_head.register_forward_pre_hook(lambda _, given: outputs.append(given[0].view(-1, H)))
    logits = torch.empty(STEPS, ROWS, VOCAB, dtype=torch.float64)
    entering = torch.empty(STEPS, ROWS, H, dtype=torch.float64)
    for row in range(ROWS):
        text = hidden[: row + 1]
        for step in range(STEPS):
            length, entering[step, row] = len(text), text[-1]
            with torch.inference_mode():
                ones = torch.ones(1, length, dtype=torch.long)
                given = model(following[None, :length], text[None], attention_mask=ones, return_dict=False)
            logits[step, row] = given.view(-1, VOCAB)[-1]
            text = torch.cat([text, outputs[-1][-1:]])
    return {"tokens": tokens, "aux": hidden, "entering": entering, "logits": logits}


def main() -> None:
    shutil.rmtree(HERE / "target", ignore_errors=True)
    tiny_target(HERE / "target", layers=1, intermediate=32)
    half(HERE / "target")
    for seed, (name, bias) in enumerate({"eagle1": None, "eagle1-no-bias": False}.items(), start=201):
        assert name in EAGLE1
        folder = checkpoint(name, bias)
        with tempfile.TemporaryDirectory() as converted, exact():
            EagleConverter().convert(folder, converted, str(HERE / "target"), validate=False)
            model = EagleSpeculator.from_pretrained(converted, verifier_attachment_mode="detached")
            model.attach_verifier(str(HERE / "target"), "train_only")
            shared = load_file(HERE / "target/model.safetensors")
            assert torch.equal(model.embed_tokens.weight, shared["model.embed_tokens.weight"].double())
            assert torch.equal(model.lm_head.weight, shared["lm_head.weight"].double())
            model.config.transformer_layer_config._attn_implementation = "eager"
            numbers = numbers_of(model.double().eval(), seed)
        save_file({key: value.contiguous() for key, value in numbers.items()}, folder / "numbers.safetensors")


if __name__ == "__main__":
    main()
