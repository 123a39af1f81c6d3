"""Gated activations. One program computes a block of columns of one row."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x)), computed from exp(-|x|), which cannot overflow."""
    exp_minus_abs = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1 / (1 + exp_minus_abs), exp_minus_abs / (1 + exp_minus_abs))


class ActivateArguments(NamedTuple):
    """The arguments of the kernel `activate`, in order, without its constants, which `launch` passes by name."""

    gate_up: Tensor
    out: Tensor
    size: int
    alpha: float
    limit: float


@triton.jit
def activate(gate_up, out, size, alpha, limit, KIND: tl.constexpr, ACC_DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Compute `out` `[T, size]` from `gate_up` `[T, 2 size]`: in each row, `size` gates and then `size` up values.
    `KIND` is `Activation.kind`.
    """
    row, offsets = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    gate = tl.load(gate_up + row * 2 * size + offsets, mask=mask, other=0.0).to(ACC_DTYPE)
    up = tl.load(gate_up + row * 2 * size + size + offsets, mask=mask, other=0.0).to(ACC_DTYPE)
    if KIND == "silu":
        activated = gate * sigmoid(gate) * up
    elif KIND == "gelu_tanh":
        # gelu_tanh(x) = x (1 + tanh(inner)) / 2 with inner = sqrt(2 / pi) (x + 0.044715 x^3)
        tanh_input = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        activated = gate * sigmoid(2 * tanh_input) * up  # (1 + tanh x) / 2 = sigmoid(2 x)
    else:
        if KIND == "clamped_silu":
            gate *= sigmoid(gate)
        gate = tl.where(gate > limit, limit, gate)  # keeps NaN, which tl.minimum may not
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        activated = gate * up if KIND == "clamped_silu" else (up + 1) * gate * sigmoid(alpha * gate)
    tl.store(out + row * size + offsets, activated.to(out.dtype.element_ty), mask=mask)
