"""Which kernels a rank computes with."""

import importlib
import importlib.util

import torch

from cluster.config import ConfigError
from cluster.kernels.c_kernels import CKernels
from cluster.kernels.flashinfer import library as flashinfer_library
from cluster.kernels.interface import Kernels
from cluster.kernels.library import KIND_OF, library
from cluster.kernels.torch_kernels import TorchKernels


def choose_kernels(backend: str, device: torch.device, dtype: torch.dtype) -> Kernels:
    """Those of the setting `attention_backend`; auto: C on a CPU, Triton on a GPU, where they can be had, or torch.
    FlashInfer serves where it is named, as nothing has been measured yet.

    Raises:
        ConfigError: what is asked for cannot be had here.
    """
    if backend == "torch":
        return TorchKernels()
    name = backend if backend != "auto" else "triton" if device.type == "cuda" else "c"
    if name == "triton":
        kernels = _triton(device)
    else:
        kernels = _flashinfer(device, dtype) if name == "flashinfer" else _c(device, dtype)
    if not isinstance(kernels, str):
        return kernels
    if backend == "auto":
        return TorchKernels(f"torch; {name.title()} {kernels.split(';')[0]}")
    raise ConfigError(f"attention_backend {backend} {kernels}")


def _c(device: torch.device, dtype: torch.dtype) -> Kernels | str:
    """The kernels in C, or why there are none."""
    if device.type != "cpu":
        return f"runs on a CPU and device is {device.type}; set attention_backend to auto"
    if dtype not in KIND_OF:
        known = ", ".join(str(each).removeprefix("torch.") for each in KIND_OF)
        return f"computes in {known}, and dtype is {str(dtype).removeprefix('torch.')}; set one of them, or auto"
    if (found := library()) is None:
        return "is not compiled here; install gcc or clang, or set attention_backend to auto"
    return CKernels(found, dtype)


def _triton(device: torch.device) -> Kernels | str:
    """The kernels in Triton, or why there are none."""
    if importlib.util.find_spec("triton") is None:
        return "is not installed; pip install triton, or set attention_backend to auto"
    loaded = importlib.import_module("cluster.kernels.triton_kernels")  # takes a second
    if device.type != "cuda" and not loaded.INTERPRETED:
        return (
            f"runs on a GPU and device is {device.type}; set attention_backend to auto, or TRITON_INTERPRET=1 in the "
            "environment, which is slow"
        )
    kernels: Kernels = loaded.TritonKernels()
    return kernels


def _flashinfer(device: torch.device, dtype: torch.dtype) -> Kernels | str:
    """FlashInfer's attention and Triton's kernels, or why there are none."""
    found = flashinfer_library.find(device, dtype)
    if isinstance(found, str) or isinstance(triton := _triton(device), str):
        return found if isinstance(found, str) else triton
    kernels: Kernels = importlib.import_module("cluster.kernels.flashinfer.kernels").FlashInferKernels(found)
    return kernels
