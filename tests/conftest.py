"""`BACKEND=torch` runs tests on the twins of the kernels, as on a machine without a compiler. Without a GPU programs of
Triton run in its interpreter, which has to be said before Triton is loaded.
"""

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import cluster.kernels.choose


@pytest.fixture(scope="session", autouse=True)
def backend() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("BACKEND") == "torch":
            patch.setattr(cluster.kernels.choose, "library", lambda: None)
        yield
