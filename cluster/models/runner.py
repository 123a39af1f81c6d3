"""A model bound to its own pool and attention backend; a batch never carries a pool, so runners cannot mix them up."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from cluster.batch import AttentionMetadata, HostBounds
from cluster.device.timing import Spans
from cluster.kv.pool import KVPool
from cluster.models.draft import DraftModel
from cluster.models.layer import Attend
from cluster.models.target import DecoderTarget
from cluster.models.vocab import ShardedLogits


class AttentionBackend(Attend, Protocol):
    """The attention primitive, bound to a pool and a page table: told before a step what the host knows of it, and in
    the step, once per forward, what each row sees.
    """

    def prepare(self, bounds: HostBounds) -> None:
        """A step within these bounds begins. What they are beyond the truth changes no result."""
        ...

    def bind(self, seen: AttentionMetadata) -> None:
        """Use `seen` for the calls of the next forward. On a GPU nothing here waits for the device."""
        ...


@dataclass(frozen=True, slots=True)
class TargetRunner:
    """The target with its pool; captures the aux hidden states that the draft asked for. `watch` times the forwards."""

    model: DecoderTarget
    pool: KVPool
    attention: AttentionBackend
    boundaries: tuple[int, ...]
    watch: Spans

    def prepare(self, bounds: HostBounds, positions: int) -> None:
        """A step within these bounds begins, all of whose rows are at positions below `positions`."""
        self.attention.prepare(bounds)
        self.model.reach(positions)

    def forward(self, token_ids: Tensor, positions: Tensor, seen: AttentionMetadata) -> tuple[Tensor, list[Tensor]]:
        """Rows `[T]` -> post-norm hidden `[T, H]`, residual stream at each boundary `[T, H]`."""
        with self.watch:
            self.attention.bind(seen)
            return self.model.forward(token_ids, positions, self.attention, self.boundaries)

    def logits(self, hidden: Tensor) -> ShardedLogits:
        """Hidden `[T, H]` -> logits over the vocabulary."""
        with self.watch:
            return self.model.logits(hidden)


@dataclass(frozen=True, slots=True)
class DraftRunner:
    """One member of the draft runner list, with its own pool."""

    model: DraftModel
    pool: KVPool
    attention: AttentionBackend
    watch: Spans

    def prepare(self, bounds: HostBounds, positions: int) -> None:
        """A step within these bounds begins, all of whose rows are at positions below `positions`."""
        self.attention.prepare(bounds)
        self.model.reach(positions)

    def fuse_aux(self, aux_hidden: Tensor) -> Tensor:
        """`[T, A]` -> `[T, H]`."""
        with self.watch:
            return self.model.fuse_aux(aux_hidden)

    def forward(
        self, token_ids: Tensor, positions: Tensor, hidden: Tensor, seen: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        """Rows `[T]` and hidden `[T, H]` -> normed and recurrent hidden `[T, H]`."""
        with self.watch:
            self.attention.bind(seen)
            return self.model.forward(token_ids, positions, hidden, self.attention)

    def logits(self, normed: Tensor) -> ShardedLogits:
        """Output for the head `[T, H]` -> logits over the draft vocabulary."""
        with self.watch:
            return self.model.logits(normed)
