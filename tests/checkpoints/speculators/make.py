"""Writes the checkpoints and the numbers in this folder, with the model classes of `speculators` itself.

Made with speculators 0.9.0, transformers 5.19.0, torch 2.13.0 (CPU), safetensors 0.8.0, Python 3.11. `speculators` is
not a dependency of this project, because it does not allow the newest versions of transformers. It needs an environment
of its own. To write the files again, run in the root of the repository:

    python3.11 -m venv /tmp/spec && /tmp/spec/bin/pip install torch==2.13.0 transformers==5.19.0 safetensors==0.8.0
    /tmp/spec/bin/pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0
    /tmp/spec/bin/pip install numpy psutil "loguru<=0.7.3" pydantic pydantic-settings "datasets<=5.1.0"
    /tmp/spec/bin/pip install openai typer rich aiohttp click httpx protobuf
    PYTHONPATH=. /tmp/spec/bin/python -m tests.checkpoints.speculators.make

`--no-deps` is needed because torchvision and torchaudio would install another torch; this program does not use them. A
fresh environment gives the same bytes again.

The functions of the library that this program uses:

- `train.cli.create_transformer_layer_config` and `Eagle3DraftModel.from_training_args` make the draft as the trainer
  of the library does: the sizes of the decoder layer come from a target on disk, and the embedding and the head from
  the target. Then every trained weight is drawn at random and rounded to bfloat16, so that the file holds exactly the
  weights that were run.
- `save_pretrained` writes the checkpoint, which is not changed afterwards. Only `config.py` is deleted: a copy of the
  library's source that it writes beside the weights.
- `Eagle3DraftModel.forward` without a loss is the only function that runs a step from end to end. It returns the top
  token ids only. Therefore a hook on `lm_head` records the logits, and a hook on the first layer records the hidden
  states that enter each step: the second half of the layer's input, which is the output of `fc` in step 0 and the
  recurrent state in later steps.

What this forward computes: its caller has shifted the ids by one, so row t has the hidden state of position t and token
t + 1. Step i is the i-th draft level *behind every row t at once*. At row t it reads token t + 1 + i of the given text
(not the token that the draft would choose; zeros beyond the end) and the state of step i - 1 at the same row, at the
rotary position 1 + t + i. It sees the keys of step 0 up to row t, and the keys of steps 1 to i at row t only. So row t
of step i is the computation of a server that has committed t + 1 rows and drafts i tokens behind them. Two things
differ from a server:

- Positions begin at 1 and not at 0. Rotary embeddings depend on distances only, so this changes nothing.
- A sliding window applies to the keys of step 0 only, counted from row t, and the keys of later steps are added: at
  level i a row sees up to i tokens more than `sliding_window`. A server counts the window from the position of the row.

`MTPDraftModel.forward` returns the logits of several steps. Its step i reads token t + 1 + i and the state of step
i - 1 at row t, concatenated as [embedding | hidden]. The rows of a step see only rows of the same step, at unchanged
positions. The folder `target` belongs to `make_eagle1.py`. Here token 0 is embedded as zeros, which stands in for
DeepSeek's zero embedding at position 0.

All numbers are float64: inside `exact`, the parts that transformers computes in float32 (norms, rope, softmax) are
float64.
"""

import os
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train.cli import create_transformer_layer_config
from torch import Tensor
from transformers import Qwen3Config

from tests.checkpoints.speculators.registry import FIXTURES, HERE, Fixture
from tests.support.float64_transformers import exact
from tests.support.tiny_checkpoints import tiny_target

ROWS, STEPS, VOCAB, H = 7, 3, 64, 32


def write_target() -> None:
    """Write the tiny target of the tests into ./target, in float64, because `exact` does not change float64 files."""
    tiny_target(Path("target"), intermediate=32)
    file = Path("target/model.safetensors")
    save_file({name: weight.double() for name, weight in load_file(file).items()}, file, {"format": "pt"})


def draft_of(fixture: Fixture, seed: int) -> Eagle3DraftModel:
    """Return the draft that the trainer makes for the target in ./target, with random weights."""
    window = fixture.window or 2048
    config = create_transformer_layer_config(
        "target",
        fixture.layers,
        fixture.arch,
        None,
        window,
        [i for i in fixture.full_attention_layers if i < fixture.layers],
    )
    for key, value in fixture.shape.items():
        setattr(config, key, value)
    generator = torch.Generator().manual_seed(seed)
    t2d = d2t = None
    if fixture.vocab != VOCAB:
        ids = torch.randperm(VOCAB, generator=generator)[: fixture.vocab].sort().values
        t2d, d2t = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True), ids - torch.arange(fixture.vocab)
    flags = {"norm_before_residual": False, **fixture.flags}
    model = Eagle3DraftModel.from_training_args(
        config,
        t2d=t2d,
        d2t=d2t,
        draft_vocab_size=fixture.vocab,
        target_layer_ids=list(fixture.boundaries),
        verifier_name_or_path="target",
        ttt_steps=STEPS,
        draft_attn_impl="eager",
        **flags,
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not name.startswith(("verifier_", "embed_tokens")):
                random_weight = torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 0.3
                weight.copy_(1 + random_weight if "norm" in name else random_weight)
            weight.copy_(weight.bfloat16().double())
    return model.eval()


def numbers_of(model: Eagle3DraftModel, seed: int) -> dict[str, Tensor]:
    """Run the draft on random inputs and return the inputs and outputs.

    They are a text of ROWS + 1 tokens, the aux hidden states `[rows, A]`, the hidden states that enter each step
    `[steps, rows, H]`, and the logits of each step.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (ROWS + 1,), generator=generator)
    aux = torch.randn(ROWS, model.fc.in_features, generator=generator, dtype=torch.float64)
    logits, entering = list[Tensor](), list[Tensor]()
    model.lm_head.register_forward_hook(lambda _, inputs, out: logits.append(out[0]))
    model.layers[0].register_forward_pre_hook(lambda _, inputs: entering.append(inputs[0][0, :, model.hidden_size :]))
    with torch.inference_mode():
        model(aux[None], tokens[None, 1:], torch.zeros(1, ROWS, dtype=torch.long), ttt_steps=STEPS)
    numbers = {"tokens": tokens, "aux": aux, "entering": torch.stack(entering), "logits": torch.stack(logits)}
    assert all(value.dtype in (torch.float64, torch.int64) for value in numbers.values())
    assert all(bool(value.isfinite().all()) for value in numbers.values())
    return {name: value.contiguous() for name, value in numbers.items()}


def mtp_layer(seed: int) -> MTPDraftModel:
    """Return a random MTP layer with a Qwen3 decoder layer, and the embedding and head of `HERE/target`.

    The embedding of token 0 is zero.
    """
    layer = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=H,
        intermediate_size=H,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        attn_implementation="eager",
    )
    methods = [GreedyTokenProposalConfig(speculative_tokens=STEPS)]
    verifier = VerifierConfig(name_or_path=None, architectures=[])
    config = SpeculatorsConfig(
        algorithm="mtp", proposal_methods=methods, default_proposal_method="greedy", verifier=verifier
    )
    model = MTPDraftModel(MTPSpeculatorConfig(transformer_layer_config=layer, speculators_config=config))
    generator = torch.Generator().manual_seed(seed)
    target_tensors = load_file(HERE / "target/model.safetensors")  # bfloat16
    with torch.no_grad():
        for name, weight in model.mtp_layers.named_parameters():
            random_weight = torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 0.3
            weight.copy_((1 + random_weight if "norm" in name else random_weight).bfloat16().double())
        model.embed_tokens.weight.copy_(target_tensors["model.embed_tokens.weight"].double())
        model.embed_tokens.weight[0] = 0
        model.lm_head.weight.copy_(target_tensors["lm_head.weight"].double())
    del model.verifier_lm_head
    return model.eval()


def mtp_numbers(model: MTPDraftModel, seed: int) -> dict[str, Tensor]:
    """Run the MTP layer on random inputs and return the inputs and outputs.

    They are a text in which only the second token is 0, the hidden states of the target `[tokens, H]`, and the logits
    `[steps, rows, V]`.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCAB, (ROWS + STEPS + 1,), generator=generator)
    tokens[1] = 0
    hidden = torch.randn(len(tokens), H, generator=generator, dtype=torch.float64)
    with torch.inference_mode():
        logits, _, _ = model(tokens[None], hidden[None])
    return {"tokens": tokens, "aux": hidden, "logits": torch.cat(logits).contiguous()}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        write_target()
        for seed, (name, fixture) in enumerate(FIXTURES.items(), start=1):
            with exact():
                model = draft_of(fixture, seed)
                numbers = numbers_of(model, 100 + seed)
            out = HERE / name
            shutil.rmtree(out, ignore_errors=True)
            model.to(torch.bfloat16).save_pretrained(out)
            (out / "config.py").unlink()
            save_file(numbers, out / "numbers.safetensors")
    out = HERE / "mtp"
    shutil.rmtree(out, ignore_errors=True)
    with exact():
        model = mtp_layer(50)
        numbers = mtp_numbers(model, 150)
    model.to(torch.bfloat16).save_pretrained(out)
    (out / "config.py").unlink()
    save_file(numbers, out / "numbers.safetensors")


if __name__ == "__main__":
    main()
