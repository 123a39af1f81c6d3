"""The only interface between a model and the other ranks that hold shards of it."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from cluster.distributed.progress import ProgressClock


class Shards(Protocol):
    """The collectives by which the `size` shards of a head choose tokens together. Each shard scores its own columns of
    the same T' rows, and exchanges a few numbers per row instead of logits. All shards make the same calls in the same
    order. All ranks of an attention group get the same results.

    If the head is sharded over the attention group, the T' rows are the group's own T rows. If the head is sharded over
    the world (`over_world`), the T' rows are those of all groups, one group after the other.
    """

    @property
    def size(self) -> int:
        """Return n, the number of shards."""

    @property
    def over_world(self) -> bool:
        """Whether this rank also scores rows of other groups."""

    def spread(self, numbers: Tensor) -> Tensor:
        """Int64 numbers of own rows, `[T, k]` -> the same numbers for all T' rows, `[T', k]`. Only if `over_world`."""

    def highest(self, numbers: Tensor) -> Tensor:
        """Float64 `[T', 1]` -> the maximum of each row over all shards; NaN counts as highest."""

    def add(self, numbers: Tensor) -> Tensor:
        """Int64 `[T', k]` -> the sums over all shards."""

    def compare(self, numbers: Tensor) -> Tensor:
        """Float64 `[T', k]` -> the numbers of all n shards for own rows, `[n, T, k]`."""


class ExpertRouting(NamedTuple):
    """Which k experts each of T rows uses: their `weights`, their ids (`experts`), and the shard of experts that holds
    each of them (`shards`). All three are `[T, k]`.
    """

    weights: Tensor
    experts: Tensor
    shards: Tensor


class ExpertParallelLayer(Protocol):
    """A layer of experts that are spread over ranks, as seen by the exchange that sends rows to them."""

    def choose(self, rows: Tensor) -> ExpertRouting:
        """Rows `[T, H]` -> their experts, which may be on any rank."""

    def run(self, rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Rows `[T, H]`, and weights and ids of their experts, `[T, k]` each -> the weighted sum of the outputs of this
        rank's experts, `[T, H]`.
        """


class TokenExchange(Protocol):
    """Collectives around the sharded parts of a model. With one rank, they send nothing."""

    @property
    def shards(self) -> Shards | None:
        """Return the collectives of the head's shards; None if this rank holds embedding and head whole."""

    def reduce(self, rows: Tensor) -> Tensor:
        """All-reduce: partial sums of own rows `[T, H]` -> their sum over the attention group."""

    def gather(self, rows: Tensor) -> Tensor:
        """All-gather: own rows `[T, H]` -> the rows `[.., H]` of all attention groups, one group after the other."""

    def scatter(self, rows: Tensor, group_sums: Tensor | None = None) -> Tensor:
        """Reduce-scatter: partial sums for the rows of all attention groups -> own rows `[T, H]`, summed over all
        ranks. `group_sums` `[T, H]` are further partial sums for own rows, which only ranks of this group have; None if
        there are none.
        """

    @property
    def routes_to_experts(self) -> bool:
        """Whether in this step each row goes only to the ranks that hold its experts (`to_experts`), not to all."""

    def to_experts(self, rows: Tensor, experts: ExpertParallelLayer, group_sums: Tensor | None) -> Tensor:
        """All-to-all: own rows `[T, H]` -> for each row, the weighted sum of its experts' outputs, `[T, H]`.
        `group_sums` is as in `scatter`.
        """

    def embed(self, ids: Tensor, lookup: Callable[[Tensor], Tensor]) -> Tensor:
        """Token ids `[T]` -> rows `[T, H]`, summed over shards; `lookup` gives zeros for ids of other shards."""

    def head(self, rows: Tensor, project: Callable[[Tensor], Tensor]) -> tuple[Tensor, int]:
        """Rows `[T, H]` -> this shard's logits `[T', v]`, which `project` computes, and the index of the first own row
        among the T' rows that this rank scores (see `Shards`).
        """


EXPERT_CALLS = "experts"
"""In `exchange_calls`, this name stands for the calls around an expert-parallel layer, because the layer does not know
them in advance: the plan of each step decides between `gather` with `scatter`, and `to_experts`.
"""


class NoExchange:
    """The exchange of a rank without peers, and of a draft that every rank runs whole. It sends nothing, and counts the
    calls.
    """

    shards: Shards | None = None

    def __init__(self, clock: ProgressClock | None = None) -> None:
        """`clock` counts the calls, so that a rank without peers shows progress too; None makes a new one."""
        self._clock = ProgressClock() if clock is None else clock

    def reduce(self, rows: Tensor) -> Tensor:
        """Return `rows` unchanged: this rank runs its rows without other ranks."""
        self._clock.mark_layer()
        return rows

    def gather(self, rows: Tensor) -> Tensor:
        """Return `rows` unchanged: this rank runs its rows without other ranks."""
        self._clock.mark_layer()
        return rows

    def scatter(self, rows: Tensor, group_sums: Tensor | None = None) -> Tensor:
        """Return `rows`, plus `group_sums` if they are given."""
        self._clock.mark_layer()
        return rows if group_sums is None else rows + group_sums

    @property
    def routes_to_experts(self) -> bool:
        """False: this rank holds all experts."""
        return False

    def to_experts(self, rows: Tensor, experts: ExpertParallelLayer, group_sums: Tensor | None) -> Tensor:
        """Never called, because this rank holds all experts."""
        raise AssertionError("a rank that holds all experts has nowhere to send rows")

    def embed(self, ids: Tensor, lookup: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the rows of the whole embedding."""
        self._clock.mark_layer()
        return lookup(ids)

    def head(self, rows: Tensor, project: Callable[[Tensor], Tensor]) -> tuple[Tensor, int]:
        """Return the logits of the whole head."""
        self._clock.mark_layer()
        return project(rows), 0
