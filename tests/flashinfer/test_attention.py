"""Attention with FlashInfer's stand-in gives what the definition says, whatever is known of lengths beforehand."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.arch import LayerGeometry
from cluster.attention.flashinfer_backend import FlashInferAttention
from cluster.attention.flashinfer_readers import paged_view
from cluster.batch import HostBounds
from cluster.kernels.flashinfer_library import FlashInfer, Share
from cluster.kv.page_table import PageTable
from cluster.kv.pool import KVPool
from tests.flashinfer.stand_in import DEVICE, stand_in
from tests.unit.attention.dense import Case
from tests.unit.attention.test_twins import KINDS, SHAPES, case

CPU = torch.device("cpu")


class Known(FlashInferAttention):
    """Attention that is told of each request all but the last `unknown` tokens."""

    unknown = 0

    def __init__(self, pool: KVPool, table: PageTable, heads: int, windows: Any, scale: float, value: int) -> None:
        shares = [Share(not window, pool.kv.shape[2] == 2 or not window) for window in windows]
        super().__init__(pool, table, heads, windows, scale, value, stand_in(), shares)
        self.table = table

    def prepare(self, bounds: HostBounds) -> None:
        super().prepare(bounds._replace(least=tuple(max(0, count - self.unknown) for count in self.committed)))

    committed: tuple[int, ...] = ()


def given(one: Case, unknown: int) -> Tensor:
    class Told(Known):
        committed = tuple(one.committed)

    Told.unknown = unknown
    return one.given(make=Told)


QUICK = ("all", "wide", "one row each")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "shape", [pytest.param(shape, marks=() if shape in QUICK else pytest.mark.slow) for shape in SHAPES]
)
@pytest.mark.parametrize("unknown", [0, 3, pytest.param(20, marks=pytest.mark.slow)])
def test_it_gives_what_the_definition_says(shape: str, kind: str, unknown: int) -> None:
    one = case(shape, kind, 4, "tail" if unknown else "scattered")
    before = DEVICE.runs
    assert torch.allclose(given(one, unknown), one.expected(), atol=1e-12, rtol=0)
    whole = one.window is None and not one.first
    texts = bool(one.chunks) and not one.first and not (one.latent and one.window)
    assert DEVICE.runs - before == (whole and max(one.committed, default=0) > unknown) + texts
