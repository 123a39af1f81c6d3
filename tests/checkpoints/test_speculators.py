"""Drafts that the library `speculators` made, saved and ran. Aerie loads the unchanged files and computes the same
numbers.

`speculators/make.py` describes how the numbers were made, and which function of the library gives which of them.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cluster.arch import DraftLayer
from cluster.config import ConfigError
from cluster.models.draft import DraftModel
from tests.checkpoints.speculators.registry import EAGLE1, FIXTURES, HERE
from tests.support.tiny_checkpoints import target_folder
from tests.unit.models.checkpoints import Tensors, copy_of
from tests.unit.models.test_drafts import CausalAttention, loaded_draft

EXACT = 1e-9
Windows = Callable[[tuple[DraftLayer, ...], int], tuple[DraftLayer, ...]]


def as_served(layers: tuple[DraftLayer, ...], level: int) -> tuple[DraftLayer, ...]:
    """Return the layers unchanged: Aerie counts a sliding window from the position of the row, in every level."""
    return layers


def as_trained(layers: tuple[DraftLayer, ...], level: int) -> tuple[DraftLayer, ...]:
    """Return the layers with the window of the trainer: in each level it is one token larger.

    The trainer's forward applies the window to the keys of step 0 only, and adds the tokens of later steps.
    """
    return tuple(
        replace(layer, geometry=replace(g, sliding_window=g.sliding_window + level))
        if (g := layer.geometry).sliding_window
        else layer
        for layer in layers
    )


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    assert theirs.isfinite().all()
    assert ours.isfinite().all()
    return float((ours - theirs).abs().max() / theirs.abs().max())


def draft_of(name: str, **overrides: object) -> DraftModel:
    return loaded_draft(str(HERE / name), str(HERE / "target") if name in EAGLE1 else target_folder(), **overrides)


def distances(name: str, windows: Windows = as_trained, **overrides: object) -> Tensor:
    """Return the largest relative difference of logits and of recurrent hidden states for each level, `[levels]`.

    Every row of the text is used once as the last committed row.
    """
    draft = draft_of(name, **overrides)
    numbers = load_file(Path(HERE, name, "numbers.safetensors"))
    logits, entering_hidden = numbers["logits"], numbers["entering"]
    steps, rows = logits.shape[:2]
    assert logits.dtype == torch.float64
    next_tokens = torch.cat([numbers["tokens"][1:], torch.zeros(steps, dtype=torch.int64)])
    fused = draft.fuse_aux(numbers["aux"])
    max_errors = torch.zeros(steps)
    max_errors[0] = relative_error(fused, entering_hidden[0])
    for last_row in range(rows):
        attend, hidden, level_rows = (
            CausalAttention(draft.spec.layers),
            fused[: last_row + 1],
            torch.arange(last_row + 1),
        )
        for level in range(steps):
            attend.layers = [each.geometry for each in windows(draft.spec.layers, level)]
            normed, recurrent = draft.forward(next_tokens[level_rows], level_rows, hidden, attend)
            compared_rows = level_rows if level == 0 else torch.tensor([last_row])
            errors = [relative_error(draft.logits(normed).values, logits[level, compared_rows])]
            if level + 1 < steps:
                errors.append(relative_error(recurrent, entering_hidden[level + 1, compared_rows]))
            max_errors[level] = max(float(max_errors[level]), *errors)
            hidden, level_rows = recurrent[-1:], level_rows[-1:] + 1
    return max_errors


@pytest.mark.parametrize("name", [*FIXTURES, *EAGLE1])
def test_served_draft_computes_the_same_numbers_as_speculators(name: str) -> None:
    assert distances(name).max() < EXACT


@pytest.mark.parametrize("name", FIXTURES)
def test_speculators_config_gives_the_intended_draft_spec(name: str) -> None:
    fixture = FIXTURES[name]
    spec = draft_of(name).spec
    flags = {flag: fixture.flags.get(flag, False) for flag in ("norm_before_fc", "fc_norm", "norm_before_residual")}
    assert {flag: getattr(spec, flag) for flag in flags} == flags
    assert spec.recurrent == ("post" if fixture.flags.get("norm_output") else "pre")
    assert (spec.dialect, spec.aux_boundaries, spec.draft_vocab_size) == (
        "speculators",
        fixture.boundaries,
        fixture.vocab,
    )
    assert [layer.geometry.sliding_window for layer in spec.layers] == [
        None if i in fixture.full_attention_layers else fixture.window for i in range(fixture.layers)
    ]


@pytest.mark.parametrize("name", [name for name, fixture in FIXTURES.items() if fixture.window])
def test_sliding_window_of_the_trainer_grows_with_the_level(name: str) -> None:
    """This is the only difference from the trainer: in Aerie a row sees `sliding_window` tokens, itself included, in
    every level.
    """
    errors = distances(name, as_served)
    assert errors[0] < EXACT, "the first level must not differ"
    assert errors[1:].min() > 1e-3


FACTS = ("norm_before_residual", "recurrent", "rope_layout")


@pytest.mark.parametrize(
    ("name", "fact"), [*((name, fact) for name in FIXTURES for fact in FACTS), *((name, FACTS[2]) for name in EAGLE1)]
)
def test_wrong_draft_override_changes_the_numbers(name: str, fact: str) -> None:
    """So the comparison with the numbers detects a wrong reading of the config."""
    spec = draft_of(name).spec
    wrong_values = {
        "norm_before_residual": not spec.norm_before_residual,
        "recurrent": "pre" if spec.recurrent == "post" else "post",
        "rope_layout": "interleaved",
    }
    assert distances(name, **{fact: wrong_values[fact]}).max() > 1e-3


NEXTN = (
    (r"\.token_layernorm\.", ".enorm."),
    (r"\.hidden_layernorm\.", ".hnorm."),
    (r"\.input_proj\.", ".eh_proj."),
    (r"\.final_layernorm\.", ".shared_head.norm."),
    (r"^mtp_layers\.0\.", "model.layers.4."),
)


def write_nextn_draft(folder: Path, swapped: bool = False) -> str:
    """Write the library's MTP layer with DeepSeek's tensor names into `folder`, and return the folder.

    DeepSeek's MTP layer concatenates its two inputs in the same order. `swapped` swaps the two inputs.
    """
    tensors = load_file(HERE / "mtp/model.safetensors")
    for pattern, replacement in NEXTN:
        tensors = {re.sub(pattern, replacement, name): tensor for name, tensor in tensors.items()}
    if swapped:
        tensors["model.layers.4.eh_proj.weight"] = tensors["model.layers.4.eh_proj.weight"].roll(32, 1).contiguous()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    layer_config = json.loads((HERE / "mtp/config.json").read_text())["transformer_layer_config"]
    (folder / "config.json").write_text(json.dumps({**layer_config, "num_nextn_predict_layers": 1}))
    return str(folder)


def mtp_distance(tmp_path: Path, swapped: bool = False) -> float:
    """Return the largest relative difference of the logits of three steps.

    In the trainer's forward, the rows of a step attend only to rows of the same step.
    """

    def zero(tensors: Tensors) -> None:
        tensors["model.embed_tokens.weight"][0] = 0

    target = copy_of(str(HERE / "target"), tmp_path / "target", zero)
    draft = loaded_draft(write_nextn_draft(tmp_path / "draft", swapped), target)
    tensors = load_file(HERE / "mtp/numbers.safetensors")
    steps, rows = tensors["logits"].shape[:2]
    hidden, max_error = draft.fuse_aux(tensors["aux"][:rows]), 0.0
    for step in range(steps):
        tokens = tensors["tokens"][step + 1 : step + 1 + rows]
        normed, hidden = draft.forward(tokens, torch.arange(rows) + step, hidden, CausalAttention(draft.spec.layers))
        max_error = max(max_error, relative_error(draft.logits(normed).values, tensors["logits"][step]))
    return max_error


def test_mtp_layer_computes_the_same_numbers_as_speculators(tmp_path: Path) -> None:
    assert mtp_distance(tmp_path) < EXACT


def test_mtp_layer_with_swapped_inputs_changes_the_numbers(tmp_path: Path) -> None:
    assert mtp_distance(tmp_path, swapped=True) > 1e-3


def test_mtp_layer_in_speculators_format_is_refused_by_name() -> None:
    """Its tensors have the names of MiMo's MTP layer, which concatenates its inputs in the opposite order.

    A loader that took it for MiMo's layer would silently compute wrong numbers.
    """
    with pytest.raises(ConfigError, match="speculators' MTP layer"):
        loaded_draft(str(HERE / "mtp"), str(HERE / "target"))
