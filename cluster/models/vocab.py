"""Embedding and head, whole or one shard of the vocabulary.

A vocabulary of V ids over n ranks is cut into n equal parts of v = ceil(V / n) ids; the last one is padded with zeros.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from cluster.mesh import Part
from cluster.models.arithmetic import joined, project
from cluster.models.exchange import TokenExchange
from cluster.models.load import Loader

ALL = Part()


@dataclass(frozen=True, slots=True)
class Embedding:
    """`weight` `[v, H]` are the rows of ids `start` to `start + v - 1`."""

    weight: Tensor
    start: int = 0
    part: Part = ALL

    def __call__(self, ids: Tensor, exchange: TokenExchange) -> Tensor:
        """Token ids `[T]` -> rows `[T, H]`."""
        return exchange.embed(ids, self._lookup)

    def _lookup(self, ids: Tensor) -> Tensor:
        if self.part.size == 1:
            return F.embedding(ids, self.weight)
        local = ids - self.start
        foreign = (local < 0) | (local >= self.weight.shape[0])
        return F.embedding(local.masked_fill(foreign, 0), self.weight).masked_fill_(foreign[:, None], 0)


@dataclass(frozen=True, slots=True)
class Head:
    """`weight` `[H, v]` are this shard's columns of a head over `vocab` ids."""

    weight: Tensor
    vocab: int

    @property
    def columns(self) -> int:
        """v, this shard's part of the vocabulary."""
        return self.weight.shape[1]

    def __call__(self, rows: Tensor, exchange: TokenExchange) -> Tensor:
        """Rows `[T, H]` -> logits `[T, V]`."""
        return exchange.head(rows, self._project)[:, : self.vocab]

    def _project(self, rows: Tensor) -> Tensor:
        return project(rows, self.weight)


def load_embedding(load: Loader, name: str, vocab: int, hidden: int) -> Embedding:
    """This rank's shard of the embedding `name` `[V, H]`."""
    part = load.sharding.vocab
    each = -(-vocab // part.size)
    start, stop = min(vocab, part.rank * each), min(vocab, (part.rank + 1) * each)
    weight = load.take(name, vocab, hidden, rows=None if part.size == 1 else (start, stop))
    if stop - start < each:
        weight = joined([weight, weight.new_zeros(each - (stop - start), hidden)])
    return Embedding(weight, start, part)


def load_head(load: Loader, name: str, vocab: int, hidden: int) -> Head:
    """This rank's shard of the head `name` `[V, H]`."""
    return tied_head(load_embedding(load, name, vocab, hidden), vocab)


def tied_head(embedding: Embedding, vocab: int) -> Head:
    """The head with the weights of `embedding`, transposed to input-major."""
    return Head(embedding.weight.t().contiguous(), vocab)


def chosen_head(whole: Head, ids: Tensor, part: Part) -> Head:
    """This rank's shard of the head's columns for `ids` `[Vd]` only (FR-Spec, arXiv 2502.14856)."""
    each = -(-ids.shape[0] // part.size)
    weight = whole.weight[:, ids[part.rank * each : (part.rank + 1) * each]]
    if weight.shape[1] < each:
        weight = joined([weight, weight.new_zeros(weight.shape[0], each - weight.shape[1])], 1)
    return Head(weight.contiguous(), ids.shape[0])
