"""Which sampler goes with which kernels."""

import importlib

from cluster.kernels.interface import Kernels
from cluster.sampling.c_sampler import CSampler
from cluster.sampling.torch_sampler import TORCH, Sampler


def sampler_of(kernels: Kernels) -> Sampler:
    """Return the sampler that goes with `kernels`: in C, by Triton, or by torch."""
    if kernels.library is not None:
        return CSampler(kernels.library)
    if kernels.name in ("triton", "flashinfer"):
        loaded = importlib.import_module("cluster.sampling.triton_sampler")  # takes a second
        sampler: Sampler = loaded.TritonSampler()
        return sampler
    return TORCH
