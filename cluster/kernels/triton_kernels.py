"""The kernels as programs of Triton, for GPUs. Products stay torch's."""

import torch
from torch import Tensor

from cluster.kernels.activate import gpu as activate
from cluster.kernels.interface import Activation, Angles, HeadNorms
from cluster.kernels.launch import INTERPRETED, WIDE, launch, whole
from cluster.kernels.norm import gpu as norm
from cluster.kernels.rotary import gpu as rotary
from cluster.kernels.torch_kernels import TorchKernels

COLUMNS = 1024  # of an activation, for one program


class TritonKernels(TorchKernels):
    """`Kernels` by Triton; what lies in memory in another way than its programs read goes to the twins."""

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

    def _normed(self, rows: Tensor, more: Tensor | None, total: Tensor, scale: Tensor, eps: float) -> Tensor:
        """The norm of `rows` + `more`, which is written to `total`."""
        count, size = rows.shape
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        how = {"MORE": more is not None, "WIDE": WIDE[torch.promote_types(rows.dtype, scale.dtype)]}
        launch(
            norm.add_norm, (count,), rows, more, scale, total, out, rows.stride(0), size, eps, BLOCK=whole(size), **how
        )
        return out
