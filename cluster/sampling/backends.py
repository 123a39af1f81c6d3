"""Which chooser goes with which kernels."""

import importlib

from cluster.kernels.interface import Kernels
from cluster.sampling.c_sampler import CSampler
from cluster.sampling.torch_sampler import TORCH, Sampler


def sampler_of(kernels: Kernels) -> Sampler:
    """The one that computes as `kernels` do."""
    if kernels.library is not None:
        return CSampler(kernels.library)
    if kernels.name in ("triton", "flashinfer"):
        loaded = importlib.import_module("cluster.sampling.triton_sampler")  # takes a second
        sampler: Sampler = loaded.TritonSampler()
        return sampler
    return TORCH
