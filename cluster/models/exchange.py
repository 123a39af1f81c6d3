"""The only interface between a model and the ranks that share it."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from cluster.distributed.progress import ProgressClock


class Shards(Protocol):
    """How the shards of a head choose as one: each scores its own columns of the same rows, and a few numbers of each
    row travel instead of logits. Every shard makes the same calls in the same order, and sees the same numbers.

    There are `size` of them. A shard scores T' rows. Where the head is sharded over the attention group these are the
    group's own T; where it is sharded over the world (`wide`) they are those of all groups, one group after the other.
    """

    @property
    def size(self) -> int:
        """n, how many there are."""
        ...

    @property
    def wide(self) -> bool:
        """Whether rows of other groups are scored too."""
        ...

    def spread(self, numbers: Tensor) -> Tensor:
        """What scoring has to know of own rows, int64 `[T, k]` -> of the rows of all groups `[T', k]`; only if wide."""
        ...

    def highest(self, numbers: Tensor) -> Tensor:
        """A float64 of each row scored, `[T', 1]` -> the highest that some shard has; NaN is the highest."""
        ...

    def add(self, numbers: Tensor) -> Tensor:
        """Whole numbers, int64 `[T', k]` -> their sums over all shards."""
        ...

    def compare(self, numbers: Tensor) -> Tensor:
        """Float64 `[T', k]` -> what all n shards have of own rows, `[n, T, k]`."""
        ...


class ExpertRouting(NamedTuple):
    """Of T rows the k experts that each takes: their `weights`, their ids `experts`, and the `parts` that hold them,
    `[T, k]` each.
    """

    weights: Tensor
    experts: Tensor
    parts: Tensor


class ExpertParallelLayer(Protocol):
    """Experts of which each rank holds one of several parts, as an exchange sees them that sends rows to them."""

    def choose(self, rows: Tensor) -> ExpertRouting:
        """Rows `[T, H]` -> the experts that they take, here or elsewhere."""
        ...

    def run(self, rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Rows `[T, H]`, and weights and ids of the experts that they take, `[T, k]` -> what those that are here make
        of them, `[T, H]`.
        """
        ...


class TokenExchange(Protocol):
    """How rows travel between ranks around the sharded parts of a model; with one rank it is the identity."""

    @property
    def shards(self) -> Shards | None:
        """Those of embedding and head; None where this rank holds them whole."""
        ...

    def reduce(self, rows: Tensor) -> Tensor:
        """Partial sums of own rows `[T, H]` over the attention group -> their sum."""
        ...

    def gather(self, rows: Tensor) -> Tensor:
        """Own rows `[T, H]` -> the rows of every rank."""
        ...

    def scatter(self, rows: Tensor, common: Tensor | None = None) -> Tensor:
        """Partial sums for the rows of every rank, and, with `common` `[T, H]`, further ones for own rows, which the
        attention group alone has -> own rows `[T, H]`, summed.
        """
        ...

    @property
    def counted(self) -> bool:
        """Whether rows go only to the experts that they take, by `to_experts`; else, in this step, to all."""
        ...

    def to_experts(self, rows: Tensor, experts: ExpertParallelLayer, common: Tensor | None) -> Tensor:
        """Own rows `[T, H]` -> what the experts that they take make of them, summed, `common` as in `scatter`."""
        ...

    def embed(self, ids: Tensor, lookup: Callable[[Tensor], Tensor]) -> Tensor:
        """Token ids `[T]` -> rows `[T, H]`, where `lookup` gives zeros for ids of another shard."""
        ...

    def head(self, rows: Tensor, project: Callable[[Tensor], Tensor]) -> tuple[Tensor, int]:
        """Rows `[T, H]` -> this shard's logits `[T', v]` of the rows that it scores, made by `project`, and where own
        rows begin among them.
        """
        ...


EXPERTS = "experts"
"""Stands in a list of calls for those that bring rows to experts which are apart; which these are, a plan says."""


class NoExchange:
    """The exchange of a single rank, and of a draft that each rank runs whole; it only counts its calls."""

    shards: Shards | None = None

    def __init__(self, clock: ProgressClock | None = None) -> None:
        """`clock` counts the calls, so that a rank without peers shows progress too."""
        self._clock = ProgressClock() if clock is None else clock

    def reduce(self, rows: Tensor) -> Tensor:
        """Own rows, unchanged."""
        self._clock.part()
        return rows

    def gather(self, rows: Tensor) -> Tensor:
        """Own rows, unchanged."""
        self._clock.part()
        return rows

    def scatter(self, rows: Tensor, common: Tensor | None = None) -> Tensor:
        """Own rows, with what is common to them."""
        self._clock.part()
        return rows if common is None else rows + common

    @property
    def counted(self) -> bool:
        """All experts are here."""
        return False

    def to_experts(self, rows: Tensor, experts: ExpertParallelLayer, common: Tensor | None) -> Tensor:
        """Not asked for, as all experts are here."""
        raise AssertionError("a rank that holds all experts has nowhere to send rows")

    def embed(self, ids: Tensor, lookup: Callable[[Tensor], Tensor]) -> Tensor:
        """The whole embedding's rows."""
        self._clock.part()
        return lookup(ids)

    def head(self, rows: Tensor, project: Callable[[Tensor], Tensor]) -> tuple[Tensor, int]:
        """The whole head's logits."""
        self._clock.part()
        return project(rows), 0
