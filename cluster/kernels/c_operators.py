"""C kernels that replace small torch operators in captured programs on a CPU: copies and arithmetic."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from cluster.kernels.c_copies import Copies
from cluster.kernels.c_numbers import NumberKernels
from cluster.kernels.library import Library


def operators_of(library: Library | None) -> Callable[..., list[partial[None]] | None] | None:
    """Return a `Substitute` (`cluster.capture.tape`) that replaces an operator by calls of `Copies` or, if
    `Copies` does not support the operator, of `NumberKernels`. Return None without a library. Also return None if the
    library's calls cannot be joined (`kernels/joined.py`), because only joined calls raise IndexError for rows that a
    table does not have.
    """
    if library is None or getattr(library.functions["gather", torch.float32], "joins", None) is None:
        return None
    copies, numbers = Copies(library), NumberKernels(library)

    def replace_operator(
        function: OpOverload, args: Sequence[Any], options: Mapping[str, Any], outputs: Sequence[Tensor]
    ) -> list[partial[None]] | None:
        copy_calls = copies(function, args, options, outputs)
        return numbers(function, args, options, outputs) if copy_calls is None else copy_calls

    return replace_operator
