"""The kernels in Triton, for GPUs. Matrix products stay in torch."""

import torch
from torch import Tensor

from cluster.kernels.activate import gpu as activate
from cluster.kernels.experts import gpu as experts_gpu
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
        (count, n, size), turned = heads.shape, angles.cos.shape[-1]
        if heads.stride(2) != 1 or turned % 2:
            super().rotate(heads, angles, norms)
            return
        queries, q_scale, k_scale, eps = (n, None, None, 0.0) if norms is None else norms
        launch(
            rotary.rotate,
            (count, n),
            rotary.RotateArguments(
                heads,
                cosines=angles.cos.contiguous(),
                sines=angles.sin.contiguous(),
                q_scale=q_scale,
                k_scale=k_scale,
                row_stride=heads.stride(0),
                head_stride=heads.stride(1),
                queries=queries,
                size=size,
                half=turned // 2,
                eps=eps,
            ),
            NORMED=norms is not None,
            WIDE=WIDE[heads.dtype],
            HALF=whole(turned // 2),
            REST=whole(size - turned) if norms is not None and size > turned else 0,
        )

    def activate(self, both: Tensor, activation: Activation) -> Tensor:
        """See `Kernels.activate`."""
        if not both.is_contiguous():
            return super().activate(both, activation)
        count, size = both.shape[0], both.shape[1] // 2
        kind, alpha, limit = activation
        out, block = both.new_empty(count, size), min(COLUMNS, whole(size))
        arguments = activate.ActivateArguments(both, out, size, alpha, limit)
        grid = count, -(-size // block)
        launch(activate.activate, grid, arguments, KIND=kind, WIDE=WIDE[both.dtype], BLOCK=block)
        return out

    def group(self, chosen: Tensor, experts: int) -> Groups:
        """See `Kernels.group`."""
        chosen, count = chosen.contiguous(), chosen.numel()
        source, expert = chosen.new_empty(count), chosen.new_empty(count)
        place, ends = torch.empty_like(chosen), chosen.new_empty(experts, dtype=torch.int32)
        arguments = experts_gpu.GroupArguments(chosen, source, expert, place, ends, count, active=chosen.shape[1])
        launch(experts_gpu.group, (experts,), arguments, BLOCK=min(CHOICES, whole(count)))
        return Groups(chosen, source, expert, ends, place)

    def combine(self, made: Tensor, groups: Groups, weights: Tensor, bias: Tensor | None) -> Tensor:
        """See `Kernels.combine`."""
        (rows, active), (count, size) = weights.shape, made.shape
        out, block = made.new_empty(rows, size), min(COLUMNS, whole(size))
        launch(
            experts_gpu.combine,
            (rows, -(-size // block)),
            experts_gpu.CombineArguments(
                made.contiguous(), groups.place, weights.contiguous(), groups.chosen, bias, out, size, count
            ),
            ACTIVE=active,
            BIASED=bias is not None,
            WIDE=WIDE[made.dtype],
            SLOTS=whole(active, 1),
            BLOCK=block,
        )
        return out

    def _normed(self, rows: Tensor, more: Tensor | None, total: Tensor, scale: Tensor, eps: float) -> Tensor:
        """Return the norm of `rows` + `more`, and write that sum to `total`. If `more` is None, return the norm of
        `rows`, and write no sum.
        """
        count, size = rows.shape
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        arguments = norm.AddNormArguments(rows, more, scale, total, out, rows.stride(0), size, eps)
        wide = WIDE[torch.promote_types(rows.dtype, scale.dtype)]
        launch(norm.add_norm, (count,), arguments, MORE=more is not None, WIDE=wide, BLOCK=whole(size))
        return out
