"""Which chooser goes with which kernels."""

import importlib

from cluster.kernels.interface import Kernels
from cluster.sampling.c_sampler import CChooser
from cluster.sampling.torch_sampler import TORCH, Chooser


def chooser_of(kernels: Kernels) -> Chooser:
    """The one that computes as `kernels` do."""
    if kernels.library is not None:
        return CChooser(kernels.library)
    if kernels.name in ("triton", "flashinfer"):
        loaded = importlib.import_module("cluster.sampling.triton_sampler")  # takes a second
        chooser: Chooser = loaded.TritonChooser()
        return chooser
    return TORCH
