"""Nodes for what a grammar forces: text without a choice needs no draft, however deep it is.

Legend: R requests, N nodes of the drafted trees, F forced ones.
"""

import torch
from torch import Tensor

from cluster.capture.recorder import hosted
from cluster.config.tree_shape import TreeShape
from cluster.sampling.grammars import GrammarTable
from cluster.sampling.logits_processor import LogitsProcessor
from cluster.spec.tree import DraftTree, ancestors_of


def forced_into(tree: DraftTree, shape: TreeShape, adjust: LogitsProcessor) -> DraftTree:
    """Trees `[R, N]` and up to F more nodes of each, `[R, N + F]`: what follows the deepest nodes comes first, because
    what the draft proposed before is spelled as the target would, and what follows the root is drafted already as far
    as the draft goes. Nodes that no grammar fills are padding.
    """
    if adjust.grammars is None:
        return tree
    grown = hosted(_grown, adjust.grammars, adjust.rows, tree.tokens, tree.parents, tree.depths, shape)
    assert grown is not None
    tokens, parents, depths = grown.unbind()
    return DraftTree(tokens, parents, depths, ancestors_of(parents, shape.num_steps), padded=True)


def _grown(
    grammars: GrammarTable, rows: Tensor, tokens: Tensor, parents: Tensor, depths: Tensor, shape: TreeShape
) -> Tensor:
    """Tokens, parents and depths of the trees with what is forced, `[3, R, N + F]`."""
    trees = torch.stack([tokens, parents, depths], 1).tolist()
    for row, (own, above, deep) in zip(rows.tolist(), trees, strict=True):
        _force(grammars, row, own, above, deep, shape.forced)
        empty = shape.num_draft_tokens - len(own)
        above += range(len(own), shape.num_draft_tokens)
        own += [0] * empty
        deep += [0] * empty
    return tokens.new_tensor(trees).view(-1, 3, shape.num_draft_tokens).transpose(0, 1)


def _force(
    grammars: GrammarTable, row: int, tokens: list[int], parents: list[int], depths: list[int], room: int
) -> None:
    """Append to one tree what the grammar of the request in `row` forces, at most `room` nodes."""
    children = {(parents[node], tokens[node]): node for node in range(1, len(tokens))}
    paths: list[list[int]] = [[]]
    for node in range(1, len(tokens)):
        paths.append([*paths[parents[node]], tokens[node]])
    for start in sorted(range(len(paths)), key=lambda node: (-depths[node], node)):
        node = start
        for token in grammars.forced(row, paths[start], room) if room else ():
            child = children.get((node, token))
            if child is None:
                if not room:
                    break
                child, room = len(tokens), room - 1
                children[node, token] = child
                tokens.append(token)
                parents.append(node)
                depths.append(depths[node] + 1)
            node = child
