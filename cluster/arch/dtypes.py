"""Dtypes of stored weights, and in which of them a model computes; without torch."""

from cluster.arch.safetensors.header import SIZES

PLAIN = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Dtypes that need no dequantisation: such tensors have no scales beside them."""
BYTES = {dtype: SIZES[name] for name, dtype in PLAIN.items()}


def computed_in(stored: str, dtype: str, device: str) -> str:
    """The compute dtype that the setting `dtype` gives weights of dtype `stored`; `auto` keeps theirs on a GPU.

    On a CPU, where half precision is slower, and for dtypes that nothing computes in, `auto` is float32.
    """
    if dtype != "auto":
        return dtype
    return stored if device == "cuda" and stored in BYTES else "float32"
