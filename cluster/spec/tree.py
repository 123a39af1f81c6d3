"""A draft tree as tensors, and how it is selected from the candidates of all levels.

Legend: R requests, N nodes (root included, node 0 is the bonus), C candidates = K + (S - 1) K^2.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from cluster.sampling.noise import at_least_float32

DECAY = 1e-3
"""Every level costs a candidate this much log-probability, so that scores fall strictly along a path: a candidate among
the best N - 1 has its parent among them, even with ties."""
FLOOR = -30.0  # log-probabilities are clamped here, which keeps DECAY above float32 rounding at any depth up to 16


@dataclass(frozen=True, slots=True)
class DraftTree:
    """`tokens`, `parents`, `depths` `[R, N]` (the root's parent is itself); `ancestors` `[R, N, N]` ancestor-or-self.

    Parents come before their children. `padded`: some nodes fill the shape; they are their own parents, so the root is
    no ancestor of theirs, and never on a path.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    padded: bool = False

    def paths(self, deepest: int) -> Tensor:
        """The tokens from the root, itself left out, to each node, `[R, N, deepest]`; -1 beyond the node."""
        r, n = self.tokens.shape
        place = torch.where(self.ancestors, self.depths[:, None], 0)  # the root's, which is cut off
        paths = self.tokens.new_full((r, n, deepest + 1), -1)
        return paths.scatter_(2, place, self.tokens[:, None].expand(r, n, n))[..., 1:]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Proposals of all levels, `[R, C]` each; `parents` are candidate numbers, -1 for the root; `depths` `[C]` go up to
    `deepest`.
    """

    tokens: Tensor
    scores: Tensor
    parents: Tensor
    depths: Tensor
    deepest: int

    @staticmethod
    def of(levels: list[tuple[Tensor, Tensor, Tensor]]) -> "Candidates":
        """The candidates of all levels: tokens, scores and parents of each, `[R, K]` of the first, then `[R, K^2]`."""
        tokens, scores, parents = (torch.cat(part, 1) for part in zip(*levels, strict=True))
        depths = depths_of(tokens.shape[1], levels[0][0].shape[1], tokens.device)
        return Candidates(tokens, scores, parents, depths, len(levels))


def depths_of(count: int, topk: int, device: torch.device) -> Tensor:
    """The depths `[C]` of C candidates: K of depth 1, then K^2 of each depth."""
    number = torch.arange(count, device=device)
    return (number - topk).div(topk * topk, rounding_mode="floor").add_(2)


def clean(log_probabilities: Tensor) -> Tensor:
    """Log-probabilities made safe to add up: NaN and very small ones become FLOOR, and DECAY is subtracted.

    In float32 at least: half precision would round DECAY away, and a tie could then select a child without its parent.
    """
    wide = log_probabilities.to(at_least_float32(log_probabilities.dtype))
    return wide.nan_to_num(FLOOR, 0.0, FLOOR).clamp(FLOOR, 0.0) - DECAY


class Growth(Protocol):
    """EAGLE-2's dynamic tree while it grows: the K best rows of a level by cumulative score are drafted further."""

    def add(self, proposed: Tensor, likely: Tensor) -> None:
        """The proposals after each row of the level and their log-probabilities, `[R, K, K]` each."""
        ...

    def best(self) -> tuple[Tensor, Tensor]:
        """The K rows of the next level: their tokens, and the rows of this level that they follow, `[R, K]` each."""
        ...

    def tree(self, bonus: Tensor, nodes: int) -> DraftTree:
        """The root `bonus` `[R]` and the best `nodes - 1` candidates of all levels."""
        ...


Sprout = Callable[[Tensor, Tensor, int], Growth]
"""Begins to grow trees: of the proposals after the bonus and their log-probabilities, `[R, K]` each, to a depth."""


class TorchGrowth:
    """`Growth` in torch's operators: the twin of the others."""

    def __init__(self, tokens: Tensor, likely: Tensor, num_steps: int) -> None:
        """See `Sprout`; the depth does not matter here."""
        self._number = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        self._tokens, self._score = tokens, clean(likely)
        self._levels = [(tokens, self._score, torch.full_like(tokens, -1))]
        self._before = 0

    def add(self, proposed: Tensor, likely: Tensor) -> None:
        """See `Growth.add`."""
        r, k = self._number.shape
        self._before += self._tokens.shape[1]
        self._score = (self._score[..., None] + clean(likely)).view(r, k * k)
        self._tokens = proposed.reshape(r, k * k)
        parents = self._number[..., None].expand(r, k, k).reshape(r, k * k)
        self._levels.append((self._tokens, self._score, parents))

    def best(self) -> tuple[Tensor, Tensor]:
        """See `Growth.best`."""
        k = self._number.shape[1]
        self._score, pick = self._score.topk(k, 1)
        self._number = self._before + pick
        return self._tokens.gather(1, pick), pick // k

    def tree(self, bonus: Tensor, nodes: int) -> DraftTree:
        """See `Growth.tree`."""
        return best_tree(Candidates.of(self._levels), bonus, nodes)


def best_tree(candidates: Candidates, bonus: Tensor, nodes: int) -> DraftTree:
    """The root and the `nodes - 1` best candidates by cumulative score, in candidate order (EAGLE-2's selection)."""
    r, c = candidates.tokens.shape
    chosen = candidates.scores.topk(nodes - 1, dim=1).indices.sort(dim=1).values
    tokens = torch.cat([bonus[:, None], candidates.tokens.gather(1, chosen)], 1)
    number = torch.zeros(r, c + 1, dtype=torch.int64, device=tokens.device)
    number.scatter_(1, chosen, torch.arange(1, nodes, device=tokens.device).expand(r, -1))
    above = candidates.parents.gather(1, chosen)
    parents = number.gather(1, torch.where(above < 0, c, above))
    root = torch.zeros(r, 1, dtype=torch.int64, device=tokens.device)
    depths = torch.cat([root, candidates.depths.expand(r, -1).gather(1, chosen)], 1)
    parents = torch.cat([root, parents], 1)
    return DraftTree(tokens, parents, depths, ancestors_of(parents, candidates.deepest))


def ancestors_of(parents: Tensor, depth: int) -> Tensor:
    """Ancestor-or-self mask `[R, N, N]` of trees at most `depth` deep."""
    r, n = parents.shape
    own = torch.eye(n, dtype=torch.bool, device=parents.device).expand(r, -1, -1)
    mask = own
    for _ in range(depth):
        mask = own | mask.gather(1, parents[..., None].expand(-1, -1, n))
    return mask


def chain(tokens: Tensor) -> DraftTree:
    """The tree of one branch: `tokens` `[R, N]`, root first. Equals `best_tree` at topk 1, faster."""
    r, n = tokens.shape
    parents, depths, lower = _branch(n, tokens.device)
    return DraftTree(tokens, parents.expand(r, n), depths.expand(r, n), lower.expand(r, n, n))


@cache  # for good: a captured graph reads what it gave
def _branch(nodes: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Parents and depths `[N]` of one branch, and which nodes are ancestors-or-self of each, `[N, N]`."""
    depths = torch.arange(nodes, device=device)
    lower = torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril_()
    return (depths - 1).clamp_(min=0), depths, lower
