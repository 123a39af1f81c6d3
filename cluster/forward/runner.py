"""A model bound to its own pool and attention backend; a batch never carries a pool, so runners cannot mix them up."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from cluster.batch import AttentionPlan
from cluster.kv.pool import KVPool
from cluster.models.draft import DraftModel
from cluster.models.layer import Attend
from cluster.models.target import DecoderTarget
from cluster.models.vocab import Columns
from cluster.timing import Spans


class AttentionBackend(Attend, Protocol):
    """The attention primitive; `bind` sets once per forward what each row sees."""

    def bind(self, plan: AttentionPlan) -> None:
        """Use `plan` for the calls of the next forward."""
        ...


@dataclass(frozen=True, slots=True)
class TargetRunner:
    """The target with its pool; captures the aux hidden states that the draft asked for. `watch` times the forwards."""

    model: DecoderTarget
    pool: KVPool
    attention: AttentionBackend
    boundaries: tuple[int, ...]
    watch: Spans

    def forward(self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan) -> tuple[Tensor, list[Tensor]]:
        """Rows `[T]` -> post-norm hidden `[T, H]`, residual stream at each boundary `[T, H]`."""
        with self.watch:
            self.attention.bind(plan)
            return self.model.forward(token_ids, positions, self.attention, self.boundaries)

    def logits(self, hidden: Tensor) -> Columns:
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

    def fuse_aux(self, aux_hidden: Tensor) -> Tensor:
        """`[T, A]` -> `[T, H]`."""
        with self.watch:
            return self.model.fuse_aux(aux_hidden)

    def forward(
        self, token_ids: Tensor, positions: Tensor, hidden: Tensor, plan: AttentionPlan
    ) -> tuple[Tensor, Tensor]:
        """Rows `[T]` and hidden `[T, H]` -> normed and recurrent hidden `[T, H]`."""
        with self.watch:
            self.attention.bind(plan)
            return self.model.forward(token_ids, positions, hidden, self.attention)

    def logits(self, normed: Tensor) -> Columns:
        """Output for the head `[T, H]` -> logits over the draft vocabulary."""
        with self.watch:
            return self.model.logits(normed)
