"""`BACKEND=torch` runs tests on the twins of the kernels, as on a machine without a compiler; `BACKEND=triton` on the
programs of Triton, without a GPU in its interpreter. Tests that name their own `attention_backend` keep it.
"""

import os
from collections.abc import Callable
from typing import Any

import cluster.kernels.choose as choose


def force(set_attribute: Callable[[object, str, Any], None] = setattr) -> None:
    """Let `auto` take what the environment names."""
    named = os.environ.get("BACKEND", "c")
    if named == "torch":
        set_attribute(choose, "library", lambda: None)
    elif named == "triton":
        set_attribute(choose, "_c", lambda device, dtype: choose._triton(device))
    else:
        assert named == "c", f"BACKEND={named}: one of c, torch, triton"
