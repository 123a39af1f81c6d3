"""Attention with FlashInfer's stand-in matches the definition of attention, however few tokens the plan knows of."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch

from cluster.arch.cell import Cell
from cluster.attention.flashinfer import plans as flashinfer_plans
from cluster.attention.flashinfer.backend import FlashInferAttention
from cluster.attention.flashinfer.plans import RunnerPlans
from cluster.attention.flashinfer.readers import paged_view
from cluster.attention.shape import AttentionShape
from cluster.batch import HostBounds
from cluster.kernels.flashinfer.library import Share
from cluster.kv.pool import KVPool
from tests.flashinfer.stand_in import DEVICE, stand_in
from tests.unit.attention.dense import CPU, Case
from tests.unit.attention.test_gather_methods import KINDS, SHAPES, make_case

QUICK = (("all", "full", 3), ("all", "wide window", 0), ("all", "later runners", 0), ("wide", "latent", 0))
SERVED_KINDS = [
    kind for kind, given in KINDS.items() if not {"fp8", "values", "chunked"} & {key for key in given if given[key]}
]
SLOW = [
    (shape, kind, (0, 3, 20)[(s + k) % 3])
    for (s, shape), (k, kind) in product(enumerate(SHAPES), enumerate(SERVED_KINDS))
    if shape != "single rows"  # with FlashInfer, requests do not share rows
]
"""Every shape with every kind. Each shape and each kind occurs with every number of unknown tokens (0, 3 and 20)."""


def attention_factory(make_case: Case, unknown: int) -> Callable[..., FlashInferAttention]:
    """Return a factory of `FlashInferAttention`. The host bounds that it gets leave out the last `unknown` tokens of
    each request.
    """

    class AttentionWithUnknownLengths(FlashInferAttention):
        def prepare(self, bounds: HostBounds) -> None:
            super().prepare(
                bounds._replace(min_seq_lens=tuple(max(0, count - unknown) for count in make_case.committed))
            )

    def make(pool: KVPool, table: Any, shape: AttentionShape) -> AttentionWithUnknownLengths:
        shares = [Share(not window, not (window and make_case.latent)) for window in shape.sliding_windows]
        return AttentionWithUnknownLengths(pool, table, shape, stand_in(), shares)

    return make


@pytest.mark.parametrize(
    ("shape", "kind", "unknown"),
    [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW if each not in QUICK)],
)
def test_flashinfer_attention_matches_the_definition(shape: str, kind: str, unknown: int) -> None:
    attention_case = make_case(shape, kind, 4, "tail" if unknown else "scattered")
    before = DEVICE.runs
    assert torch.allclose(
        attention_case.backend_output(make=attention_factory(attention_case, unknown)),
        attention_case.expected(),
        atol=1e-12,
        rtol=0,
    )
    expects_tree_run = (
        not (attention_case.window or attention_case.first) and max(attention_case.committed, default=0) > unknown
    )
    expects_prompt_run = (
        bool(attention_case.chunks)
        and not attention_case.first
        and not (attention_case.latent and attention_case.window)
    )
    assert DEVICE.runs - before == expects_tree_run + expects_prompt_run


def test_flashinfer_attention_is_right_when_recent_lengths_are_unknown() -> None:
    """A step under way has committed more tokens than the plan knows of. FlashInfer's result covers only the tokens of
    the plan; the other tokens must still be attended.
    """
    attention_case = Case(4, 2, (9, 30, 2), (-1, 0, 0), (), 4, "scattered", sunk=True)
    for unknown in (0, 1, 2, 8, 29):
        assert torch.allclose(
            attention_case.backend_output(make=attention_factory(attention_case, unknown)),
            attention_case.expected(),
            atol=1e-12,
            rtol=0,
        )


def test_paged_view_shares_the_memory_of_the_kv_pool() -> None:
    pool = KVPool(3, 24, Cell(2, 8, 8), torch.float32, CPU)
    pool.kv.copy_(torch.randn(pool.kv.shape))
    view = paged_view(pool.kv[1], 4)
    assert view.shape == (6, 2, 4, 2, 8) and view.data_ptr() == pool.kv[1].data_ptr()
    keys, values = view.unbind(1)
    assert keys.stride() == values.stride() == (4 * 32, 32, 8, 1)
    for slot in range(24):
        assert torch.equal(keys[slot // 4, slot % 4], pool.kv[1, slot, 0])
        assert torch.equal(values[slot // 4, slot % 4], pool.kv[1, slot, 1])


def test_flashinfer_attention_refuses_an_fp8_pool() -> None:
    """The cells of an FP8 pool are codes and scales, and FlashInfer would read them as numbers. `EngineConfig` already
    refuses such a pool; the attention refuses it too.
    """
    attention_case = Case(4, 2, (9, 20), (-1,), (), 4, "run")
    fp8_pool = KVPool(1, 64, Cell(2, 8, 8), torch.float64, CPU, fp8=True)
    with pytest.raises(AssertionError, match="other scales"):
        attention_factory(attention_case, 0)(fp8_pool, attention_case.table, AttentionShape(4, (None,), 0.3))


class OverlappedSteps:
    """Calls `RunnerPlans` as the steps of a host do that is one step ahead of the device."""

    def __init__(self, plans: RunnerPlans) -> None:
        self.plans = plans

    def run(self, count: int) -> None:
        for step in range(count):
            DEVICE.begin()
            self.plans.begin(HostBounds(20, ((0, 3),), min_seq_lens=(9, 10 + step), buffer_set=step % 2))
            for key in (flashinfer_plans.ForwardKey(4), flashinfer_plans.ForwardKey(0)):
                assert self.plans._request_plan(key) is not None
            if step:
                DEVICE.finish()
        DEVICE.finish()


@pytest.fixture
def plans() -> Iterator[RunnerPlans]:
    attention_case = Case(4, 2, (9, 20), (-1,), (), 4, "run")
    attention = attention_factory(attention_case, 0)(
        KVPool(1, 64, Cell(2, 8, 8), torch.float64, CPU), attention_case.table, AttentionShape(4, (None,), 0.3)
    )
    yield attention._plans
    DEVICE.read = DEVICE.begun


def test_plan_under_way_is_not_overwritten_with_two_wrapper_sets(plans: RunnerPlans) -> None:
    before = DEVICE.plans
    OverlappedSteps(plans).run(4)
    assert DEVICE.plans - before == 8, "each of the two kinds of forward must be planned once per step"
    assert [len(wrapper_plans) for wrapper_plans in plans._eager_plans] == [2, 2]


def test_single_wrapper_set_overwrites_a_plan_under_way(plans: RunnerPlans) -> None:
    plans._eager_plans = (plans._eager_plans[0],) * 2
    with pytest.raises(AssertionError, match="while its copy may be under way"):
        OverlappedSteps(plans).run(2)


def test_plans_of_unused_forward_keys_are_evicted(plans: RunnerPlans) -> None:
    for rows_per_request in range(1, 60):
        plans.begin(HostBounds(20, min_seq_lens=(9, 10)))
        assert plans._request_plan(flashinfer_plans.ForwardKey(rows_per_request)) is not None
    assert max(len(wrapper_plans) for wrapper_plans in plans._eager_plans) <= flashinfer_plans.MAX_PLANS
