"""Which implementation grows trees and accepts paths, for each kind of kernels."""

import importlib
from typing import NamedTuple

from cluster.kernels.interface import Kernels
from cluster.spec.c_verify import CAccept
from cluster.spec.tree import Sprout, TorchGrowth
from cluster.spec.verify import Accept, accept


class TreeBackend(NamedTuple):
    """The implementations that grow trees and accept paths."""

    sprout: Sprout
    accept: Accept


def tree_backend_of(kernels: Kernels) -> TreeBackend:
    """Return the implementations that go with `kernels`: in C, by Triton, or by torch."""
    if kernels.library is not None:
        return TreeBackend(TorchGrowth, CAccept(kernels.library))
    if kernels.name in ("triton", "flashinfer"):
        loaded = importlib.import_module("cluster.spec.triton_tree")  # the import takes a second
        return TreeBackend(loaded.TritonGrowth, loaded.accept)
    return TreeBackend(TorchGrowth, accept)
