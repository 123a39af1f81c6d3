"""A trap for what a step on a GPU would stop for: values that the host asks for, tensors that it sends."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import cluster
from cluster.capture.tape import host_value_read

ROOT = Path(cluster.__file__).parent


class Trap(TorchDispatchMode):
    """Counts, by place in `cluster/`, every operator that on a GPU would wait for the device or copy to it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> "Trap":
        self._patch.setattr(torch, "frombuffer", _counted(torch.frombuffer, self.sent))  # dispatch does not see it
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.undo()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = function._schema.name, kwargs or {}
        if host_value_read(function, args, kwargs):
            self.asked[_place()] += 1
        elif name == "aten::lift_fresh":  # torch.tensor of Python numbers
            self.sent[_place()] += 1
        return function(*args, **kwargs)


def _place() -> str:
    """The innermost function of `cluster/` on the stack, as `module.function`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT):
            return f"{'.'.join(path.relative_to(ROOT).with_suffix('').parts)}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


@contextmanager
def reads() -> Iterator[Counter[str]]:
    """Counts, by place, whole tensors that come back to the host: dispatch does not see them."""
    places: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("tolist", "numpy", "cpu"):
            patch.setattr(torch.Tensor, name, _counted(getattr(torch.Tensor, name), places))
        yield places


def _counted(true: Callable[..., Any], places: Counter[str]) -> Callable[..., Any]:
    def counted(*given: Any, **more: Any) -> Any:
        places[_place()] += 1
        return true(*given, **more)

    return counted
