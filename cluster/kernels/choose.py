"""Which kernels a rank computes with."""

import torch

from cluster.config import ConfigError
from cluster.kernels.c_kernels import CKernels
from cluster.kernels.interface import Kernels
from cluster.kernels.library import KIND_OF, library
from cluster.kernels.torch_kernels import TorchKernels


def choose_kernels(backend: str, device: torch.device, dtype: torch.dtype) -> Kernels:
    """Those of the setting `attention_backend`; auto: C on a CPU, where it is compiled and knows `dtype`, else torch.

    Raises:
        ConfigError: C is asked for, and cannot be had here.
    """
    if backend == "torch":
        return TorchKernels()
    missing = None
    if device.type != "cpu":
        missing = f"runs on a CPU and device is {device.type}; set attention_backend to auto"
    elif dtype not in KIND_OF:
        known = ", ".join(str(each).removeprefix("torch.") for each in KIND_OF)
        missing = f"computes in {known}, and dtype is {str(dtype).removeprefix('torch.')}; set one of them, or auto"
    elif (found := library()) is None:
        missing = "is not compiled here; install gcc or clang, or set attention_backend to auto"
    else:
        return CKernels(found)
    if backend == "c":
        raise ConfigError(f"attention_backend c {missing}")
    return TorchKernels(f"torch; C {missing.split(';')[0]}")
