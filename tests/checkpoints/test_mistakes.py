"""Typical mistakes of a draft loader, made on purpose with the trained demo draft.

Each mistake lowers the acceptance, or the loader refuses the draft.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import cluster.engine.backends
import cluster.spec.draft
from cluster.arch.draft.sample import SAMPLE_FILE
from cluster.config import ConfigError
from cluster.engine import Engine
from cluster.engine.backends import PoolKind, bind_attention
from cluster.kernels.torch_kernels import TorchKernels
from cluster.kv.layer_pools import LayerPools
from cluster.spec.draft import EagleDraft
from tests.checkpoints.demo import DRAFT, accept_lens, mean, reference_run
from tests.unit.models.checkpoints import Tensors, copy_of

H = 256
MAX_ACCEPT_SHARE = 0.9  # with a mistake, the accept length is at most this share of the correct one


def aux_layer_ids(*layers: int) -> dict[str, object]:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers), "use_aux_hidden_state": True}}


def swap_input_halves(tensors: Tensors) -> None:
    for letter in "qkv":
        name = f"midlayer.self_attn.{letter}_proj.weight"
        tensors[name] = tensors[name].roll(H, 1)


def reverse_aux_order(tensors: Tensors) -> None:
    tensors["fc.weight"] = torch.cat(tensors["fc.weight"].split(H, 1)[::-1], 1)


def remove_final_norm(tensors: Tensors) -> None:
    del tensors["norm.weight"]


def add_norm_before_fc(tensors: Tensors) -> None:
    tensors["input_norm.weight"] = torch.ones(3 * H)


def make_d2t_absolute(tensors: Tensors) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(tensors["d2t"].shape[0])


ON_DISK: dict[str, tuple[Callable[[Tensors], None] | None, dict[str, object]]] = {
    "embedding and hidden swapped": (swap_input_halves, {}),
    "aux hidden states high to low": (reverse_aux_order, {}),
    "no final norm": (
        remove_final_norm,
        {"eagle_config": {**aux_layer_ids(2, 5, 8)["eagle_config"], "use_last_layernorm": False}},
    ),  # type: ignore[dict-item]
    "a norm on the wrong side of fc": (add_norm_before_fc, {}),
}
OVERRIDES: dict[str, dict[str, object]] = {
    "the normed hidden as residual": {"norm_before_residual": True},
    "the normed output fed back": {"recurrent": "post"},
}
MILD: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "aux ids one too high": (aux_layer_ids(3, 6, 9), {}),
    "aux ids one too low": (aux_layer_ids(1, 4, 7), {}),
    "ids counted as boundaries": ({}, {"aux_numbering": "boundaries"}),
    "rope over neighbouring pairs": ({}, {"rope_layout": "interleaved"}),
}
"""Mistakes that lower the acceptance of this draft only a little, each with changed config values and draft overrides.

Aux ids that are one too high cost nothing (333 steps for ten texts, as with the correct ids), ids that are one too low
cost 2%, and the other rope layout costs 12%. The reason is presumably that neighbouring boundaries of such a small
target have nearly the same hidden states. The check of the draft's sample refuses all of them.
"""
REFUSED: dict[str, tuple[Callable[[Tensors], None], str]] = {
    "a lost final norm": (remove_final_norm, r"norm\.weight' is missing"),
    "d2t read as absolute ids": (make_d2t_absolute, r"'d2t'.*must hold\s+offsets"),
}


def draft_with_mistake(parent: Path, change_tensors: Callable[[Tensors], None] | None = None, **config: object) -> str:
    """Copy the demo draft with changed tensors and config values, and return the folder of the copy.

    The copy has no sample, because the check of the sample would refuse the mistake.
    """
    folder = copy_of(DRAFT, parent / "draft", change_tensors, **config)
    (parent / "draft" / SAMPLE_FILE).unlink()
    return folder


def alternating_slow_params(names: Iterable[str]) -> list[Any]:
    """Return a test parameter for each name. Every second parameter has the marker `slow`."""
    return [pytest.param(name, marks=pytest.mark.slow if index % 2 else ()) for index, name in enumerate(names)]


@pytest.mark.parametrize("name", alternating_slow_params(MILD))
def test_mild_mistake_costs_little_acceptance_and_is_refused(name: str, tmp_path: Path) -> None:
    config, overrides = MILD[name]
    lens, texts = accept_lens(draft_with_mistake(tmp_path, **config), speculative_draft_overrides=overrides)
    assert lens != reference_run()[0]
    assert 0.8 < mean(lens) / mean(reference_run()[0]) < 1.02, "the acceptance must change only a little"
    assert texts == reference_run()[1], "a wrong draft must not change the text"
    with pytest.raises(ConfigError, match="is off by"):
        accept_lens(copy_of(DRAFT, tmp_path / "sampled", None, **config), speculative_draft_overrides=overrides)


@pytest.fixture(autouse=True)
def _measured_first() -> None:
    """Measure the correct accept lengths before a test changes the draft or the product code."""
    reference_run()


def assert_lowers_acceptance(lens: list[int]) -> None:
    assert mean(lens) <= MAX_ACCEPT_SHARE * mean(reference_run()[0])


def test_demo_draft_has_an_accept_length_above_two() -> None:
    assert mean(reference_run()[0]) > 2


@pytest.mark.parametrize("name", alternating_slow_params(ON_DISK))
def test_spoiled_checkpoint_lowers_acceptance_and_is_refused(name: str, tmp_path: Path) -> None:
    change, config = ON_DISK[name]
    lens, texts = accept_lens(draft_with_mistake(tmp_path, change, **config))
    assert_lowers_acceptance(lens)
    assert texts == reference_run()[1], "a wrong draft must not change the text"
    with pytest.raises(ConfigError, match="is off by"):
        accept_lens(copy_of(DRAFT, tmp_path / "sampled", change, **config))


@pytest.mark.parametrize("name", OVERRIDES)
def test_wrong_draft_override_lowers_acceptance_and_is_refused(name: str, tmp_path: Path) -> None:
    assert_lowers_acceptance(accept_lens(draft_with_mistake(tmp_path), speculative_draft_overrides=OVERRIDES[name])[0])
    with pytest.raises(ConfigError, match="is off by"):
        accept_lens(DRAFT, speculative_draft_overrides=OVERRIDES[name])


@pytest.mark.parametrize("name", REFUSED)
def test_a_broken_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    change, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        accept_lens(copy_of(DRAFT, tmp_path / "draft", change))


def test_unshifted_token_ids_lower_acceptance_and_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    original_extend_input = cluster.spec.draft.extend_input

    def shifted_extend_input(*args):  # type: ignore[no-untyped-def]
        unshifted = original_extend_input(*args)
        return replace(unshifted, token_ids=unshifted.token_ids.roll(1))

    monkeypatch.setattr(cluster.spec.draft, "extend_input", shifted_extend_input)
    assert_lowers_acceptance(accept_lens(draft_with_mistake(tmp_path))[0])
    with pytest.raises(ConfigError, match="is off by"):
        accept_lens(DRAFT)


def test_kv_pool_of_another_runner_lowers_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft levels read a KV pool of the correct shape that contains unrelated random numbers."""
    monkeypatch.setattr(cluster.engine.backends, "library", lambda: None)

    def spoil(engine: Engine) -> None:
        draft = engine._parts.lockstep.step._draft
        assert isinstance(draft, EagleDraft)
        runner, layer = draft._runner, draft._runner.model.spec.layer
        gather = runner.attention._gather
        kind = PoolKind(runner.pools.slots, gather, gather.table)
        pool, attention = bind_attention([layer], kind, runner.pools.dtype, False, TorchKernels())
        pool.kv.normal_(0, 3, generator=torch.Generator().manual_seed(5))
        wrong_runner = replace(runner, pools=LayerPools([pool], kind.slots, runner.pools.dtype), attention=attention)
        original_draft = draft.draft

        def draft_with_wrong_pool(*args):  # type: ignore[no-untyped-def]
            draft._runner = wrong_runner
            result = original_draft(*args)
            draft._runner = runner
            return result

        draft.draft = draft_with_wrong_pool  # type: ignore[method-assign]

    assert_lowers_acceptance(accept_lens(DRAFT, spoil)[0])
