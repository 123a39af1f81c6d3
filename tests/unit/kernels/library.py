"""The kernels in C of this machine, for tests; without a compiler these are skipped, and say so."""

import os

import pytest

from cluster.kernels.c_kernels import CKernels
from cluster.kernels.library import Library, library


def c_library() -> Library:
    found = library()
    if found is None:
        pytest.skip("no C kernels here: no library was made at installation, and there is no compiler")
    return found


def c_kernels() -> CKernels:
    return CKernels(c_library())


def c_serves() -> None:
    """Skip where `BACKEND` has engines served by others than the kernels in C."""
    c_library()
    if (named := os.environ.get("BACKEND", "c")) != "c":
        pytest.skip(f"it is said of the kernels in C, and BACKEND is {named}")
