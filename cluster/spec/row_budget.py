"""Shares the target's rows of a step among the requests of the step (`TreeShape.max_nodes`): the likeliest nodes are
verified, whichever request they belong to.

The draft proposes a tree of n nodes for each request, and the step verifies M = R N of all R n nodes: first every root,
then the nodes with the best scores. The score of a node is the logarithm of the estimated chance that the target
accepts it. So a request whose text the draft can predict gets more rows, and other requests get fewer (vLLM #47808
gives chains of different lengths to the requests of a batch; SGLang #9319 measures what equal trees lose under load).
Scores fall along every path, so the selected nodes of a request are a tree.

Legend: R decoding requests, n nodes of each tree, N verified nodes of each tree on average, M = R N.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from cluster.batch import Batch, TreeRows
from cluster.spec.tree import NO_TOKEN, DraftTree

LIMIT_PENALTY = 1000.0
"""`SelectNodes` subtracts this from the scores of nodes that their request does not need: nodes deeper than the
request's limit. Such a node gets a row only if all needed nodes have rows. The limit of an idle request, which pads a
batch, is 0.
"""


@dataclass(frozen=True, slots=True)
class NodeSelection:
    """The nodes that a step verifies: `nodes` `[M]` in ascending order, where node j of request i is number i n + j;
    `requests` `[M]`, their requests; `rows` `[R, n]`, the place of each node in `nodes`, 0 for a node that is not
    verified.

    `ranks` `[R, n]` say in which order nodes get rows: if k nodes of each tree were verified on average, these would be
    the nodes with `rank < k`.
    """

    nodes: Tensor
    requests: Tensor
    rows: Tensor
    ranks: Tensor


class SelectNodes(Protocol):
    """A function that selects the nodes that a step verifies."""

    def __call__(self, scores: Tensor, depths: Tensor, limits: Tensor, count: int) -> NodeSelection:
        """Return the `count` nodes to verify; `count` is at least R. `scores` and `depths` `[R, n]` are those of
        `DraftTree`; `limits` `[R]` are the `draft_limits` of `SamplingBatch`. Of two nodes with equal scores, the one
        with the lower number comes first.
        """
        ...


def select_nodes(scores: Tensor, depths: Tensor, limits: Tensor, count: int) -> NodeSelection:
    """Select the nodes that a step verifies, by torch operators: the reference implementation of `SelectNodes`."""
    requests, nodes = scores.shape
    scores = torch.where(depths > limits[:, None], scores - LIMIT_PENALTY, scores)
    scores[:, 0].fill_(float("inf"))
    order = scores.view(-1).argsort(descending=True, stable=True)
    numbers = torch.arange(requests * nodes, device=order.device)
    places = torch.empty_like(order).index_copy_(0, order, numbers)
    # Roots have places 0 to R - 1, and rank 0. After them, every R places are one more node per tree on average.
    ranks = (places - requests).div(requests, rounding_mode="floor").add_(1).view(requests, nodes)
    selected = order[:count].sort().values
    rows = torch.zeros_like(order).index_copy_(0, selected, numbers[:count]).view(requests, nodes)
    return NodeSelection(selected, selected.div(nodes, rounding_mode="floor"), rows, ranks)


def limit_drafts(tree: DraftTree, limits: Tensor) -> DraftTree:
    """Return `tree` with `NO_TOKEN` in place of the tokens deeper than the `limits` `[R]` of their requests."""
    return replace(tree, tokens=torch.where(tree.depths > limits[:, None], NO_TOKEN, tree.tokens), masked=True)


class TargetRows:
    """The rows `[M]` of trees in the target's forward: all nodes of all trees, or those of a selection."""

    def __init__(self, requests: int, nodes_per_tree: int, selection: NodeSelection | None = None) -> None:
        self._shape, self._selection = (requests, nodes_per_tree), selection
        self.count = requests * nodes_per_tree if selection is None else selection.nodes.shape[0]
        """M, the number of rows."""

    @property
    def requests(self) -> Tensor | None:
        """The request of each row `[M]`; None if all nodes are verified."""
        return None if self._selection is None else self._selection.requests

    def take(self, values: Tensor) -> Tensor:
        """Return what belongs to the rows, `[M, ..]`, of values `[R, n, ..]` of all nodes."""
        flat = values.reshape(-1, *values.shape[2:])
        return flat if self._selection is None else flat.index_select(0, self._selection.nodes)

    def spread(self, values: Tensor) -> Tensor:
        """Return values `[R, n]` by node, from values `[M]` by row. Nodes that have no row get arbitrary values."""
        if self._selection is None:
            return values.view(self._shape)
        return values.index_select(0, self._selection.rows.view(-1)).view(self._shape)

    def of(self, path: Tensor) -> Tensor:
        """Return the rows `[R, P]` of the nodes `path` `[R, P]`, all of which must be verified."""
        requests, nodes = self._shape
        if self._selection is not None:
            return self._selection.rows.gather(1, path)
        return torch.arange(requests, device=path.device)[:, None] * nodes + path

    def by_request(self, values: Tensor) -> Tensor:
        """Return `values` `[R]`, one per request, in the order of the sampling inputs: if nodes were selected, the
        value of each row's request, `[M]`, else `values` itself.
        """
        return values if self.requests is None else values.index_select(0, self.requests)

    def tree(self, batch: Batch, bits: Tensor) -> TreeRows:
        """Return the rows for attention. `bits` `[R or 1, n, words]` are the ancestor masks of all nodes. If nodes were
        selected, attention treats each row as a request with one row.
        """
        requests, nodes = self._shape
        if self.requests is None:
            return batch.tree(bits, nodes)
        rows, lens = self.by_request(batch.decode_rows), self.by_request(batch.seq_lens)
        return TreeRows(rows, lens, self.take(bits.expand(requests, -1, -1))[:, None], nodes)

    def without_others(self, tree: DraftTree) -> DraftTree:
        """Return `tree` with `NO_TOKEN` in place of the tokens of nodes that are not verified."""
        if self._selection is None:
            return tree
        is_verified = self._selection.rows != 0
        is_verified[:, 0].fill_(True)
        return replace(tree, tokens=torch.where(is_verified, tree.tokens, NO_TOKEN), masked=True)
