"""A model bound to its own KV pools and attention backend. Batches carry no pool, so pools cannot be mixed up."""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from cluster.batch import AttentionMetadata, HostBounds
from cluster.device.timing import Spans
from cluster.kv.layer_pools import LayerPools
from cluster.models.attention import Attend
from cluster.models.draft import DraftModel
from cluster.models.target import DecoderTarget
from cluster.models.vocab import ShardedLogits


class AttentionBackend(Attend, Protocol):
    """The attention primitive, bound to a pool and a page table. The host calls `prepare` before a step. Within the
    step, `bind` is called once per forward.
    """

    def prepare(self, bounds: HostBounds) -> None:
        """Prepare a step within `bounds`. Bounds that are wider than necessary do not change results."""

    def bind(self, metadata: AttentionMetadata) -> None:
        """Use `metadata` for the attention calls of the next forward. On a GPU this must not wait for the device."""


M = TypeVar("M", DecoderTarget, DraftModel)


@dataclass(frozen=True, slots=True)
class ModelRunner(Generic[M]):
    """A model with its pools and its attention; `timer` measures the time of its forwards."""

    model: M
    pools: LayerPools
    attention: AttentionBackend
    timer: Spans

    def prepare(self, bounds: HostBounds, positions: int) -> None:
        """Prepare a step within `bounds`, in which all rows are at positions below `positions`."""
        self.attention.prepare(bounds)
        self.model.prepare_positions(positions)

    def logits(self, hidden: Tensor) -> ShardedLogits:
        """Input of the head `[T, H]` -> logits over the model's vocabulary."""
        with self.timer:
            return self.model.logits(hidden)


@dataclass(frozen=True, slots=True)
class TargetRunner(ModelRunner[DecoderTarget]):
    """The runner of the target. Its forwards also return the residual stream at `boundaries`: boundary i is the input
    of layer i, and the last boundary is the output of the last layer.
    """

    boundaries: tuple[int, ...]

    def forward(self, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> tuple[Tensor, list[Tensor]]:
        """Token ids `[T]` -> post-norm hidden `[T, H]`, and the residual stream at each boundary, `[T, H]` each."""
        with self.timer:
            self.attention.bind(metadata)
            return self.model.forward(token_ids, positions, self.attention, self.boundaries)


class DraftRunner(ModelRunner[DraftModel]):
    """One member of `draft_runner_list`: a draft model with its own pools. Only a multi-layer draft has several."""

    __slots__ = ()

    def fuse_aux(self, aux_hidden: Tensor) -> Tensor:
        """The target's hidden states `[T, A]` -> the draft's hidden `[T, H]`."""
        with self.timer:
            return self.model.fuse_aux(aux_hidden)

    def forward(
        self, token_ids: Tensor, positions: Tensor, hidden: Tensor, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        """Token ids `[T]` and hidden `[T, H]` -> (input of the head, recurrent hidden), `[T, H]` each."""
        with self.timer:
            self.attention.bind(metadata)
            return self.model.forward(token_ids, positions, hidden, self.attention)
