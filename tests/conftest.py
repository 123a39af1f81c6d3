"""Environment variables that must be set before libraries are imported, and the pytest hooks of all tests.

Without a GPU, Triton kernels run in Triton's interpreter. `huggingface_hub` is offline: no test downloads a model.
"""

import gc
import os
from collections.abc import Iterator

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.support.backend import force_backend


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector off while test modules are imported, and let it never examine what exists then: it
    would take a fifth of the CPU time of the fast tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests with the marker `early` first."""
    items.sort(key=lambda item: item.get_closest_marker("early") is None)


@pytest.fixture(scope="session", autouse=True)
def backend() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        force_backend(patch.setattr)
        yield


@pytest.fixture(scope="session", autouse=True)
def threads_of_session() -> int:
    return torch.get_num_threads()


@pytest.fixture(autouse=True)
def threads(threads_of_session: int) -> None:
    """Give every test the same number of threads: an engine that an earlier test built has changed it."""
    torch.set_num_threads(threads_of_session)
