"""The environment variable BACKEND chooses the backend that `attention_backend="auto"` stands for in the tests.

- `c`, the default: the kernels in C.
- `torch`: the PyTorch reference kernels, as on a machine without a compiler.
- `triton`: the Triton kernels. Without a GPU they run in Triton's interpreter.
- `flashinfer`: the Triton kernels, with attention by the stand-in for FlashInfer.

A test that names an `attention_backend` keeps it.
"""

import os
from collections.abc import Callable
from typing import Any

import cluster.engine.backends as backends
from tests.flashinfer.stand_in import install_stand_in


def force_backend(set_attribute: Callable[[object, str, Any], None] = setattr) -> None:
    """Patch the product so that `auto` selects the backend that BACKEND names."""
    backend_name = os.environ.get("BACKEND", "c")
    if backend_name == "torch":
        set_attribute(backends, "library", lambda: None)
    elif backend_name == "triton":
        set_attribute(backends, "_c_kernels", lambda device, dtype: backends._triton_kernels(device))
    elif backend_name == "flashinfer":
        install_stand_in(set_attribute)
        set_attribute(backends, "_c_kernels", lambda device, dtype: backends._flashinfer_kernels(device, dtype))
    else:
        assert backend_name == "c", f"BACKEND={backend_name}: one of c, torch, triton, flashinfer"
