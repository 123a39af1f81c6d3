"""C kernels that replace small torch operators in captured programs on a CPU: copies and arithmetic."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from cluster.kernels.c_copies import Copies
from cluster.kernels.c_numbers import NumberKernels
from cluster.kernels.library import Library


class Operators:
    """`Copies` and `NumberKernels` together, as `cluster.capture.tape.Tape` calls them."""

    def __init__(self, library: Library) -> None:
        self._each = Copies(library), NumberKernels(library)

    def __call__(
        self, function: OpOverload, args: Sequence[Any], options: Mapping[str, Any], outputs: Sequence[Tensor]
    ) -> list[partial[None]] | None:
        """Return calls that fill the output of `function(*args, **options)`; None if C does not support the case."""
        found = (each(function, args, options, outputs) for each in self._each)
        return next((calls for calls in found if calls is not None), None)


def operators_of(library: Library | None) -> Operators | None:
    """Return the operators of a library. Returns None without a library, or if its calls cannot be joined, because only
    joined calls report accesses to rows that a table does not have.
    """
    joins = library is not None and getattr(library.functions["gather", torch.float32], "joins", None) is not None
    return Operators(library) if library is not None and joins else None
