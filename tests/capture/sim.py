"""A simulated device whose tensors have shapes and no values: fake tensors on a torch backend called "sim".

An error is raised whenever a program reads a value or a count, uses a shape that depends on values, or mixes in a
tensor of another device. So a step that runs on this device has static shapes and never waits for its device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from cluster.device.staging import StagedLists, Staging
from cluster.engine import Engine

DEVICE_NAME = "sim"
_setup_privateuseone_for_python_backend(DEVICE_NAME)
FAKE_MODE = FakeTensorMode()  # one for all engines, because the product caches constants by device


@contextmanager
def simulated(engine: Engine) -> Iterator[None]:
    """Move the engine's programs to the simulated device. Only the staged lists of a step come from the host."""

    def send_without_numbers(staging: Staging) -> StagedLists:
        return StagedLists(
            torch.empty(sum(staging._lengths.values()), dtype=torch.int64, device=DEVICE_NAME), staging._lengths
        )

    with FAKE_MODE, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Staging, "send", send_without_numbers)
        _DeviceReplacer().replacement_of(engine._parts.lockstep.programs)
        yield


class _DeviceReplacer:
    """Replaces each tensor that an object holds, at any depth, by a tensor of the simulated device."""

    def __init__(self) -> None:
        self._replacements: dict[int, Any] = {}

    def replacement_of(self, original: Any) -> Any:
        """Return the replacement of `original`. An object of a class of `cluster` is changed in place and returned."""
        if id(original) not in self._replacements:
            self._replacements[id(original)] = original, self._make_replacement(original)
        return self._replacements[id(original)][1]

    def _make_replacement(self, original: Any) -> Any:
        if isinstance(original, Tensor):
            return torch.empty_strided(original.shape, original.stride(), dtype=original.dtype, device=DEVICE_NAME)
        if isinstance(original, torch.device):
            return torch.device(DEVICE_NAME)
        if isinstance(original, tuple):
            items = [self.replacement_of(item) for item in original]
            return type(original)(*items) if hasattr(original, "_fields") else tuple(items)
        if isinstance(original, list):
            original[:] = [self.replacement_of(item) for item in original]
        elif isinstance(original, dict):
            original.update({key: self.replacement_of(value) for key, value in original.items()})
        elif type(original).__module__.startswith("cluster."):
            self._replacements[id(original)] = original, original  # the object may refer to itself
            for name in _attribute_names(original):
                object.__setattr__(original, name, self.replacement_of(getattr(original, name)))
        return original


def _attribute_names(instance: Any) -> list[str]:
    names = list(getattr(instance, "__dict__", ()))
    return names + (
        [field.name for field in fields(instance) if field.name not in names] if is_dataclass(instance) else []
    )
