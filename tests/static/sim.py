"""A device on which nothing can be asked: tensors with shapes and no numbers, on a backend of that name.

A value, a count, a shape that follows from numbers, a tensor of another device: each raises. So a step that runs here
has static shapes and never waits for its device.
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

NAME = "sim"
_setup_privateuseone_for_python_backend(NAME)
FAKE = FakeTensorMode()  # one for all engines: constants of a device are kept


@contextmanager
def simulated(engine: Engine) -> Iterator[None]:
    """The engine's programs on that device; what a step sends is the one thing that comes from the host."""

    def sent(staging: Staging) -> StagedLists:
        return StagedLists(
            torch.empty(sum(staging._lengths.values()), dtype=torch.int64, device=NAME), staging._lengths
        )

    with FAKE, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Staging, "send", sent)
        _Move().into(engine._parts.lockstep.programs)
        yield


class _Move:
    """Puts a tensor of that device in place of each tensor that an object holds, however deep."""

    def __init__(self) -> None:
        self._done: dict[int, Any] = {}

    def into(self, thing: Any) -> Any:
        """What is to stand in place of `thing`: itself, changed, if it is an object of ours."""
        if id(thing) not in self._done:
            self._done[id(thing)] = thing, self._moved(thing)
        return self._done[id(thing)][1]

    def _moved(self, thing: Any) -> Any:
        if isinstance(thing, Tensor):
            return torch.empty_strided(thing.shape, thing.stride(), dtype=thing.dtype, device=NAME)
        if isinstance(thing, torch.device):
            return torch.device(NAME)
        if isinstance(thing, tuple):
            items = [self.into(item) for item in thing]
            return type(thing)(*items) if hasattr(thing, "_fields") else tuple(items)
        if isinstance(thing, list):
            thing[:] = [self.into(item) for item in thing]
        elif isinstance(thing, dict):
            thing.update({key: self.into(value) for key, value in thing.items()})
        elif type(thing).__module__.startswith("cluster."):
            self._done[id(thing)] = thing, thing  # it may hold itself
            for name in _names(thing):
                object.__setattr__(thing, name, self.into(getattr(thing, name)))
        return thing


def _names(thing: Any) -> list[str]:
    names = list(getattr(thing, "__dict__", ()))
    return names + ([field.name for field in fields(thing) if field.name not in names] if is_dataclass(thing) else [])
