"""Attention with FlashInfer's stand-in gives what the definition says, whatever is known of lengths beforehand."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch

from cluster.arch.cell import CodedCell
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
from tests.unit.attention.test_gather_methods import KINDS, SHAPES, case

QUICK = (("all", "full", 3), ("all", "wide window", 0), ("all", "later runners", 0), ("wide", "latent", 0))
READ = [kind for kind, given in KINDS.items() if not given.get("fp8")]
SLOW = [(shape, kind, (0, 3, 20)[(s + k) % 3]) for (s, shape), (k, kind) in product(enumerate(SHAPES), enumerate(READ))]
"""Every shape with every kind; each of them meets every number of unknown tokens."""


def maker(one: Case, unknown: int) -> Callable[..., FlashInferAttention]:
    """Makes attention that is told of each request's tokens all but the last `unknown`."""

    class Told(FlashInferAttention):
        def prepare(self, bounds: HostBounds) -> None:
            super().prepare(bounds._replace(min_seq_lens=tuple(max(0, count - unknown) for count in one.committed)))

    def make(pool: KVPool, table: Any, shape: AttentionShape) -> Told:
        shares = [Share(not window, not (window and one.latent)) for window in shape.sliding_windows]
        return Told(pool, table, shape, stand_in(), shares)

    return make


@pytest.mark.parametrize(
    ("shape", "kind", "unknown"),
    [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW if each not in QUICK)],
)
def test_flashinfer_attention_matches_the_definition(shape: str, kind: str, unknown: int) -> None:
    one = case(shape, kind, 4, "tail" if unknown else "scattered")
    before = DEVICE.runs
    assert torch.allclose(one.given(make=maker(one, unknown)), one.expected(), atol=1e-12, rtol=0)
    of_trees = not (one.window or one.first) and max(one.committed, default=0) > unknown
    of_texts = bool(one.chunks) and not one.first and not (one.latent and one.window)
    assert DEVICE.runs - before == of_trees + of_texts


def test_flashinfer_attention_is_right_when_recent_lengths_are_unknown() -> None:
    """A step under way has committed more: what FlashInfer gives of it must not count as what is committed now."""
    one = Case(4, 2, (9, 30, 2), (-1, 0, 0), (), 4, "scattered", sunk=True)
    for unknown in (0, 1, 2, 8, 29):
        assert torch.allclose(one.given(make=maker(one, unknown)), one.expected(), atol=1e-12, rtol=0)


def test_paged_view_shares_the_memory_of_the_kv_pool() -> None:
    pool = KVPool(3, 24, (2, 2, 8), torch.float32, CPU)
    pool.kv.copy_(torch.randn(pool.kv.shape))
    view = paged_view(pool.kv[1], 4)
    assert view.shape == (6, 2, 4, 2, 8) and view.data_ptr() == pool.kv[1].data_ptr()
    keys, values = view.unbind(1)
    assert keys.stride() == values.stride() == (4 * 32, 32, 8, 1)
    for slot in range(24):
        assert torch.equal(keys[slot // 4, slot % 4], pool.kv[1, slot, 0])
        assert torch.equal(values[slot // 4, slot % 4], pool.kv[1, slot, 1])


def test_flashinfer_attention_refuses_an_fp8_pool() -> None:
    """`EngineConfig` refuses it before; its cells are codes and scales, which FlashInfer would read as numbers."""
    one, cell = Case(4, 2, (9, 20), (-1,), (), 4, "run"), (2, 2, 8)
    coded = KVPool(1, 64, cell, torch.float64, CPU, CodedCell(cell))
    with pytest.raises(AssertionError, match="other scales"):
        maker(one, 0)(coded, one.table, AttentionShape(4, (None,), 0.3, 8))


class Steps:
    """Steps of a host that is one ahead, as `RunnerPlans` sees them."""

    def __init__(self, plans: RunnerPlans) -> None:
        self.plans = plans

    def run(self, count: int) -> None:
        for at in range(count):
            DEVICE.begin()
            self.plans.begin(HostBounds(20, ((0, 3),), min_seq_lens=(9, 10 + at), buffer_set=at % 2))
            for key in (flashinfer_plans.ForwardKey(4), flashinfer_plans.ForwardKey(0)):
                assert self.plans._request_plan(key) is not None
            if at:
                DEVICE.finish()
        DEVICE.finish()


@pytest.fixture
def plans() -> Iterator[RunnerPlans]:
    one = Case(4, 2, (9, 20), (-1,), (), 4, "run")
    made = maker(one, 0)(KVPool(1, 64, (2, 2, 8), torch.float64, CPU), one.table, AttentionShape(4, (None,), 0.3, 8))
    yield made._plans
    DEVICE.read = DEVICE.begun


def test_plan_under_way_is_not_overwritten_with_two_wrapper_sets(plans: RunnerPlans) -> None:
    before = DEVICE.plans
    Steps(plans).run(4)
    assert DEVICE.plans - before == 8, "two forwards, planned once a step"
    assert [len(held) for held in plans._eager_plans] == [2, 2]


def test_single_wrapper_set_overwrites_a_plan_under_way(plans: RunnerPlans) -> None:
    plans._eager_plans = (plans._eager_plans[0],) * 2
    with pytest.raises(AssertionError, match="while its copy may be under way"):
        Steps(plans).run(2)


def test_plans_of_unused_forward_keys_are_evicted(plans: RunnerPlans) -> None:
    for each in range(1, 60):
        plans.begin(HostBounds(20, min_seq_lens=(9, 10)))
        assert plans._request_plan(flashinfer_plans.ForwardKey(each)) is not None
    assert max(len(held) for held in plans._eager_plans) <= flashinfer_plans.MAX_PLANS
