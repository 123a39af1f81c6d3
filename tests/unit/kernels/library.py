"""This machine's C kernels, for tests. If there are none, the functions below skip the test and give the reason."""

import os

import pytest

from cluster.kernels.c_kernels import CKernels
from cluster.kernels.library import Library, library


def c_library() -> Library:
    loaded_library = library()
    if loaded_library is None:
        pytest.skip("no C kernels here: the installation built no library, and there is no compiler")
    return loaded_library


def c_kernels() -> CKernels:
    return CKernels(c_library())


def skip_unless_c_backend() -> None:
    """Skip the test if there are no C kernels, or if `BACKEND` selects other kernels for engines."""
    c_library()
    if (backend := os.environ.get("BACKEND", "c")) != "c":
        pytest.skip(f"this test is for the C kernels, but BACKEND is {backend}")
