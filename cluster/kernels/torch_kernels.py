"""The kernels in plain torch: the reference implementation, and the fallback for cases that others do not support."""

from collections.abc import Callable, Iterable
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.kernels.flashinfer.library import FlashInfer
from cluster.kernels.grouped_mm import grouped_mm
from cluster.kernels.interface import Activation, Angles, Groups, HeadNorms, Stack, Weight
from cluster.kernels.library import Library
from cluster.kernels.quantised import Quantised


class Dense(Weight):
    """A weight as one input-major tensor. With the few rows of a decode or verify step, a CPU multiplies it up to 1.7
    times as fast as in the output-major layout of checkpoints.
    """

    def __init__(self, matrix: Tensor) -> None:
        self.matrix, self.dtype, self.nbytes = matrix, matrix.dtype, matrix.nbytes
        self.shape = (matrix.shape[0], matrix.shape[1])

    def __call__(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `Weight`."""
        return torch.mm(rows, self.matrix) if bias is None else torch.addmm(bias, rows, self.matrix)

    def dense(self) -> Tensor:
        """Return the matrix itself."""
        return self.matrix


class DenseStack(Stack):
    """The weights of experts as one tensor `[E, inputs, outputs]`."""

    def __init__(self, matrices: Tensor) -> None:
        self.matrices, self.nbytes = matrices, matrices.nbytes

    def __call__(self, rows: Tensor, ends: Tensor) -> Tensor:
        """See `Stack`."""
        return grouped_mm(rows, self.matrices, ends)

    def dense(self) -> Tensor:
        """Return the matrices themselves."""
        return self.matrices


class TorchKernels:
    """`Kernels` in torch's operators."""

    name = "torch"
    library: Library | None = None
    flashinfer: FlashInfer | None = None

    def __init__(self, description: str = "torch") -> None:
        self.description, self.numerics = description, "torch"

    def weight(self, matrix: Tensor) -> Weight:
        """See `Kernels.weight`."""
        return Dense(matrix)

    def stack(self, matrices: Tensor) -> Stack:
        """See `Kernels.stack`."""
        return DenseStack(matrices)

    def keeps_quantised(self, matrix: Quantised, dtype: torch.dtype) -> bool:
        """Return False: torch multiplies by floating-point matrices only, so quantised weights are dequantised."""
        return False

    def quantised(self, matrix: Quantised, dtype: torch.dtype) -> Weight:
        """Dequantise the matrix; see `Kernels.quantised`."""
        return self.weight(dequantised_as(matrix, dtype).t().contiguous())

    def quantised_stack(self, matrices: Iterable[Quantised], dtype: torch.dtype) -> Stack:
        """Dequantise the matrices; see `Kernels.quantised_stack`."""
        return self.stack(torch.stack([dequantised_as(matrix, dtype).t() for matrix in matrices]))

    def norm(self, rows: Tensor, scale: Tensor, eps: float) -> Tensor:
        """See `Kernels.norm`."""
        if scale.dtype != rows.dtype:
            return torch.rms_norm(rows.to(scale.dtype), scale.shape, scale, eps).to(rows.dtype)
        return torch.rms_norm(rows, scale.shape, scale, eps)

    def add_norm(self, rows: Tensor, residual: Tensor | None, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `Kernels.add_norm`."""
        residual_sum = rows if residual is None else rows + residual
        return residual_sum, self.norm(residual_sum, scale, eps)

    def rotate(self, heads: Tensor, angles: Angles, norms: HeadNorms | None = None) -> None:
        """See `Kernels.rotate`."""
        if norms is not None:
            query_heads = norms.queries
            heads[:, :query_heads] = self.norm(heads[:, :query_heads], norms.q, norms.eps)
            heads[:, query_heads:] = self.norm(heads[:, query_heads:], norms.k, norms.eps)
        if (rotary_dim := angles.cos.shape[-1]) < heads.shape[-1]:
            heads = heads[..., :rotary_dim]
        # Half-split rotation: (x1 cos - x2 sin, x2 cos + x1 sin). The first half of `angles.sin` is negated already.
        swapped_halves = heads.roll(rotary_dim // 2, -1)
        heads.mul_(angles.cos).addcmul_(swapped_halves, angles.sin)

    def activate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """See `Kernels.activate`."""
        gate, up = gate_up.chunk(2, -1)
        if activation.kind == "clamped_silu":
            limit = activation.limit
            return F.silu(gate).clamp_(max=limit).mul_(up.clamp(-limit, limit))
        if activation.kind != "clamped":
            return ACTIVATION_FUNCTIONS[activation.kind](gate).mul_(up)
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(-activation.limit, activation.limit)
        return (up + 1) * gate * torch.sigmoid(gate * activation.alpha)

    def group(self, topk_ids: Tensor, experts: int) -> Groups:
        """See `Kernels.group`."""
        sorted_experts, sorted_choices = topk_ids.flatten().sort(stable=True)
        ends = torch.searchsorted(
            sorted_experts, torch.arange(experts, device=sorted_experts.device), right=True, out_int32=True
        )
        # The inverse permutation of `sorted_choices`: choice sorted_choices[i] is at place i.
        places = torch.empty_like(sorted_choices).scatter_(
            0, sorted_choices, torch.arange(sorted_choices.shape[0], device=sorted_choices.device)
        )
        return Groups(topk_ids, sorted_choices // topk_ids.shape[1], sorted_experts, ends, places.view_as(topk_ids))

    def combine(self, expert_outputs: Tensor, groups: Groups, weights: Tensor, bias: Tensor | None) -> Tensor:
        """See `Kernels.combine`."""
        expert_outputs = expert_outputs if bias is None else expert_outputs + bias[groups.place_experts]
        # Add the outputs one by one, in order of place, which is the order of experts. The order in which torch.sum
        # adds may depend on the shape.
        sorted_places, choice_order = groups.places.sort(-1)
        row_outputs = expert_outputs.index_select(0, sorted_places.view(-1)).view(
            *sorted_places.shape, expert_outputs.shape[1]
        )
        return reduce(torch.add, row_outputs.mul_(weights.gather(1, choice_order)[..., None]).unbind(1))


def dequantised_as(matrix: Quantised, dtype: torch.dtype) -> Tensor:
    """Return `matrix` `[O, I]` dequantised in float32 or wider, then rounded to `dtype`."""
    return matrix.dequantised(torch.promote_types(dtype, torch.float32)).to(dtype)


def gelu_tanh(rows: Tensor) -> Tensor:
    """Return GELU of `rows` in the tanh approximation."""
    return F.gelu(rows, approximate="tanh")


ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": gelu_tanh}
