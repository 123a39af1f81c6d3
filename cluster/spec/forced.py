"""Nodes for what a grammar forces: text without a choice needs no draft, however deep it is.

Legend: R requests, N nodes of the drafted trees, F forced ones.
"""

from cluster.config import TreeShape
from cluster.forward.adjust import Adjust
from cluster.forward.grammars import GrammarTable
from cluster.spec.tree import DraftTree, ancestors_of


def forced_into(tree: DraftTree, shape: TreeShape, adjust: Adjust) -> DraftTree:
    """Trees `[R, N]` and up to F more nodes of each, `[R, N + F]`: what follows the deepest nodes comes first, because
    what the draft proposed before is spelled as the target would, and what follows the root is drafted already as far
    as the draft goes. Nodes that no grammar fills are padding.
    """
    if adjust.grammars is None:
        return tree
    rows, tokens, parents, depths = (each.tolist() for each in (adjust.rows, tree.tokens, tree.parents, tree.depths))
    for row, own, above, depth in zip(rows, tokens, parents, depths, strict=True):
        _force(adjust.grammars, row, own, above, depth, shape.forced)
        empty = shape.num_draft_tokens - len(own)
        above += range(len(own), shape.num_draft_tokens)
        own += [0] * empty
        depth += [0] * empty
    grown, above, deep = (
        tree.tokens.new_tensor(each).view(-1, shape.num_draft_tokens) for each in (tokens, parents, depths)
    )
    return DraftTree(grown, above, deep, ancestors_of(above, shape.num_steps), padded=True)


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
