"""Weights from a checkpoint: only this rank's slice is read, and its shape is checked. Quantised weights stay packed if
the kernels support that; all other weights are converted to the compute dtype on the device.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from cluster.distributed.mesh import Shard
from cluster.kernels.interface import Stack, Weight
from cluster.kernels.quantised import Quantised, alike, fit
from cluster.models.arithmetic import chosen, joined
from cluster.models.checkpoint import Checkpoint, Matrix, placed
from cluster.models.context import ModelContext
from cluster.models.stored import Span


class _UnlikeError(Exception):
    """The experts of one layer are quantised in different ways."""


class WeightLoader:
    """Loads named tensors of one checkpoint to the device, reading only this rank's shard."""

    def __init__(self, checkpoint: Checkpoint, context: ModelContext) -> None:
        self.checkpoint, self.dtype, self.device = checkpoint, context.dtype, context.device
        self.sharding, self.kernels = context.sharding, context.kernels
        self._widest = torch.promote_types(self.dtype, torch.float32)

    def take(
        self, name: str, *shape: int, rows: Span | None = None, columns: Span | None = None, expert: int | None = None
    ) -> Tensor:
        """Return one tensor in the compute dtype; `rows`, `columns` and `expert` as in `Checkpoint.matrix`."""
        return self._dense(self.matrix(name, *shape, rows=rows, columns=columns, expert=expert))

    def wide(self, name: str, *shape: int) -> Tensor:
        """Return one tensor in at least float32, for values that half precision would round too much."""
        return self._dense(self.checkpoint.matrix(name, shape, device=self.device), self._widest)

    def norm(self, name: str, size: int, unit_offset: bool = False) -> Tensor:
        """Return a norm's weight. If `unit_offset`, return 1 + weight, in at least float32: half precision is too
        coarse.
        """
        if not unit_offset:
            return self.take(name, size)
        weight = self.wide(name, size)
        return weight if weight.device.type == "meta" else 1 + weight  # arithmetic on the meta device is slow

    def matrix(
        self, name: str, *shape: int, rows: Span | None = None, columns: Span | None = None, expert: int | None = None
    ) -> Matrix:
        """Return one tensor as `take` does, but a matrix that is quantised on disk stays quantised."""
        held = self.checkpoint.matrix(name, shape, rows, columns, expert, self.device)
        return held if isinstance(held, Quantised) else self._dense(held)

    def weight(self, matrix: Matrix) -> Weight:
        """Return a weight from `matrix` `[outputs, inputs]`, the layout of checkpoints."""
        if isinstance(matrix, Quantised) and self.kernels.keeps(matrix, self.dtype):
            made = self.kernels.quantised(matrix, self.dtype)
            self.checkpoint.tally.keep(matrix, made)
            return made
        dense = self._dense(matrix) if isinstance(matrix, Quantised) else matrix
        return self.kernels.weight(dense.t().contiguous())

    def stack(self, experts: range, matrix_of: Callable[[int], Matrix]) -> Stack:
        """Return the weights of these experts, each from `matrix_of(expert)` `[outputs, inputs]`, read one by one."""
        first, count = matrix_of(experts[0]), len(experts)
        if isinstance(first, Quantised) and self.kernels.keeps(first, self.dtype):
            try:
                made = self.kernels.quantised_stack(self._like(first, experts, matrix_of), self.dtype)
            except _UnlikeError:
                pass  # the stack must be of one kind, so it becomes dense
            else:
                self.checkpoint.tally.keep(first, made, count)
                return made
        dense = self._dense(first)
        whole = torch.empty(count, *dense.t().shape, dtype=self.dtype, device=self.device)
        whole[0] = dense.t()
        for place, expert in enumerate(experts[1:], 1):
            whole[place] = self._dense(matrix_of(expert)).t()
        return self.kernels.stack(whole)

    def _like(self, first: Quantised, experts: range, matrix_of: Callable[[int], Matrix]) -> Iterator[Quantised]:
        """Yield the experts' matrices, which must be quantised in the same way as the `first`.

        Raises:
            _UnlikeError: one of them is not.
        """
        yield first
        for expert in experts[1:]:
            matrix = matrix_of(expert)
            quantised = isinstance(matrix, Quantised) and self.kernels.keeps(matrix, self.dtype)
            if not isinstance(matrix, Quantised) or not quantised or not fit([first, matrix], zeros=True):
                raise _UnlikeError
            yield matrix

    def _dense(self, matrix: Matrix, dtype: torch.dtype | None = None) -> Tensor:
        """Return the matrix as a tensor on the device, in `dtype` (None: the compute dtype)."""
        if isinstance(matrix, Quantised):
            self.checkpoint.tally.dequantised[matrix.about] += 1
            matrix = matrix.numbers(self._widest)
        return placed(matrix, self.dtype if dtype is None else dtype, self.device)

    def beneath(self, parts: list[Matrix]) -> Matrix:
        """Concatenate the outputs of matrices with equal inputs. If all are quantised and `fit`, so is the result."""
        quantised = [part for part in parts if isinstance(part, Quantised)]
        if len(quantised) == len(parts) and fit(quantised):
            return side_by_side(quantised)
        return joined([self._dense(part) for part in parts])

    def projection(self, name: str, rows: int, columns: int) -> Weight:
        """Return the weight `name` of `rows` outputs and `columns` inputs."""
        return self.weight(self.matrix(name, rows, columns))

    def outputs(
        self, names: list[str], rows: list[int], spans: list[Span], columns: int, bias: bool
    ) -> tuple[Matrix, Tensor | None]:
        """Return column-parallel projections packed into one, `[sum of spans, columns]`, and their biases.

        `names[i]` has `rows[i]` outputs on disk, of which those in `spans[i]` are read.
        """
        each = list(zip(names, rows, spans, strict=True))
        weight = self.beneath([self.matrix(f"{name}.weight", r, columns, rows=span) for name, r, span in each])
        biases = [self.take(f"{name}.bias", r, rows=span) for name, r, span in each] if bias else []
        return weight, joined(biases) if bias else None

    def inputs(
        self, name: str, rows: int, columns: int, span: Span, bias: bool, part: Shard
    ) -> tuple[Weight, Tensor | None]:
        """Return a row-parallel projection of the inputs in `span`, and its bias.

        Partial sums of all ranks are added up, so only rank 0 of `part` has the bias.
        """
        weight = self.weight(self.matrix(f"{name}.weight", rows, columns, columns=span))
        added = self.take(f"{name}.bias", rows) if bias else None
        return weight, added if part.rank == 0 else None


def side_by_side(parts: list[Quantised]) -> Quantised:
    """Concatenate the outputs of quantised matrices that `fit`."""
    parts = alike(parts)
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return replace(
        parts[0],
        codes=joined([part.codes for part in parts]),
        scales=joined([part.scales for part in parts]),
        zeros=joined(zeros) if zeros else None,
    )


def in_order(matrix: Matrix, change: Callable[[Tensor], Tensor]) -> Matrix:
    """Return `matrix` `[outputs, inputs]` with its outputs permuted as `change` permutes a vector `[outputs]`."""
    # `change` is applied to 0, 1, 2, ..; the result is the index to select by.
    order = change(torch.arange(matrix.shape[0]))
    if isinstance(matrix, Quantised):
        return matrix.each(lambda part: chosen(part, order, 0))
    return chosen(matrix, order, 0)


def apart(order: Tensor) -> Tensor:
    """Split alternating entries (gate, up, gate, up, ..) into all gates, then all ups."""
    return joined([order[0::2], order[1::2]])
