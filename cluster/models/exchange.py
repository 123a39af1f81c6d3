"""The only interface between a model and the ranks that share it."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from cluster.clock import Clock


class TokenExchange(Protocol):
    """How rows travel between ranks around the sharded parts of a model; with one rank it is the identity."""

    def reduce(self, rows: Tensor) -> Tensor:
        """Partial sums of own rows `[T, H]` over the attention group -> their sum."""
        ...

    def gather(self, rows: Tensor) -> Tensor:
        """Own rows `[T, H]` -> the rows of every rank."""
        ...

    def scatter(self, rows: Tensor) -> Tensor:
        """Partial sums for the rows of every rank -> own rows `[T, H]`, summed."""
        ...

    def embed(self, ids: Tensor, lookup: Callable[[Tensor], Tensor]) -> Tensor:
        """Token ids `[T]` -> rows `[T, H]`, where `lookup` gives zeros for ids of another shard."""
        ...

    def head(self, rows: Tensor, project: Callable[[Tensor], Tensor]) -> Tensor:
        """Rows `[T, H]` -> logits of all shards `[T, n * v]`, where `project` gives this shard's `[T, v]`."""
        ...


LAYER_OPS = ("reduce", "gather", "scatter")
"""The exchange calls of a decoder layer, in order, whatever its attention and MLP are."""


class NoExchange:
    """The exchange of a single rank, and of a draft that each rank runs whole; it only counts its calls."""

    def __init__(self, clock: Clock | None = None) -> None:
        """`clock` counts the calls, so that a rank without peers shows progress too."""
        self._clock = Clock() if clock is None else clock

    def reduce(self, rows: Tensor) -> Tensor:
        """Own rows, unchanged."""
        self._clock.part()
        return rows

    def gather(self, rows: Tensor) -> Tensor:
        """Own rows, unchanged."""
        self._clock.part()
        return rows

    def scatter(self, rows: Tensor) -> Tensor:
        """Own rows, unchanged."""
        self._clock.part()
        return rows

    def embed(self, ids: Tensor, lookup: Callable[[Tensor], Tensor]) -> Tensor:
        """The whole embedding's rows."""
        self._clock.part()
        return lookup(ids)

    def head(self, rows: Tensor, project: Callable[[Tensor], Tensor]) -> Tensor:
        """The whole head's logits."""
        self._clock.part()
        return project(rows)
