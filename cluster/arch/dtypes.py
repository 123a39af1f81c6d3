"""Dtypes of stored weights, and the dtype in which a model computes. This module does not import torch."""

from collections.abc import Callable

from cluster.arch.safetensors.header import DTYPE_BYTES
from cluster.arch.safetensors.tensors import count_parameters
from cluster.arch.target import TargetArch

UNQUANTISED_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""The dtypes of unquantised tensors: a dict from their names in safetensors files to their names in torch."""
# Bytes per element of each dtype in which a model can compute.
COMPUTE_DTYPE_BYTES = {dtype: DTYPE_BYTES[name] for name, dtype in UNQUANTISED_DTYPES.items()}


MIN_BFLOAT16_PARAMETERS = 1 << 27
"""From this number of parameters on, weights in float32 fit no CPU cache, so a step is bound by reading weights."""


def select_compute_dtype(stored_dtype: str, setting: str, device: str, keep_bfloat16: bool = False) -> str:
    """Return the compute dtype for weights that are stored in `stored_dtype`; `setting` is the setting `dtype`.

    On a GPU `auto` keeps the stored dtype, or is float32 if no model can compute in the stored dtype. On a CPU `auto`
    is float32; but if `keep_bfloat16`, weights in bfloat16 stay bfloat16, because reading bfloat16 takes half the time
    of reading float32.
    """
    if setting != "auto":
        return setting
    keeps_stored_dtype = (
        stored_dtype in COMPUTE_DTYPE_BYTES if device == "cuda" else keep_bfloat16 and stored_dtype == "bfloat16"
    )
    return stored_dtype if keeps_stored_dtype else "float32"


def compute_dtype(arch: TargetArch, setting: str, device: str, has_c_kernels: Callable[[], bool] = lambda: True) -> str:
    """Return the compute dtype of a target. `has_c_kernels` returns whether a CPU's kernels are in C, which read
    bfloat16 weights directly; it is called only if the answer depends on it.
    """
    keep_bfloat16 = (
        setting == "auto"
        and device == "cpu"
        and arch.dtype == "bfloat16"
        and count_parameters(arch) >= MIN_BFLOAT16_PARAMETERS
        and has_c_kernels()
    )
    return select_compute_dtype(arch.dtype, setting, device, keep_bfloat16)


def cache_dtype(setting: str, model_dtype: str) -> str:
    """Return the dtype of KV caches. `setting` is the setting `kv_cache_dtype`; models compute in `model_dtype`."""
    return model_dtype if setting == "auto" else setting
