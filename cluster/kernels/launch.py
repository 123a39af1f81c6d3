"""Launches of Triton kernels, and helpers for their block sizes and for Triton's interpreter."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cluster.capture.recorder import native

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter on a CPU (`TRITON_INTERPRET=1`). The interpreter multiplies bfloat16
matrices wrongly, without an error. So if this is True, kernels convert both matrices to a wider dtype first.
"""
ACC_DTYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.float32,
    torch.float16: tl.float32,
}
"""The Triton dtype in which numbers of a torch dtype are summed."""

Grid = tuple[int, ...]


def launch(kernel: Any, grid: Grid, arguments: tuple[Any, ...], **constants: Any) -> None:
    """Launch `kernel` on `grid`; do nothing if a side of `grid` is 0. A tape (`capture/tape.py`) records the launch
    as one call.

    `arguments` is the `NamedTuple` defined above the kernel. `constants` are the kernel's constants, in capitals,
    and Triton's `num_warps` and `num_stages`.

    Raises:
        ValueError: a tensor is not contiguous, and the arguments have no stride for it.
    """
    if all(grid):
        _check_strides(kernel, arguments)
        native(_launch_kernel, kernel, grid, arguments, constants)


def _check_strides(kernel: Any, arguments: Any) -> None:
    """Raise an error if the kernel would read a tensor at wrong addresses. A kernel gets only the address of a
    tensor, so it reads a view as if it were contiguous, unless it also gets the view's stride in a field
    `<tensor>_stride`. A field `stride` or `row_stride` is the stride of the first tensor.
    """
    first, *_ = fields = arguments._fields
    for name, value in zip(fields, arguments, strict=True):
        if not isinstance(value, Tensor) or value.is_contiguous() or f"{name}_stride" in fields:
            continue
        if name != first or not {"stride", "row_stride"} & {*fields}:
            raise ValueError(
                f"kernel {kernel.__name__} would misread {name}, whose strides are {value.stride()}; pass "
                f"{name}.contiguous()"
            )


def _launch_kernel(kernel: Any, grid: Grid, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    kernel[grid](*arguments, **constants)


def next_power_of_2(size: int, minimum: int = 16) -> int:
    """Return the smallest power of two >= `size` and `minimum`: Triton's block sizes are powers of two."""
    return max(minimum, 1 << max(0, size - 1).bit_length())


def warps(block_size: int, numbers_per_warp: int = 128) -> int:
    """Return the number of warps for a block of `block_size` numbers (a power of two): `block_size` divided by
    `numbers_per_warp`, but at least 1 and at most 32.
    """
    return max(1, min(32, block_size // numbers_per_warp))
