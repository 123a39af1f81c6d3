"""`BACKEND=torch` runs tests on the twins of the kernels, as on a machine without a compiler."""

import os
from collections.abc import Iterator

import pytest

import cluster.kernels.choose


@pytest.fixture(scope="session", autouse=True)
def backend() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("BACKEND") == "torch":
            patch.setattr(cluster.kernels.choose, "library", lambda: None)
        yield
