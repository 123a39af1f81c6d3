"""Gated activations. One program computes a block of columns of one row."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x)), by exp(-|x|), which cannot overflow."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1 / (1 + small), small / (1 + small))


class ActivateArguments(NamedTuple):
    """What `activate` takes, in its order; its constants follow by name."""

    both: Tensor
    out: Tensor
    size: int
    alpha: float
    limit: float


@triton.jit
def activate(both, out, size, alpha, limit, KIND: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Compute `out` `[T, size]` from gates and ups side by side, `both` `[T, 2 size]`; `KIND` as in `Activation`."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = at < size
    gate = tl.load(both + row * 2 * size + at, mask=held, other=0.0).to(WIDE)
    up = tl.load(both + row * 2 * size + size + at, mask=held, other=0.0).to(WIDE)
    if KIND == "silu":
        made = gate * sigmoid(gate) * up
    elif KIND == "gelu_tanh":
        # gelu_tanh(x) = x (1 + tanh(inner)) / 2 with inner = sqrt(2 / pi) (x + 0.044715 x^3)
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        made = gate * sigmoid(2 * inner) * up  # (1 + tanh x) / 2 = sigmoid(2 x)
    else:
        gate = tl.where(gate > limit, limit, gate)  # keeps NaN, which tl.minimum may not
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        made = (up + 1) * gate * sigmoid(alpha * gate)
    tl.store(out + row * size + at, made.to(out.dtype.element_ty), mask=held)
