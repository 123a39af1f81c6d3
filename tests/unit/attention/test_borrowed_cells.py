"""Tests of attention that reads the keys and values of another layer and writes none of its own (Gemma-4)."""

import pytest

from cluster.attention.c_backend import CAttention
from cluster.attention.gather import Gather
from cluster.attention.torch_backend import TorchAttention
from tests.unit.attention.borrowed import KINDS, check_borrowed
from tests.unit.kernels.library import c_library


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["torch", "c"])
def test_a_call_without_cells_reads_those_of_the_call_before(backend: str, kind: str) -> None:
    if backend == "torch":
        check_borrowed(kind, lambda pool, table, shape: TorchAttention(pool, Gather(table, 3), shape))
    else:
        check_borrowed(kind, lambda *arguments: CAttention(*arguments, c_library()))
