"""Projections and norms: the arithmetic that every layer shares."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def project(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`[T, in]` times weight `[in, out]` plus bias.

    Weights lie input-major: with the few rows of a decode or verify step a CPU multiplies them up to 1.7 times as fast
    as the output-major layout of checkpoints.
    """
    return torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)


def norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of `[.., H]`; in the weight's dtype, where that is the wider one."""
    if weight.dtype != rows.dtype:
        return F.rms_norm(rows.to(weight.dtype), weight.shape, weight, eps).to(rows.dtype)
    return F.rms_norm(rows, weight.shape, weight, eps)


def joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """`torch.cat` for weights, which are first built on the meta device: there torch's own imports its compiler, and
    the seconds that takes are all that a check of headers costs.
    """
    first = parts[0]
    if first.device.type != "meta":
        return torch.cat(list(parts), dim)
    shape = list(first.shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return first.new_empty(shape)
