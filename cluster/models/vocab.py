"""Embedding and head, whole or sharded over the vocabulary.

A vocabulary of V ids over n ranks is cut into n equal parts of v = ceil(V / n) ids; the last one is padded with zeros.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.distributed.mesh import Shard
from cluster.kernels.interface import Kernels, Weight
from cluster.models.arithmetic import joined
from cluster.models.exchange import Shards, TokenExchange
from cluster.models.load import Loader

ALL = Shard()


@dataclass(frozen=True, slots=True)
class Embedding:
    """An embedding or its shard `part`: `weight` `[v, H]` has the rows of ids `start` to `start + v - 1`."""

    weight: Tensor
    start: int = 0
    part: Shard = ALL

    def __call__(self, ids: Tensor, exchange: TokenExchange) -> Tensor:
        """Token ids `[T]` -> rows `[T, H]`."""
        return exchange.embed(ids, self._lookup)  # sums the shards' rows

    def _lookup(self, ids: Tensor) -> Tensor:
        if self.part.size == 1:
            return F.embedding(ids, self.weight)
        # Ids of other shards get zeros, so that the sum over all shards is the embedding.
        local = ids - self.start
        foreign = (local < 0) | (local >= self.weight.shape[0])
        return F.embedding(local.masked_fill(foreign, 0), self.weight).masked_fill_(foreign[:, None], 0)


@dataclass(frozen=True, slots=True)
class ShardedLogits:
    """The logits of a head on one rank: `values` `[T', v]` for the columns `start` to `start + v - 1` of `vocab`.

    Columns beyond the vocabulary are -inf, so that they are never chosen. This rank's own rows begin at row `first`;
    other rows belong to other groups. `shards` connects to the ranks with other columns; it is None if this rank has
    all columns.
    """

    values: Tensor
    vocab: int
    start: int = 0
    first: int = 0
    shards: Shards | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """A head over `vocab` ids or its shard: `weight` `[H, v]` has the columns from `start` on."""

    weight: Weight
    vocab: int
    start: int = 0

    @property
    def columns(self) -> int:
        """Return v, the number of columns of this shard."""
        return self.weight.shape[1]

    def __call__(self, rows: Tensor, exchange: TokenExchange, cap: float | None = None) -> ShardedLogits:
        """Rows `[T, H]` -> this shard's logits. If `cap` (softcap) is given, logits x become cap * tanh(x / cap)."""
        values, first = exchange.head(rows, self.weight)
        if cap is not None:
            values = torch.tanh(values / cap) * cap
        if self.start + self.columns > self.vocab:
            values[:, max(0, self.vocab - self.start) :] = float("-inf")
        return ShardedLogits(values, self.vocab, self.start, first, exchange.shards)


def load_embedding(load: Loader, name: str, vocab: int, hidden: int) -> Embedding:
    """Return this rank's shard of the embedding `name` `[V, H]`."""
    part = load.sharding.vocab
    each = -(-vocab // part.size)
    start, stop = min(vocab, part.rank * each), min(vocab, (part.rank + 1) * each)
    weight = load.take(name, vocab, hidden, rows=None if part.size == 1 else (start, stop))
    if stop - start < each:
        weight = joined([weight, weight.new_zeros(each - (stop - start), hidden)])
    return Embedding(weight, start, part)


def load_head(load: Loader, name: str, vocab: int, hidden: int) -> Head:
    """Return this rank's shard of the head `name` `[V, H]`."""
    return tied_head(load_embedding(load, name, vocab, hidden), vocab, load.kernels)


def tied_head(embedding: Embedding, vocab: int, kernels: Kernels) -> Head:
    """Return the head that has the weights of `embedding`."""
    return Head(kernels.weight(embedding.weight.t().contiguous()), vocab, embedding.start)


def chosen_head(whole: Head, ids: Tensor, part: Shard, kernels: Kernels) -> Head:
    """Return this rank's shard of the head with only the columns of `ids` `[Vd]` (FR-Spec, arXiv 2502.14856)."""
    each = -(-ids.shape[0] // part.size)
    start = part.rank * each
    weight = whole.weight.dense()[:, ids[start : start + each]]
    if weight.shape[1] < each:
        weight = joined([weight, weight.new_zeros(weight.shape[0], each - weight.shape[1])], 1)
    return Head(kernels.weight(weight.contiguous()), ids.shape[0], start)
