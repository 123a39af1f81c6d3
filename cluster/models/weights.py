"""Weights from a checkpoint: read by slice, shape-checked, quantised where the kernels keep them so, else in the
compute dtype on the device.
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
    """Experts of one layer that are not quantised alike."""


class WeightLoader:
    """Takes named tensors of one checkpoint into the compute dtype and device, reading only this rank's shard."""

    def __init__(self, checkpoint: Checkpoint, context: ModelContext) -> None:
        self.checkpoint, self.dtype, self.device = checkpoint, context.dtype, context.device
        self.sharding, self.kernels = context.sharding, context.kernels
        self._widest = torch.promote_types(self.dtype, torch.float32)

    def take(
        self, name: str, *shape: int, rows: Span | None = None, columns: Span | None = None, expert: int | None = None
    ) -> Tensor:
        """One tensor, shape-checked; `rows`, `columns` and `expert` as in `Checkpoint.take`."""
        return self._dense(self.matrix(name, *shape, rows=rows, columns=columns, expert=expert))

    def wide(self, name: str, *shape: int) -> Tensor:
        """One tensor in at least float32, for what half precision would spoil."""
        return self._dense(self.checkpoint.matrix(name, shape, device=self.device), self._widest)

    def norm(self, name: str, size: int, unit_offset: bool = False) -> Tensor:
        """A norm's weight; with `unit_offset` 1 + weight in at least float32, as half precision would round it away."""
        if not unit_offset:
            return self.take(name, size)
        weight = self.wide(name, size)
        return weight if weight.device.type == "meta" else 1 + weight  # see `joined`

    def matrix(
        self, name: str, *shape: int, rows: Span | None = None, columns: Span | None = None, expert: int | None = None
    ) -> Matrix:
        """As `take`, but what is quantised on disk stays so."""
        held = self.checkpoint.matrix(name, shape, rows, columns, expert, self.device)
        return held if isinstance(held, Quantised) else self._dense(held)

    def weight(self, matrix: Matrix) -> Weight:
        """A weight from `matrix` `[outputs, inputs]`, the layout of checkpoints."""
        if isinstance(matrix, Quantised) and self.kernels.keeps(matrix, self.dtype):
            made = self.kernels.quantised(matrix, self.dtype)
            self.checkpoint.tally.keep(matrix, made)
            return made
        dense = self._dense(matrix) if isinstance(matrix, Quantised) else matrix
        return self.kernels.weight(dense.t().contiguous())

    def stack(self, experts: range, matrix_of: Callable[[int], Matrix]) -> Stack:
        """The weights of these experts, each from its matrix `[outputs, inputs]`, read one after the other."""
        first, count = matrix_of(experts[0]), len(experts)
        if isinstance(first, Quantised) and self.kernels.keeps(first, self.dtype):
            try:
                made = self.kernels.quantised_stack(self._like(first, experts, matrix_of), self.dtype)
            except _UnlikeError:
                pass  # one weight for all of them is dense, then
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
        """The experts' matrices, all quantised as the `first`.

        Raises:
            _UnlikeError: one is not.
        """
        yield first
        for expert in experts[1:]:
            matrix = matrix_of(expert)
            quantised = isinstance(matrix, Quantised) and self.kernels.keeps(matrix, self.dtype)
            if not isinstance(matrix, Quantised) or not quantised or not fit([first, matrix], zeros=True):
                raise _UnlikeError
            yield matrix

    def _dense(self, matrix: Matrix, dtype: torch.dtype | None = None) -> Tensor:
        """The matrix in `dtype`, or that of the model, on the device."""
        if isinstance(matrix, Quantised):
            self.checkpoint.tally.dequantised[matrix.about] += 1
            matrix = matrix.numbers(self._widest)
        return placed(matrix, self.dtype if dtype is None else dtype, self.device)

    def beneath(self, parts: list[Matrix]) -> Matrix:
        """Matrices of the same inputs, one's outputs after the other's; quantised if all are, and alike."""
        quantised = [part for part in parts if isinstance(part, Quantised)]
        if len(quantised) == len(parts) and fit(quantised):
            return side_by_side(quantised)
        return joined([self._dense(part) for part in parts])

    def projection(self, name: str, rows: int, columns: int) -> Weight:
        """One weight of `rows` outputs and `columns` inputs."""
        return self.weight(self.matrix(name, rows, columns))

    def outputs(
        self, names: list[str], rows: list[int], spans: list[Span], columns: int, bias: bool
    ) -> tuple[Matrix, Tensor | None]:
        """Column-parallel projections, packed: of each the outputs in its span, `[sum, columns]`, and their biases."""
        each = list(zip(names, rows, spans, strict=True))
        weight = self.beneath([self.matrix(f"{name}.weight", r, columns, rows=span) for name, r, span in each])
        biases = [self.take(f"{name}.bias", r, rows=span) for name, r, span in each] if bias else []
        return weight, joined(biases) if bias else None

    def inputs(
        self, name: str, rows: int, columns: int, span: Span, bias: bool, part: Shard
    ) -> tuple[Weight, Tensor | None]:
        """A row-parallel projection, of the inputs in `span`; only part 0 adds the bias."""
        weight = self.weight(self.matrix(f"{name}.weight", rows, columns, columns=span))
        added = self.take(f"{name}.bias", rows) if bias else None
        return weight, added if part.rank == 0 else None


def side_by_side(parts: list[Quantised]) -> Quantised:
    """Quantised matrices that `fit`, one's outputs after the other's."""
    parts = alike(parts)
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return replace(
        parts[0],
        codes=joined([part.codes for part in parts]),
        scales=joined([part.scales for part in parts]),
        zeros=joined(zeros) if zeros else None,
    )


def in_order(matrix: Matrix, change: Callable[[Tensor], Tensor]) -> Matrix:
    """The outputs of `matrix` `[outputs, inputs]` in the order that `change` makes of `[outputs]` numbers."""
    order = change(torch.arange(matrix.shape[0]))
    if isinstance(matrix, Quantised):
        return matrix.each(lambda part: chosen(part, order, 0))
    return chosen(matrix, order, 0)


def apart(order: Tensor) -> Tensor:
    """What alternates, gates and ups, one after the other."""
    return joined([order[0::2], order[1::2]])
