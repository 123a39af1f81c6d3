"""What libraries are told before they are loaded: programs of Triton run in its interpreter where there is no GPU, and
no test asks a hub on the internet for a model.
"""

import os
from collections.abc import Iterator

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.backend import force


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("early") is None)


@pytest.fixture(scope="session", autouse=True)
def backend() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        force(patch.setattr)
        yield
