"""Dtypes of stored weights, and in which of them a model computes; without torch."""

from cluster.arch.safetensors.header import SIZES
from cluster.arch.safetensors.tensors import parameters
from cluster.arch.target import TargetArch

PLAIN = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Dtypes that need no dequantisation: such tensors have no scales beside them."""
BYTES = {dtype: SIZES[name] for name, dtype in PLAIN.items()}


MANY = 1 << 27
"""Parameters from which on a step on a CPU takes as long as reading them: their float32 fits no cache."""


def computed_in(stored: str, dtype: str, device: str, narrow: bool = False) -> str:
    """The compute dtype that the setting `dtype` gives weights of dtype `stored`; `auto` keeps theirs on a GPU.

    On a CPU, and for dtypes that nothing computes in, `auto` is float32; but bfloat16 stays where `narrow` weights are
    faster, as they are read in half the time.
    """
    if dtype != "auto":
        return dtype
    kept = stored in BYTES if device == "cuda" else narrow and stored == "bfloat16"
    return stored if kept else "float32"


def compute_dtype(arch: TargetArch, dtype: str, device: str, in_c: bool = True) -> str:
    """`computed_in` of a target; `in_c`: on a CPU its kernels are in C, which read narrow weights as they are."""
    auto = dtype == "auto" and device == "cpu" and arch.dtype == "bfloat16"
    return computed_in(arch.dtype, dtype, device, auto and in_c and parameters(arch) >= MANY)
