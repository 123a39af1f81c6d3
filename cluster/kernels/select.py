"""Selection of the kernels of a rank."""

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
    """Return the kernels for the setting `attention_backend`.

    `auto` is C on a CPU and Triton on a GPU, with torch as the fallback. FlashInfer is used only if it is named, as it
    has not been measured yet.

    Raises:
        ConfigError: the named backend is not available here.
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
    """Return the C kernels, or the reason why they are not available."""
    if device.type != "cpu":
        return f"runs on a CPU and device is {device.type}; set attention_backend to auto"
    if dtype not in KIND_OF:
        known = ", ".join(str(each).removeprefix("torch.") for each in KIND_OF)
        return f"computes in {known}, and dtype is {str(dtype).removeprefix('torch.')}; set one of them, or auto"
    if (found := library()) is None:
        return "is not compiled here; install gcc or clang, or set attention_backend to auto"
    return CKernels(found, dtype)


def _triton(device: torch.device) -> Kernels | str:
    """Return the Triton kernels, or the reason why they are not available."""
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
    """Return Triton kernels with FlashInfer's attention, or the reason why they are not available."""
    found = flashinfer_library.find(device, dtype)
    if isinstance(found, str) or isinstance(triton := _triton(device), str):
        return found if isinstance(found, str) else triton
    kernels: Kernels = importlib.import_module("cluster.kernels.flashinfer.kernels").FlashInferKernels(found)
    return kernels
