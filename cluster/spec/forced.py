"""Tree nodes for tokens that a grammar forces: where a grammar allows only one text, no draft forward is needed.

Legend: R requests, N nodes of the drafted trees, F nodes reserved for forced tokens.
"""

import torch
from torch import Tensor

from cluster.capture.recorder import hosted
from cluster.config.tree_shape import TreeShape
from cluster.sampling.grammars import GrammarTable
from cluster.sampling.logits_processor import LogitsProcessor
from cluster.spec.tree import DraftTree, ancestors_of


def forced_into(tree: DraftTree, shape: TreeShape, adjust: LogitsProcessor) -> DraftTree:
    """Return trees `[R, N + F]`: each drafted tree `[N]`, then up to F forced nodes, then padding.

    Forced tokens are added after the deepest nodes first. A text can be cut into tokens in several ways; on the way to
    a deep node, the draft has cut the text as the target probably will. The tokens that are forced after the root are
    mostly drafted already.
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
    """Return tokens, parents and depths of the trees with forced nodes, `[3, R, N + F]`. Runs on the host."""
    trees = torch.stack([tokens, parents, depths], 1).tolist()
    for row, (own, above, deep) in zip(rows.tolist(), trees, strict=True):
        _force(grammars, row, own, above, deep, shape.forced)
        # Padding nodes are their own parents; see `DraftTree`.
        empty = shape.num_draft_tokens - len(own)
        above += range(len(own), shape.num_draft_tokens)
        own += [0] * empty
        deep += [0] * empty
    return tokens.new_tensor(trees).view(-1, 3, shape.num_draft_tokens).transpose(0, 1)


def _force(
    grammars: GrammarTable, row: int, tokens: list[int], parents: list[int], depths: list[int], room: int
) -> None:
    """Append to one tree the tokens that the grammar of the request in `row` forces, at most `room` nodes."""
    # (parent, token) -> node: a forced token that the draft proposed too gets no second node.
    children = {(parents[node], tokens[node]): node for node in range(1, len(tokens))}
    paths: list[list[int]] = [[]]
    for node in range(1, len(tokens)):
        paths.append([*paths[parents[node]], tokens[node]])
    # Only the drafted nodes are starting points, deepest first.
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
