"""Dtypes of stored weights, and the dtype in which a model computes; without torch."""

from collections.abc import Callable

from cluster.arch.safetensors.header import SIZES
from cluster.arch.safetensors.tensors import parameters
from cluster.arch.target import TargetArch

PLAIN = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Dtypes without quantisation: such tensors have no scales."""
BYTES = {dtype: SIZES[name] for name, dtype in PLAIN.items()}


MANY = 1 << 27
"""From this number of parameters on, weights in float32 fit no CPU cache, so a step is bound by reading weights."""


def computed_in(stored: str, dtype: str, device: str, narrow: bool = False) -> str:
    """Return the compute dtype for weights of dtype `stored` under the setting `dtype`.

    On a GPU `auto` keeps the stored dtype. On a CPU, and for dtypes without arithmetic, `auto` is float32. If `narrow`,
    bfloat16 weights stay bfloat16 on a CPU, because reading bfloat16 takes half the time of reading float32.
    """
    if dtype != "auto":
        return dtype
    kept = stored in BYTES if device == "cuda" else narrow and stored == "bfloat16"
    return stored if kept else "float32"


def compute_dtype(arch: TargetArch, dtype: str, device: str, in_c: Callable[[], bool] = lambda: True) -> str:
    """Return the compute dtype of a target. `in_c` returns whether a CPU's kernels are in C, which read bfloat16
    weights directly; it is called only if the answer depends on it.
    """
    narrow = dtype == "auto" and device == "cpu" and arch.dtype == "bfloat16" and parameters(arch) >= MANY and in_c()
    return computed_in(arch.dtype, dtype, device, narrow)


def cache_dtype(setting: str, dtype: str) -> str:
    """Return what KV caches hold under the setting `kv_cache_dtype`, for models that compute in `dtype`."""
    return dtype if setting == "auto" else setting
