"""C in place of torch's operators on few numbers, in programs that are repeated."""

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
    """What `Copies` and `NumberKernels` do, as `cluster.capture.tape.Tape` asks for it."""

    def __init__(self, library: Library) -> None:
        self._each = Copies(library), NumberKernels(library)

    def __call__(
        self, function: OpOverload, args: Sequence[Any], options: Mapping[str, Any], outputs: Sequence[Tensor]
    ) -> list[partial[None]] | None:
        """Calls that fill the output of `function(*args, **options)`; None where C does not do it."""
        found = (each(function, args, options, outputs) for each in self._each)
        return next((calls for calls in found if calls is not None), None)


def operators_of(library: Library | None) -> Operators | None:
    """Those of a library; None without one, and where its calls are not joined: only joined calls say which rows of
    tables are missing.
    """
    joins = library is not None and getattr(library.functions["gather", torch.float32], "joins", None) is not None
    return Operators(library) if library is not None and joins else None
