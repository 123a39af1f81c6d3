"""What the accepted path of one tree says about all other trees that a step could have had.

A tier is the number of a tree shape that steps may use. The nodes of a tree have ranks (`NodeSelection.ranks`): if a
step verifies N nodes of a tree on average, it verifies the nodes whose ranks are below N. So one step also shows how
many tokens each smaller tier would have given. A tier that verifies all nodes includes nodes of every rank.

Looked-up tokens are tokens that followed an earlier occurrence of the end of the text. They are compared with the
committed tokens in every step. So a step whose tree had none of them still shows how many would have been accepted, up
to the first token that was not committed. Such a step says less about drafted levels. Where it says nothing, a level
counts as not accepted, so estimates for trees with looked-up tokens are too low rather than too high. Looked-up tokens
that were not verified have no ranks, so nothing is estimated for tiers that verify only some of them; see `ROW_YIELD`.

Legend: n trees that ran, N nodes of a tree that a tier verifies on average, S depth of the largest tree, W kinds of
trees.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cluster.config.tree_shape import TreeShape
from cluster.spec.result import AcceptedTree

ALL_NODES = 1 << 30
"""The number of nodes of a tier that verifies all nodes: more than any rank."""

Bools = NDArray[np.bool_]
Integers = NDArray[np.int64]
ROW_YIELD = 0.7
"""If there are more likely looked-up tokens than rows of a step, about this share of the verified nodes is accepted:
with the demo pair and repeated text, 0.73 was measured.
"""
SMALL = np.int32  # comparisons read half as much memory as with int64


class TreeKinds:
    """The kinds of trees of the tiers. Tiers without looked-up tokens that verify the same number of nodes are of one
    kind: they differ in depth only. All tiers with looked-up tokens are of one kind, that of all nodes.

    Three arrays `[W]` describe the kinds: `nodes` are the numbers N, `looks_up` says whether the trees have looked-up
    tokens, and `drafted_levels` are the levels that the draft computes (`ALL_NODES` for trees without looked-up tokens,
    whose depth depends on the tier). `kind_of_tier` has the kind of each tier.
    """

    def __init__(self, tiers: Sequence[TreeShape]) -> None:
        self._tier_nodes = np.array([s.num_draft_tokens if s.selects_nodes else ALL_NODES for s in tiers], SMALL)
        self._tier_levels = np.array([shape.drafted_shape.num_steps for shape in tiers], SMALL)
        self._tier_looks_up = np.array([shape.lookup_tokens > 0 for shape in tiers])
        unique_nodes = np.unique(self._tier_nodes[~self._tier_looks_up])
        lookup_levels = np.unique(self._tier_levels[self._tier_looks_up])  # one number, or none
        self.nodes = np.concatenate([unique_nodes, np.full_like(lookup_levels, ALL_NODES)])
        self.looks_up = np.arange(len(self.nodes)) >= len(unique_nodes)
        # Kinds without looked-up tokens have no limit of their own: their levels are limited by the depth of the tier.
        self.drafted_levels = np.concatenate([np.full_like(unique_nodes, ALL_NODES), lookup_levels])
        self.kind_of_tier = np.searchsorted(unique_nodes, self._tier_nodes)
        self.kind_of_tier[self._tier_looks_up] = len(unique_nodes)
        self._depth = max(1, tiers[-1].num_steps)

    @property
    def has_lookups(self) -> bool:
        """Whether some trees have looked-up tokens."""
        return bool(self.looks_up.any())

    def read(self, tiers: Integers, paths: Sequence[AcceptedTree]) -> tuple[Bools, Bools]:
        """Return `tried` and `hit`, `[n, W, S]` each, for n trees that ran, with these `tiers` and accepted `paths`.

        Both ask whether a tree of some kind would have had the tokens that the target chose. `hit`: it would have had
        the token at this depth, and all tokens at smaller depths. `tried`: it would have had all tokens at smaller
        depths, and it is known whether it would have had the token at this depth.
        """
        numbers = np.arange(1, self._depth + 1, dtype=SMALL)
        ranks = np.full((len(paths), 1, self._depth), ALL_NODES, SMALL)
        for i, path in enumerate(paths):
            if path.ranks:
                ranks[i, 0, : len(path.ranks)] = path.ranks[: self._depth]
        drafted, agreeing, accepted = (
            np.array(column, SMALL)[:, None, None]
            for column in zip(*((path.drafted, path.agreeing, len(path.ranks)) for path in paths), strict=True)
        )
        nodes, levels, looks_up = self.nodes[:, None], self.drafted_levels[:, None], self.looks_up[:, None]
        run_nodes, run_levels = self._tier_nodes[tiers][:, None, None], self._tier_levels[tiers][:, None, None]
        # Whether the tree that ran had all nodes that a tree of the kind would have, in the levels that both have.
        contains = (nodes <= run_nodes) & (self._tier_looks_up[tiers][:, None, None] | ~looks_up)
        hit = (ranks < nodes) & (numbers <= np.minimum(drafted, levels))
        hit |= looks_up & (numbers <= agreeing)
        is_drafted_level_known = (numbers <= run_levels) | (looks_up & (numbers > levels))
        # If only looked-up tokens are known, levels that the draft did not compute count as not accepted. Estimates of
        # these levels would come from steps with other text, and would be too high.
        is_next_known = looks_up & (numbers <= accepted + 1)
        known = np.where(contains, is_drafted_level_known, is_next_known)
        tried = known & np.concatenate([np.ones_like(hit[..., :1]), hit[..., :-1]], 2)
        return tried, hit & tried
