"""Counts operators for which a step on a GPU would stop: the host reads a value, or sends a tensor to the device."""

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


class TransferTrap(TorchDispatchMode):
    """While entered, counts the operators that on a GPU would wait for the device (`host_reads`) or copy a tensor to it
    (`host_sends`), by the function of `cluster/` that called them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.host_reads: Counter[str] = Counter()
        self.host_sends: Counter[str] = Counter()
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> "TransferTrap":
        self._patch.setattr(
            torch, "frombuffer", _with_count(torch.frombuffer, self.host_sends)
        )  # torch does not dispatch it
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.undo()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = function._schema.name, kwargs or {}
        if host_value_read(function, args, kwargs):
            self.host_reads[_calling_product_function()] += 1
        elif name == "aten::lift_fresh":  # `torch.tensor` of Python numbers
            self.host_sends[_calling_product_function()] += 1
        return function(*args, **kwargs)


def _calling_product_function() -> str:
    """The innermost function of `cluster/` on the call stack, as `module.function`; "elsewhere" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT):
            return f"{'.'.join(path.relative_to(ROOT).with_suffix('').parts)}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


@contextmanager
def count_tensor_reads() -> Iterator[Counter[str]]:
    """Count the tensors that come back to the host as a whole, by calling function. Torch does not dispatch these."""
    places: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("tolist", "numpy", "cpu"):
            patch.setattr(torch.Tensor, name, _with_count(getattr(torch.Tensor, name), places))
        yield places


def _with_count(original: Callable[..., Any], places: Counter[str]) -> Callable[..., Any]:
    def count_and_call(*args: Any, **kwargs: Any) -> Any:
        places[_calling_product_function()] += 1
        return original(*args, **kwargs)

    return count_and_call
