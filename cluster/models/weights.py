"""Weights from a checkpoint: the shape of each tensor is checked, and only this rank's slice is read. Quantised weights
stay packed if the kernels support that. All other weights are converted to the compute dtype on the device.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from cluster.distributed.mesh import Shard
from cluster.kernels.interface import Stack, Weight
from cluster.kernels.quantised import Quantised, can_join, unified
from cluster.models.arithmetic import concat, select_indices
from cluster.models.checkpoint import Checkpoint, CheckpointMatrix, to_device
from cluster.models.context import ModelContext
from cluster.models.stored import Span


class _MixedQuantisationError(Exception):
    """The experts of one layer are quantised in different ways."""


class WeightLoader:
    """Loads named tensors of one checkpoint to the device, reading only this rank's shard."""

    def __init__(self, checkpoint: Checkpoint, context: ModelContext) -> None:
        self.checkpoint, self.dtype, self.device = checkpoint, context.dtype, context.device
        self.sharding, self.kernels = context.sharding, context.kernels
        self._widest = torch.promote_types(self.dtype, torch.float32)

    def tensor(
        self, name: str, *shape: int, rows: Span | None = None, columns: Span | None = None, expert: int | None = None
    ) -> Tensor:
        """Return one tensor in the compute dtype; `rows`, `columns` and `expert` as in `Checkpoint.matrix`."""
        return self._dense(self.matrix(name, *shape, rows=rows, columns=columns, expert=expert))

    def precise_tensor(self, name: str, *shape: int) -> Tensor:
        """Return one tensor in float32, or in the compute dtype if that is wider. This is for values that half
        precision would round too much.
        """
        return self._dense(self.checkpoint.matrix(name, shape, device=self.device), self._widest)

    def norm(self, name: str, size: int, unit_offset: bool = False) -> Tensor:
        """Return a norm's weight. If `unit_offset`, return 1 + weight, in float32 or wider, because half precision
        would round this sum too much.
        """
        if not unit_offset:
            return self.tensor(name, size)
        weight = self.precise_tensor(name, size)
        return weight if weight.device.type == "meta" else 1 + weight  # arithmetic on the meta device is slow

    def matrix(
        self, name: str, *shape: int, rows: Span | None = None, columns: Span | None = None, expert: int | None = None
    ) -> CheckpointMatrix:
        """Return one tensor as `tensor` does, but a matrix that is quantised on disk stays quantised."""
        matrix = self.checkpoint.matrix(name, shape, rows, columns, expert, self.device)
        return matrix if isinstance(matrix, Quantised) else self._dense(matrix)

    def weight(self, matrix: CheckpointMatrix) -> Weight:
        """Return `matrix`, which is `[outputs, inputs]` as in checkpoints, as a weight in the layout of the kernels."""
        if isinstance(matrix, Quantised) and self.kernels.keeps_quantised(matrix, self.dtype):
            weight = self.kernels.quantised(matrix, self.dtype)
            self.checkpoint.tally.count_packed(matrix, weight)
            return weight
        dense = self._dense(matrix) if isinstance(matrix, Quantised) else matrix
        return self.kernels.weight(dense.t().contiguous())

    def stack(self, experts: range, matrix_of: Callable[[int], CheckpointMatrix]) -> Stack:
        """Return the weights of `experts` as one stack. `matrix_of(expert)` reads the matrix `[outputs, inputs]` of one
        expert.
        """
        first, count = matrix_of(experts[0]), len(experts)
        if isinstance(first, Quantised) and self.kernels.keeps_quantised(first, self.dtype):
            try:
                packed_stack = self.kernels.quantised_stack(self._alike_matrices(first, experts, matrix_of), self.dtype)
            except _MixedQuantisationError:
                pass  # a packed stack must be of one kind, so this one is dequantised
            else:
                self.checkpoint.tally.count_packed(first, packed_stack, count)
                return packed_stack
        dense = self._dense(first)
        stacked = torch.empty(count, *dense.t().shape, dtype=self.dtype, device=self.device)
        stacked[0] = dense.t()
        for position, expert in enumerate(experts[1:], 1):
            stacked[position] = self._dense(matrix_of(expert)).t()
        return self.kernels.stack(stacked)

    def _alike_matrices(
        self, first: Quantised, experts: range, matrix_of: Callable[[int], CheckpointMatrix]
    ) -> Iterator[Quantised]:
        """Yield the experts' matrices, each of which must be quantised in the same way as `first`, the first of them.

        Raises:
            _MixedQuantisationError: one of them is not.
        """
        yield first
        for expert in experts[1:]:
            matrix = matrix_of(expert)
            quantised = isinstance(matrix, Quantised) and self.kernels.keeps_quantised(matrix, self.dtype)
            if not isinstance(matrix, Quantised) or not quantised or not can_join([first, matrix], zeros=True):
                raise _MixedQuantisationError
            yield matrix

    def _dense(self, matrix: CheckpointMatrix, dtype: torch.dtype | None = None) -> Tensor:
        """Return the matrix as a tensor on the device, in `dtype` (None: the compute dtype)."""
        if isinstance(matrix, Quantised):
            self.checkpoint.tally.dequantised[matrix.description] += 1
            matrix = matrix.dequantised(self._widest)
        return to_device(matrix, self.dtype if dtype is None else dtype, self.device)

    def concat_outputs(self, matrices: list[CheckpointMatrix]) -> CheckpointMatrix:
        """Concatenate matrices `[outputs, inputs]` along their outputs. The result is quantised if all the matrices are
        quantised and `can_join` accepts them.
        """
        quantised = [matrix for matrix in matrices if isinstance(matrix, Quantised)]
        if len(quantised) == len(matrices) and can_join(quantised):
            return concat_quantised_outputs(quantised)
        return concat([self._dense(matrix) for matrix in matrices])

    def projection(self, name: str, rows: int, columns: int) -> Weight:
        """Return the weight `name` of `rows` outputs and `columns` inputs."""
        return self.weight(self.matrix(name, rows, columns))

    def column_parallel(
        self, names: list[str], rows: list[int], spans: list[Span], columns: int, bias: bool
    ) -> tuple[CheckpointMatrix, Tensor | None]:
        """Return column-parallel projections packed into one, `[sum of the spans' lengths, columns]`, and their biases
        packed in the same way (None if `bias` is False).

        `names[i]` has `rows[i]` outputs on disk, of which those in `spans[i]` are read.
        """
        projections = list(zip(names, rows, spans, strict=True))
        weight = self.concat_outputs(
            [self.matrix(f"{name}.weight", num_outputs, columns, rows=span) for name, num_outputs, span in projections]
        )
        biases = (
            [self.tensor(f"{name}.bias", num_outputs, rows=span) for name, num_outputs, span in projections]
            if bias
            else []
        )
        return weight, concat(biases) if bias else None

    def row_parallel(
        self, name: str, rows: int, columns: int, span: Span, bias: bool, shard: Shard
    ) -> tuple[Weight, Tensor | None]:
        """Return a row-parallel projection of the inputs in `span`, and its bias. The ranks' partial sums are added up,
        so only one rank adds the bias: the bias is None unless `shard.rank` is 0 and `bias` is True.
        """
        weight = self.weight(self.matrix(f"{name}.weight", rows, columns, columns=span))
        bias_tensor = self.tensor(f"{name}.bias", rows) if bias else None
        return weight, bias_tensor if shard.rank == 0 else None


def concat_quantised_outputs(matrices: list[Quantised]) -> Quantised:
    """Concatenate quantised matrices, which `can_join` accepts, along their outputs."""
    matrices = unified(matrices)
    zeros = [matrix.zeros for matrix in matrices if matrix.zeros is not None]
    return replace(
        matrices[0],
        codes=concat([matrix.codes for matrix in matrices]),
        scales=concat([matrix.scales for matrix in matrices]),
        zeros=concat(zeros) if zeros else None,
    )


def permute_outputs(matrix: CheckpointMatrix, change: Callable[[Tensor], Tensor]) -> CheckpointMatrix:
    """Return `matrix` `[outputs, inputs]` with its outputs permuted as `change` permutes a vector `[outputs]`."""
    # `change` permutes the indices 0, 1, 2, ..; entry i of the result is the old index of new output i.
    index = change(torch.arange(matrix.shape[0]))
    if isinstance(matrix, Quantised):
        return matrix.map_tensors(lambda tensor: select_indices(tensor, index, 0))
    return select_indices(matrix, index, 0)


def split_alternating(entries: Tensor) -> Tensor:
    """Split alternating entries (gate, up, gate, up, ..) into all gates, then all ups."""
    return concat([entries[0::2], entries[1::2]])
