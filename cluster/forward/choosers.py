"""Which chooser goes with which kernels."""

import importlib

from cluster.forward.c_chooser import CChooser
from cluster.forward.chooser import TORCH, Chooser
from cluster.kernels.interface import Kernels


def chooser_of(kernels: Kernels) -> Chooser:
    """The one that computes as `kernels` do."""
    if kernels.library is not None:
        return CChooser(kernels.library)
    if kernels.name in ("triton", "flashinfer"):
        loaded = importlib.import_module("cluster.forward.triton_chooser")  # takes a second
        chooser: Chooser = loaded.TritonChooser()
        return chooser
    return TORCH
