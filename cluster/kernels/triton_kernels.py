"""The kernels in Triton, for GPUs. Matrix products stay in torch."""

import torch
from torch import Tensor

from cluster.kernels.activate import gpu as activate
from cluster.kernels.experts import gpu as experts_gpu
from cluster.kernels.interface import Activation, Angles, Groups, HeadNorms
from cluster.kernels.launch import ACC_DTYPES, INTERPRETED, launch, next_power_of_2
from cluster.kernels.norm import gpu as norm
from cluster.kernels.rotary import gpu as rotary
from cluster.kernels.torch_kernels import TorchKernels

MAX_BLOCK_COLUMNS = 1024  # the most columns of an activation, or of combined expert outputs, in one program
MAX_BLOCK_CHOICES = 1024  # the most expert choices that one program reads at once


class TritonKernels(TorchKernels):
    """`Kernels` in Triton. Tensors in layouts that the Triton kernels cannot read go to `TorchKernels`."""

    name = "triton"

    def __init__(self) -> None:
        super().__init__("Triton, in its interpreter" if INTERPRETED else "Triton")
        self.numerics = "triton"

    def norm(self, rows: Tensor, scale: Tensor, eps: float) -> Tensor:
        """See `Kernels.norm`."""
        if rows.dim() != 2 or rows.stride(1) != 1 or rows.shape[1:] != scale.shape:
            return super().norm(rows, scale, eps)
        return self._launch_add_norm(rows, None, None, scale, eps)

    def add_norm(self, rows: Tensor, residual: Tensor | None, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `Kernels.add_norm`."""
        same_layout = residual is not None and residual.shape == rows.shape and residual.dtype == rows.dtype
        if residual is None or not same_layout or not rows.is_contiguous() or rows.shape[1:] != scale.shape:
            return super().add_norm(rows, residual, scale, eps)
        residual_sum = torch.empty_like(rows)
        return residual_sum, self._launch_add_norm(rows, residual.contiguous(), residual_sum, scale, eps)

    def rotate(self, heads: Tensor, angles: Angles, norms: HeadNorms | None = None) -> None:
        """See `Kernels.rotate`."""
        (count, num_heads, head_dim), rotary_dim = heads.shape, angles.cos.shape[-1]
        if heads.stride(2) != 1 or rotary_dim % 2:
            super().rotate(heads, angles, norms)
            return
        query_heads, q_scale, k_scale, eps = (num_heads, None, None, 0.0) if norms is None else norms
        launch(
            rotary.rotate,
            (count, num_heads),
            rotary.RotateArguments(
                heads,
                cosines=angles.cos.contiguous(),
                sines=angles.sin.contiguous(),
                q_scale=q_scale,
                k_scale=k_scale,
                row_stride=heads.stride(0),
                head_stride=heads.stride(1),
                query_heads=query_heads,
                head_dim=head_dim,
                half_rotary_dim=rotary_dim // 2,
                eps=eps,
            ),
            HAS_NORMS=norms is not None,
            ACC_DTYPE=ACC_DTYPES[heads.dtype],
            HALF_BLOCK=next_power_of_2(rotary_dim // 2),
            REST_BLOCK=next_power_of_2(head_dim - rotary_dim) if norms is not None and head_dim > rotary_dim else 0,
        )

    def activate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """See `Kernels.activate`."""
        if not gate_up.is_contiguous():
            return super().activate(gate_up, activation)
        count, size = gate_up.shape[0], gate_up.shape[1] // 2
        kind, alpha, limit = activation
        out, block = gate_up.new_empty(count, size), min(MAX_BLOCK_COLUMNS, next_power_of_2(size))
        arguments = activate.ActivateArguments(gate_up, out, size, alpha, limit)
        grid = count, -(-size // block)
        launch(activate.activate, grid, arguments, KIND=kind, ACC_DTYPE=ACC_DTYPES[gate_up.dtype], BLOCK=block)
        return out

    def group(self, topk_ids: Tensor, experts: int) -> Groups:
        """See `Kernels.group`."""
        topk_ids, count = topk_ids.contiguous(), topk_ids.numel()
        source_rows, place_experts = topk_ids.new_empty(count), topk_ids.new_empty(count)
        places, expert_ends = torch.empty_like(topk_ids), topk_ids.new_empty(experts, dtype=torch.int32)
        arguments = experts_gpu.GroupArguments(
            topk_ids, source_rows, place_experts, places, expert_ends, count, experts_per_row=topk_ids.shape[1]
        )
        launch(experts_gpu.group, (experts,), arguments, BLOCK=min(MAX_BLOCK_CHOICES, next_power_of_2(count)))
        return Groups(topk_ids, source_rows, place_experts, expert_ends, places)

    def combine(self, expert_outputs: Tensor, groups: Groups, weights: Tensor, bias: Tensor | None) -> Tensor:
        """See `Kernels.combine`."""
        (rows, experts_per_row), (count, size) = weights.shape, expert_outputs.shape
        out, block = expert_outputs.new_empty(rows, size), min(MAX_BLOCK_COLUMNS, next_power_of_2(size))
        launch(
            experts_gpu.combine,
            (rows, -(-size // block)),
            experts_gpu.CombineArguments(
                expert_outputs.contiguous(),
                groups.places,
                weights.contiguous(),
                groups.topk_ids,
                bias,
                out,
                size,
                count,
            ),
            EXPERTS_PER_ROW=experts_per_row,
            HAS_BIAS=bias is not None,
            ACC_DTYPE=ACC_DTYPES[expert_outputs.dtype],
            EXPERTS_BLOCK=next_power_of_2(experts_per_row, 1),
            BLOCK=block,
        )
        return out

    def _launch_add_norm(
        self, rows: Tensor, residual: Tensor | None, residual_sum: Tensor | None, scale: Tensor, eps: float
    ) -> Tensor:
        """Return the norm of `rows` + `residual`, and write that sum to `residual_sum`. If `residual` and
        `residual_sum` are None, return the norm of `rows`.
        """
        count, size = rows.shape
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        arguments = norm.AddNormArguments(rows, residual, scale, residual_sum, out, rows.stride(0), size, eps)
        acc_dtype = ACC_DTYPES[torch.promote_types(rows.dtype, scale.dtype)]
        launch(
            norm.add_norm,
            (count,),
            arguments,
            HAS_RESIDUAL=residual is not None,
            ACC_DTYPE=acc_dtype,
            BLOCK=next_power_of_2(size),
        )
        return out
