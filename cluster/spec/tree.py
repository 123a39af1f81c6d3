"""A draft tree as tensors, and its selection from the candidates of all levels.

Legend: R requests, K topk, S depth, N nodes (root included; node 0 is the root and holds the bonus token),
C candidates = K + (S - 1) K^2.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.sampling.noise import at_least_float32

DECAY = 1e-3
"""This is subtracted from each log-probability before it is added to the score of the parent. So scores fall strictly
along a path. Hence if a candidate is among the best N - 1, its parent is among them too, even with ties.
"""
FLOOR = -30.0
"""Lower log-probabilities count as this, so float32 does not round DECAY away at depths up to 16. Every `Growth` reads
the value of this module when it adds a level: tests replace it where they compare trees below the floor.
"""

NO_TOKEN = -1
"""The token of a node that must not be accepted: the target never chooses it."""


class Proposed(NamedTuple):
    """How the draft proposed the n drafted nodes of R trees (root included): `log_probabilities` `[R, n]` of the nodes'
    tokens after their parents, and `is_likeliest` `[R, n]`, whether each token was the likeliest after its parent. The
    entries of the root are 0 and True.
    """

    log_probabilities: Tensor
    is_likeliest: Tensor


@dataclass(frozen=True, slots=True)
class DraftTree:
    """R trees: `tokens`, `parents`, `depths` `[R, N]`; the root is its own parent. `ancestors` `[R, N, N]`: entry
    (i, j) says whether node j is node i or an ancestor of it.

    Parents come before their children. If `padded`, some nodes may be padding. A padding node is its own parent. So it
    is not below the root, and never on an accepted path. `scores` `[R, N]` are the cumulative scores by which the draft
    chose the nodes, with 0 for the root. `scores` is None in trees with forced nodes (added because a grammar allows
    only one text), and in chains of steps whose requests do not share rows. If `masked`, nodes that must not be
    accepted have the token `NO_TOKEN`. `candidates` are the numbers of the drafted nodes, without the root, among all
    candidates. It is None if the tree was not selected from candidates, or the selection does not report it. `proposed`
    may be None if no chances are learned from the tree. Looked-up nodes (tokens that followed the same text earlier)
    come last, and have no entries in `candidates` and `proposed`.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    padded: bool = False
    scores: Tensor | None = None
    masked: bool = False
    candidates: Tensor | None = None
    proposed: "Proposed | None" = None

    def node_counts(self) -> Tensor:
        """Return how many nodes of each tree may be accepted, `[R, 1]`: without the root, padding and masked nodes."""
        node_numbers = torch.arange(self.parents.shape[1], device=self.parents.device)
        return ((self.parents != node_numbers) & (self.tokens != NO_TOKEN)).sum(1, keepdim=True)

    def paths(self, max_depth: int) -> Tensor:
        """Return for each node the tokens on its path, `[R, N, max_depth]`, padded with -1. A path begins after the
        root and ends with the node's own token.
        """
        r, n = self.tokens.shape
        # paths[i, depth(j)] = token(j) for every ancestor-or-self j of node i. All other nodes write to column 0, the
        # root's, which is cut off.
        target_columns = torch.where(self.ancestors, self.depths[:, None], 0)
        paths = self.tokens.new_full((r, n, max_depth + 1), -1)
        return paths.scatter_(2, target_columns, self.tokens[:, None].expand(r, n, n))[..., 1:]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Proposals of all levels: `tokens`, cumulative `scores` and `parents` `[R, C]`; `depths` `[C]`, up to `max_depth`.

    `parents` are candidate numbers, -1 for the root.
    """

    tokens: Tensor
    scores: Tensor
    parents: Tensor
    depths: Tensor
    max_depth: int

    @staticmethod
    def of(levels: list[tuple[Tensor, Tensor, Tensor]]) -> "Candidates":
        """Join `levels`, each (tokens, scores, parents): `[R, K]` of the first level, `[R, K^2]` of the others."""
        tokens, scores, parents = (torch.cat(column, 1) for column in zip(*levels, strict=True))
        depths = depths_of(tokens.shape[1], levels[0][0].shape[1], tokens.device)
        return Candidates(tokens, scores, parents, depths, len(levels))


def depths_of(count: int, topk: int, device: torch.device) -> Tensor:
    """Return the depths `[C]` of C candidates: K of depth 1, then K^2 of each further depth."""
    # depth = floor((number - K) / K^2) + 2; numbers below K give floor(-..) = -1, so depth 1.
    number = torch.arange(count, device=device)
    return (number - topk).div(topk * topk, rounding_mode="floor").add_(2)


def clamp_log_probabilities(log_probabilities: Tensor) -> Tensor:
    """Return log-probabilities that are safe to add up: NaN and very small ones become FLOOR, and DECAY is subtracted.

    The result is at least float32. Half precision would round DECAY away, and a tie could then select a child without
    its parent.
    """
    wide_log_probabilities = log_probabilities.to(at_least_float32(log_probabilities.dtype))
    return wide_log_probabilities.nan_to_num(FLOOR, 0.0, FLOOR).clamp(FLOOR, 0.0) - DECAY


class Growth(Protocol):
    """A tree that grows as in EAGLE-2: of the candidates of a level, the K with the best scores become the rows of the
    next level.
    """

    def add(self, proposals: Tensor, log_probabilities: Tensor) -> None:
        """Add the candidates of one more level: the K proposals after each of the K rows that ran last, and their
        log-probabilities, `[R, K, K]` each.
        """
        ...

    def best(self) -> tuple[Tensor, Tensor]:
        """Return the K best candidates of the last level, which are the rows to run next: (tokens, index of the parent
        among the rows that ran last), each `[R, K]`.
        """
        ...

    def tree(self, bonus: Tensor, nodes: int) -> DraftTree:
        """Return trees of `nodes` nodes: the root `bonus` `[R]` and the best candidates of all levels."""
        ...


GrowthFactory = Callable[[Tensor, Tensor, int], Growth]
"""A factory of `Growth`: (proposals after the bonus `[R, K]`, their log-probabilities `[R, K]`, depth S)."""


class TorchGrowth:
    """`Growth` by torch operators: the reference implementation."""

    def __init__(self, tokens: Tensor, log_probabilities: Tensor, num_steps: int) -> None:
        """Start with the K candidates of level 1; `num_steps` is not used."""
        self._row_candidates = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        self._tokens, self._scores = tokens, clamp_log_probabilities(log_probabilities)
        self._levels = [(tokens, self._scores, torch.full_like(tokens, -1))]
        self._previous_candidates = 0

    def add(self, proposals: Tensor, log_probabilities: Tensor) -> None:
        """Append K^2 candidates; see `Growth.add`."""
        r, k = self._row_candidates.shape
        # `_previous_candidates` becomes the number of the first candidate to add. `_row_candidates` and `_scores`
        # `[R, K]` are the candidate numbers and cumulative scores of the K rows.
        self._previous_candidates += self._tokens.shape[1]
        # Cumulative score of child j of row i = score(i) + log p(j | i); it is candidate number
        # `_previous_candidates` + i K + j.
        self._scores = (self._scores[..., None] + clamp_log_probabilities(log_probabilities)).view(r, k * k)
        self._tokens = proposals.reshape(r, k * k)
        parents = self._row_candidates[..., None].expand(r, k, k).reshape(r, k * k)
        self._levels.append((self._tokens, self._scores, parents))

    def best(self) -> tuple[Tensor, Tensor]:
        """Select the K best candidates of the level that was added last; see `Growth.best`."""
        k = self._row_candidates.shape[1]
        # pick = i K + j, so the parent's row is pick // K.
        self._scores, pick = self._scores.topk(k, 1)
        self._row_candidates = self._previous_candidates + pick
        return self._tokens.gather(1, pick), pick // k

    def tree(self, bonus: Tensor, nodes: int) -> DraftTree:
        """Select the nodes among all candidates; see `Growth.tree`."""
        return best_tree(Candidates.of(self._levels), bonus, nodes)


def best_tree(candidates: Candidates, bonus: Tensor, nodes: int) -> DraftTree:
    """Return trees of the root and the `nodes - 1` best candidates by cumulative score (EAGLE-2's selection)."""
    r, c = candidates.tokens.shape
    # Sorted by candidate number, so that parents come before their children.
    chosen_candidates = candidates.scores.topk(nodes - 1, dim=1).indices.sort(dim=1).values
    tokens = torch.cat([bonus[:, None], candidates.tokens.gather(1, chosen_candidates)], 1)
    # `node_numbers` maps a candidate to its node. Column C stands for the root, node 0. The parent of a chosen
    # candidate is chosen too (see DECAY), so the zeros of the other candidates are never read.
    node_numbers = torch.zeros(r, c + 1, dtype=torch.int64, device=tokens.device)
    node_numbers.scatter_(1, chosen_candidates, torch.arange(1, nodes, device=tokens.device).expand(r, -1))
    parent_candidates = candidates.parents.gather(1, chosen_candidates)
    parents = node_numbers.gather(1, torch.where(parent_candidates < 0, c, parent_candidates))
    root = torch.zeros(r, 1, dtype=torch.int64, device=tokens.device)
    depths = torch.cat([root, candidates.depths.expand(r, -1).gather(1, chosen_candidates)], 1)
    parents = torch.cat([root, parents], 1)
    scores = candidates.scores.gather(1, chosen_candidates)
    scores = torch.cat([scores.new_zeros(r, 1), scores], 1)
    ancestors = ancestors_of(parents, candidates.max_depth)
    return DraftTree(tokens, parents, depths, ancestors, scores=scores, candidates=chosen_candidates)


def ancestors_of(parents: Tensor, depth: int) -> Tensor:
    """Return the ancestor-or-self mask `[R, N, N]` of trees at most `depth` deep."""
    r, n = parents.shape
    # mask(i) = {i} + mask(parent(i)): each iteration reaches one level further up.
    self_mask = torch.eye(n, dtype=torch.bool, device=parents.device).expand(r, -1, -1)
    mask = self_mask
    for _ in range(depth):
        mask = self_mask | mask.gather(1, parents[..., None].expand(-1, -1, n))
    return mask


def chain(tokens: Tensor, scores: Tensor | None = None) -> DraftTree:
    """Return trees of one branch: `tokens` `[R, N]`, root first. At topk 1 `best_tree` gives the same, more slowly."""
    r, n = tokens.shape
    parents, depths, ancestors = _chain_tensors(n, tokens.device)
    return DraftTree(tokens, parents.expand(r, n), depths.expand(r, n), ancestors.expand(r, n, n), scores=scores)


def chain_scores(log_probabilities: Tensor) -> Tensor:
    """Return the cumulative scores `[R, S + 1]` of chains, from the log-probabilities `[R, S]` of their tokens."""
    return F.pad(clamp_log_probabilities(log_probabilities).cumsum(1), (1, 0))


@cache  # never freed: captured CUDA graphs read these tensors
def _chain_tensors(nodes: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return parents `[N]`, depths `[N]` and the ancestor-or-self mask `[N, N]` of one branch."""
    depths = torch.arange(nodes, device=device)
    ancestors = torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril_()
    return (depths - 1).clamp_(min=0), depths, ancestors
