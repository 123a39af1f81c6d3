"""Embedding and head, whole or sharded over the vocabulary.

A vocabulary of V ids is cut into n equal parts of v = ceil(V / n) ids, one for each of n ranks. The last parts may have
fewer ids of the vocabulary (or none); they are padded with zeros.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.distributed.mesh import Shard
from cluster.kernels.interface import Kernels, Weight
from cluster.models.arithmetic import concat
from cluster.models.exchange import Shards, TokenExchange
from cluster.models.load import Loader

UNSHARDED = Shard()


@dataclass(frozen=True, slots=True)
class Embedding:
    """An embedding or its shard `shard`: `weight` `[v, H]` has the rows of token ids `start` to `start + v - 1`."""

    weight: Tensor
    start: int = 0
    shard: Shard = UNSHARDED

    def __call__(self, ids: Tensor, exchange: TokenExchange) -> Tensor:
        """Token ids `[T]` -> rows `[T, H]`."""
        return exchange.embed(ids, self._lookup)  # sums the shards' rows

    def _lookup(self, ids: Tensor) -> Tensor:
        if self.shard.size == 1:
            return F.embedding(ids, self.weight)
        # Ids of other shards get zeros, so that the sum over all shards is the embedding.
        local = ids - self.start
        foreign = (local < 0) | (local >= self.weight.shape[0])
        return F.embedding(local.masked_fill(foreign, 0), self.weight).masked_fill_(foreign[:, None], 0)


@dataclass(frozen=True, slots=True)
class ShardedLogits:
    """The logits of a head on one rank: `values` `[T', v]` for the ids `start` to `start + v - 1` of a vocabulary of
    `vocab` ids.

    Columns beyond the vocabulary are -inf, so that they are never chosen. The rows of this rank's own attention group
    begin at row `first_row`; other rows belong to other groups. `shards` connects to the ranks with other columns; it
    is None if this rank has all columns.
    """

    values: Tensor
    vocab: int
    start: int = 0
    first_row: int = 0
    shards: Shards | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """A head over `vocab` ids, or one shard of it: `weight` `[H, v]` has the columns from id `start` on."""

    weight: Weight
    vocab: int
    start: int = 0

    @property
    def columns(self) -> int:
        """Return v, the number of columns of this shard."""
        return self.weight.shape[1]

    def __call__(self, rows: Tensor, exchange: TokenExchange, softcap: float | None = None) -> ShardedLogits:
        """Own rows `[T, H]` -> the logits of this shard. If `softcap` c is given, a logit x becomes c * tanh(x / c)."""
        values, first_row = exchange.head(rows, self.weight)
        if softcap is not None:
            values = torch.tanh(values / softcap) * softcap
        if self.start + self.columns > self.vocab:
            values[:, max(0, self.vocab - self.start) :] = float("-inf")
        return ShardedLogits(values, self.vocab, self.start, first_row, exchange.shards)


def scale_of(scale: float | None, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Return what multiplies an embedding, as a tensor of `dtype`; None if `scale` is None. The scale is rounded to
    float32, then to `dtype`. It is not rounded if that is float64.
    """
    if scale is None:
        return None
    if dtype == torch.float64:
        return torch.tensor(scale, dtype=dtype, device=device)
    return torch.tensor(scale).to(device, dtype)


def load_embedding(load: Loader, name: str, vocab: int, hidden: int) -> Embedding:
    """Return this rank's shard of the embedding `name` `[V, H]`."""
    shard = load.sharding.vocab
    ids_per_shard = -(-vocab // shard.size)
    start, stop = min(vocab, shard.rank * ids_per_shard), min(vocab, (shard.rank + 1) * ids_per_shard)
    weight = load.tensor(name, vocab, hidden, rows=None if shard.size == 1 else (start, stop))
    if stop - start < ids_per_shard:
        weight = concat([weight, weight.new_zeros(ids_per_shard - (stop - start), hidden)])
    return Embedding(weight, start, shard)


def load_head(load: Loader, name: str, vocab: int, hidden: int) -> Head:
    """Return this rank's shard of the head `name` `[V, H]`."""
    return tied_head(load_embedding(load, name, vocab, hidden), vocab, load.kernels)


def tied_head(embedding: Embedding, vocab: int, kernels: Kernels) -> Head:
    """Return the head that has the weights of `embedding`."""
    return Head(kernels.weight(embedding.weight.t().contiguous()), vocab, embedding.start)


def select_head_columns(full_head: Head, ids: Tensor, shard: Shard, kernels: Kernels) -> Head:
    """Return this rank's shard of the head with only the columns of `ids` `[Vd]` (FR-Spec, arXiv 2502.14856)."""
    ids_per_shard = -(-ids.shape[0] // shard.size)
    start = shard.rank * ids_per_shard
    weight = full_head.weight.dense()[:, ids[start : start + ids_per_shard]]
    if weight.shape[1] < ids_per_shard:
        weight = concat([weight, weight.new_zeros(weight.shape[0], ids_per_shard - weight.shape[1])], 1)
    return Head(kernels.weight(weight.contiguous()), ids.shape[0], start)
