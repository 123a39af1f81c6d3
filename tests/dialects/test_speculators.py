"""Drafts made, saved and run by `speculators` itself: ours loads the files as they are and computes the same numbers.

How the numbers were made, and which function of the library gives what: `speculators/make.py`.
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
from tests.dialects.speculators.registry import EAGLE1, FIXTURES, HERE
from tests.tiny import target_folder
from tests.unit.models.checkpoints import Tensors, copy_of
from tests.unit.models.test_drafts import Causal, loaded

EXACT = 1e-9
Windows = Callable[[tuple[DraftLayer, ...], int], tuple[DraftLayer, ...]]


def as_served(layers: tuple[DraftLayer, ...], level: int) -> tuple[DraftLayer, ...]:
    """A window is counted from the row's own position, in every level."""
    return layers


def as_trained(layers: tuple[DraftLayer, ...], level: int) -> tuple[DraftLayer, ...]:
    """The trainer's forward cuts the window out of step 0 and puts the tokens of later steps on top."""
    return tuple(
        replace(each, geometry=replace(g, sliding_window=g.sliding_window + level))
        if (g := each.geometry).sliding_window
        else each
        for each in layers
    )


def relative(ours: Tensor, theirs: Tensor) -> float:
    assert theirs.isfinite().all()
    assert ours.isfinite().all()
    return float((ours - theirs).abs().max() / theirs.abs().max())


def draft_of(name: str, **overrides: object) -> DraftModel:
    return loaded(str(HERE / name), str(HERE / "target") if name in EAGLE1 else target_folder(), **overrides)


def distances(name: str, windows: Windows = as_trained, **overrides: object) -> Tensor:
    """Largest relative difference of logits and of recurrent hidden states, `[levels]`, over every row as the last."""
    draft = draft_of(name, **overrides)
    held = load_file(Path(HERE, name, "numbers.safetensors"))
    logits, entering = held["logits"], held["entering"]
    steps, rows = logits.shape[:2]
    assert logits.dtype == torch.float64
    following = torch.cat([held["tokens"][1:], torch.zeros(steps, dtype=torch.int64)])
    fused = draft.fuse_aux(held["aux"])
    worst = torch.zeros(steps)
    worst[0] = relative(fused, entering[0])
    for last in range(rows):
        attend, hidden, level_rows = Causal(draft.spec.layers), fused[: last + 1], torch.arange(last + 1)
        for level in range(steps):
            attend.layers = [each.geometry for each in windows(draft.spec.layers, level)]
            normed, recurrent = draft.forward(following[level_rows], level_rows, hidden, attend)
            seen = level_rows if level == 0 else torch.tensor([last])
            found = [relative(draft.logits(normed).values, logits[level, seen])]
            if level + 1 < steps:
                found.append(relative(recurrent, entering[level + 1, seen]))
            worst[level] = max(float(worst[level]), *found)
            hidden, level_rows = recurrent[-1:], level_rows[-1:] + 1
    return worst


@pytest.mark.parametrize("name", [*FIXTURES, *EAGLE1])
def test_served_draft_computes_the_same_numbers_as_speculators(name: str) -> None:
    assert distances(name).max() < EXACT


@pytest.mark.parametrize("name", FIXTURES)
def test_speculators_config_gives_the_intended_draft_spec(name: str) -> None:
    made = FIXTURES[name]
    spec = draft_of(name).spec
    flags = {flag: made.flags.get(flag, False) for flag in ("norm_before_fc", "fc_norm", "norm_before_residual")}
    assert {flag: getattr(spec, flag) for flag in flags} == flags
    assert spec.recurrent == ("post" if made.flags.get("norm_output") else "pre")
    assert (spec.dialect, spec.aux_boundaries, spec.draft_vocab_size) == ("speculators", made.boundaries, made.vocab)
    assert [layer.geometry.sliding_window for layer in spec.layers] == [
        None if i in made.full else made.window for i in range(made.layers)
    ]


@pytest.mark.parametrize("name", [name for name, made in FIXTURES.items() if made.window])
def test_sliding_window_of_the_trainer_grows_with_the_level(name: str) -> None:
    """The one thing served otherwise: `sliding_window` tokens are seen in every level, the row itself included."""
    found = distances(name, as_served)
    assert found[0] < EXACT, "no difference in the first level"
    assert found[1:].min() > 1e-3


FACTS = ("norm_before_residual", "recurrent", "rope_layout")


@pytest.mark.parametrize(
    ("name", "fact"), [*((name, fact) for name in FIXTURES for fact in FACTS), *((name, FACTS[2]) for name in EAGLE1)]
)
def test_wrong_draft_override_changes_the_numbers(name: str, fact: str) -> None:
    """So the numbers tell the readings apart."""
    spec = draft_of(name).spec
    other = {
        "norm_before_residual": not spec.norm_before_residual,
        "recurrent": "pre" if spec.recurrent == "post" else "post",
        "rope_layout": "interleaved",
    }
    assert distances(name, **{fact: other[fact]}).max() > 1e-3


NEXTN = (
    (r"\.token_layernorm\.", ".enorm."),
    (r"\.hidden_layernorm\.", ".hnorm."),
    (r"\.input_proj\.", ".eh_proj."),
    (r"\.final_layernorm\.", ".shared_head.norm."),
    (r"^mtp_layers\.0\.", "model.layers.4."),
)


def nextn(to: Path, swapped: bool = False) -> str:
    """The library's MTP layer under DeepSeek's names, which concatenates in the same order."""
    held = load_file(HERE / "mtp/model.safetensors")
    for theirs, ours in NEXTN:
        held = {re.sub(theirs, ours, name): tensor for name, tensor in held.items()}
    if swapped:
        held["model.layers.4.eh_proj.weight"] = held["model.layers.4.eh_proj.weight"].roll(32, 1).contiguous()
    to.mkdir()
    save_file(held, to / "model.safetensors")
    inner = json.loads((HERE / "mtp/config.json").read_text())["transformer_layer_config"]
    (to / "config.json").write_text(json.dumps({**inner, "num_nextn_predict_layers": 1}))
    return str(to)


def mtp_distance(tmp_path: Path, swapped: bool = False) -> float:
    """Largest relative difference of the logits of three steps; in the trainer's forward a step has no memory."""

    def zero(held: Tensors) -> None:
        held["model.embed_tokens.weight"][0] = 0

    target = copy_of(str(HERE / "target"), tmp_path / "target", zero)
    draft = loaded(nextn(tmp_path / "draft", swapped), target)
    held = load_file(HERE / "mtp/numbers.safetensors")
    steps, rows = held["logits"].shape[:2]
    hidden, worst = draft.fuse_aux(held["aux"][:rows]), 0.0
    for step in range(steps):
        tokens = held["tokens"][step + 1 : step + 1 + rows]
        normed, hidden = draft.forward(tokens, torch.arange(rows) + step, hidden, Causal(draft.spec.layers))
        worst = max(worst, relative(draft.logits(normed).values, held["logits"][step]))
    return worst


def test_mtp_layer_computes_the_same_numbers_as_speculators(tmp_path: Path) -> None:
    assert mtp_distance(tmp_path) < EXACT


def test_mtp_layer_with_swapped_inputs_changes_the_numbers(tmp_path: Path) -> None:
    assert mtp_distance(tmp_path, swapped=True) > 1e-3


def test_mtp_layer_in_speculators_format_is_refused_by_name() -> None:
    """Its tensors are named as MiMo's, whose order is the other one: read as such it would be silently wrong."""
    with pytest.raises(ConfigError, match="speculators' MTP layer"):
        loaded(str(HERE / "mtp"), str(HERE / "target"))
