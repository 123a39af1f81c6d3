"""How a program of Triton is started, and what its makers have to know of the interpreter."""

from typing import Any

import torch
import triton
import triton.language as tl

from cluster.capture.recorder import native

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether programs run in Triton's interpreter on a CPU (`TRITON_INTERPRET=1`). Its products of bfloat16 are wrong
without a word, so programs widen their factors there (`WIDEN`)."""
WIDE = {torch.float64: tl.float64, torch.float32: tl.float32, torch.bfloat16: tl.float32, torch.float16: tl.float32}
"""In what numbers of these dtypes are added up."""

Grid = tuple[int, ...]


def launch(program: Any, grid: Grid, *given: Any, **constants: Any) -> None:
    """Start `program` once for each place of `grid`; not at all where one of its sides is 0. A tape replays the start
    as one call.
    """
    if all(grid):
        native(_started, program, grid, given, constants)


def _started(program: Any, grid: Grid, given: tuple[Any, ...], constants: dict[str, Any]) -> None:
    program[grid](*given, **constants)


def whole(size: int, least: int = 16) -> int:
    """The power of two that holds `size` numbers, `least` or more: programs count in these."""
    return max(least, 1 << max(0, size - 1).bit_length())


def warps(block: int, each: int = 128) -> int:
    """The warps of a program that works on `block` numbers at once, a power of two, about `each` numbers to a warp."""
    return max(1, min(32, block // each))
