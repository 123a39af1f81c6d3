"""`OVERLAP=1` runs these tests with the host a step ahead of a device that runs as late as it can."""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.late import delay_all
from tests.parity.poison import poisoned  # noqa: F401

torch.set_num_threads(1)


@pytest.fixture(scope="package", autouse=True)
def overlapped() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("OVERLAP") == "1":
            delay_all(patch)
        yield
