"""`BACKEND=torch` runs tests on the twins of the kernels, as on a machine without a compiler; `BACKEND=triton` on the
programs of Triton, without a GPU in its interpreter; `BACKEND=flashinfer` on these with FlashInfer's stand-in. Tests
that name their own `attention_backend` keep it.
"""

import os
from collections.abc import Callable
from typing import Any

import cluster.engine.backends as choose
from tests.flashinfer.stand_in import stand_in_serves


def force(set_attribute: Callable[[object, str, Any], None] = setattr) -> None:
    """Let `auto` take what the environment names."""
    named = os.environ.get("BACKEND", "c")
    if named == "torch":
        set_attribute(choose, "library", lambda: None)
    elif named == "triton":
        set_attribute(choose, "_c_kernels", lambda device, dtype: choose._triton_kernels(device))
    elif named == "flashinfer":
        stand_in_serves(set_attribute)
        set_attribute(choose, "_c_kernels", lambda device, dtype: choose._flashinfer_kernels(device, dtype))
    else:
        assert named == "c", f"BACKEND={named}: one of c, torch, triton, flashinfer"
