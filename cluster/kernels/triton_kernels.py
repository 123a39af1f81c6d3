"""The kernels in Triton, for GPUs. Matrix products stay in torch."""

import torch
from torch import Tensor

from cluster.kernels.activate import gpu as activate
from cluster.kernels.experts import gpu as expert_programs
from cluster.kernels.interface import Activation, Angles, Groups, HeadNorms
from cluster.kernels.launch import INTERPRETED, WIDE, launch, whole
from cluster.kernels.norm import gpu as norm
from cluster.kernels.rotary import gpu as rotary
from cluster.kernels.torch_kernels import TorchKernels

COLUMNS = 1024  # the most columns of an activation, or of combined expert outputs, in one program
CHOICES = 1024  # the most expert choices that one program reads at once


class TritonKernels(TorchKernels):
    """`Kernels` in Triton. Tensors in layouts that the Triton kernels cannot read go to `TorchKernels`."""

    name = "triton"

    def __init__(self) -> None:
        super().__init__("Triton, in its interpreter" if INTERPRETED else "Triton")
        self.digits = "triton"

    def norm(self, rows: Tensor, scale: Tensor, eps: float) -> Tensor:
        """See `Kernels.norm`."""
        if rows.dim() != 2 or rows.stride(1) != 1 or rows.shape[1:] != scale.shape:
            return super().norm(rows, scale, eps)
        return self._normed(rows, None, rows, scale, eps)

    def add_norm(self, rows: Tensor, more: Tensor | None, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `Kernels.add_norm`."""
        alike = more is not None and more.shape == rows.shape and more.dtype == rows.dtype
        if more is None or not alike or not rows.is_contiguous() or rows.shape[1:] != scale.shape:
            return super().add_norm(rows, more, scale, eps)
        total = torch.empty_like(rows)
        return total, self._normed(rows, more.contiguous(), total, scale, eps)

    def rotate(self, heads: Tensor, angles: Angles, norms: HeadNorms | None = None) -> None:
        """See `Kernels.rotate`."""
        (count, n, size), turned, dtype = heads.shape, angles.cos.shape[-1], heads.dtype
        if heads.stride(2) != 1 or turned % 2:
            super().rotate(heads, angles, norms)
            return
        given = heads, angles.cos.contiguous(), angles.sin.contiguous()
        rest = whole(size - turned) if norms is not None and size > turned else 0
        how = {"NORMED": norms is not None, "WIDE": WIDE[dtype], "HALF": whole(turned // 2), "REST": rest}
        queries, q, k, eps = (n, None, None, 0.0) if norms is None else norms
        strides = heads.stride(0), heads.stride(1)
        launch(rotary.rotate, (count, n), *given, q, k, *strides, queries, size, turned // 2, eps, **how)

    def activate(self, both: Tensor, activation: Activation) -> Tensor:
        """See `Kernels.activate`."""
        if not both.is_contiguous():
            return super().activate(both, activation)
        count, size = both.shape[0], both.shape[1] // 2
        out, (kind, alpha, limit), block = both.new_empty(count, size), activation, min(COLUMNS, whole(size))
        how = {"KIND": kind, "WIDE": WIDE[both.dtype], "BLOCK": block}
        launch(activate.activate, (count, -(-size // block)), both, out, size, alpha, limit, **how)
        return out

    def group(self, chosen: Tensor, experts: int) -> Groups:
        """See `Kernels.group`."""
        chosen, count = chosen.contiguous(), chosen.numel()
        source, expert = chosen.new_empty(count), chosen.new_empty(count)
        place, ends = torch.empty_like(chosen), chosen.new_empty(experts, dtype=torch.int32)
        numbers = count, chosen.shape[1]
        how = {"BLOCK": min(CHOICES, whole(count))}
        launch(expert_programs.group, (experts,), chosen, source, expert, place, ends, *numbers, **how)
        return Groups(chosen, source, expert, ends, place)

    def combine(self, made: Tensor, groups: Groups, weights: Tensor, bias: Tensor | None) -> Tensor:
        """See `Kernels.combine`."""
        (rows, active), (count, size), block = weights.shape, made.shape, min(COLUMNS, whole(made.shape[1]))
        out, given = made.new_empty(rows, size), (made.contiguous(), groups.place, weights.contiguous(), groups.chosen)
        how = {"ACTIVE": active, "BIASED": bias is not None, "WIDE": WIDE[made.dtype], "SLOTS": whole(active, 1)}
        places = rows, -(-size // block)
        launch(expert_programs.combine, places, *given, bias, out, size, count, BLOCK=block, **how)
        return out

    def _normed(self, rows: Tensor, more: Tensor | None, total: Tensor, scale: Tensor, eps: float) -> Tensor:
        """Return the norm of `rows` + `more`, and write that sum to `total`. If `more` is None, return the norm of
        `rows`, and write no sum.
        """
        count, size = rows.shape
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        how = {"MORE": more is not None, "WIDE": WIDE[torch.promote_types(rows.dtype, scale.dtype)]}
        launch(
            norm.add_norm, (count,), rows, more, scale, total, out, rows.stride(0), size, eps, BLOCK=whole(size), **how
        )
        return out
