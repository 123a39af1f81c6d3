"""What of a step goes with which kernels: how trees grow, and how their paths are accepted."""

import importlib
from typing import NamedTuple

from cluster.kernels.interface import Kernels
from cluster.spec.c_verify import CAccept
from cluster.spec.tree import Sprout, TorchGrowth
from cluster.spec.verify import Accept, accept


class TreeBackend(NamedTuple):
    """How trees are grown and accepted."""

    sprout: Sprout
    accept: Accept


def tree_backend_of(kernels: Kernels) -> TreeBackend:
    """The one that computes as `kernels` do."""
    if kernels.library is not None:
        return TreeBackend(TorchGrowth, CAccept(kernels.library))
    if kernels.name in ("triton", "flashinfer"):
        loaded = importlib.import_module("cluster.spec.triton_tree")  # takes a second
        return TreeBackend(loaded.TritonGrowth, loaded.accept)
    return TreeBackend(TorchGrowth, accept)
