"""Tree nodes for tokens that a grammar forces: where a grammar allows only one text, no draft forward is needed.

Legend: R requests, N nodes of the drafted trees, F nodes reserved for forced tokens.
"""

import torch
from torch import Tensor

from cluster.capture.recorder import host_call
from cluster.config.tree_shape import TreeShape
from cluster.sampling.grammars import GrammarTable
from cluster.sampling.logits_processor import LogitsProcessor
from cluster.spec.tree import DraftTree, ancestors_of


def add_forced_nodes(tree: DraftTree, shape: TreeShape, processor: LogitsProcessor) -> DraftTree:
    """Return trees `[R, N + F]`: each drafted tree `[N]`, then up to F nodes for tokens that the request's grammar
    forces, then padding. If no request of the step has a grammar, return `tree` itself.

    Forced tokens are added after the deepest nodes first, for two reasons. A text can be cut into tokens in several
    ways, and the path to a deep node probably cuts it in the same way as the target. And the tokens that are forced
    after the root are often in the drafted tree already.
    """
    if processor.grammars is None:
        return tree
    forced_trees = host_call(
        _add_to_trees, processor.grammars, processor.rows, tree.tokens, tree.parents, tree.depths, shape
    )
    assert forced_trees is not None
    tokens, parents, depths = forced_trees.unbind()
    return DraftTree(tokens, parents, depths, ancestors_of(parents, shape.num_steps), padded=True)


def _add_to_trees(
    grammars: GrammarTable, rows: Tensor, tokens: Tensor, parents: Tensor, depths: Tensor, shape: TreeShape
) -> Tensor:
    """Return tokens, parents and depths of the trees with forced nodes, `[3, R, N + F]`. Runs on the host."""
    trees = torch.stack([tokens, parents, depths], 1).tolist()
    for row, (tree_tokens, tree_parents, tree_depths) in zip(rows.tolist(), trees, strict=True):
        _add_to_tree(grammars, row, tree_tokens, tree_parents, tree_depths, shape.forced_nodes)
        # Padding nodes are their own parents; see `DraftTree`.
        padding_nodes = shape.num_draft_tokens - len(tree_tokens)
        tree_parents += range(len(tree_tokens), shape.num_draft_tokens)
        tree_tokens += [0] * padding_nodes
        tree_depths += [0] * padding_nodes
    return tokens.new_tensor(trees).view(-1, 3, shape.num_draft_tokens).transpose(0, 1)


def _add_to_tree(
    grammars: GrammarTable, row: int, tokens: list[int], parents: list[int], depths: list[int], free_nodes: int
) -> None:
    """Append to one tree the tokens that the grammar of the request in `row` forces, at most `free_nodes` nodes."""
    # (parent, token) -> node: a forced token that the draft proposed too gets no second node.
    children = {(parents[node], tokens[node]): node for node in range(1, len(tokens))}
    paths: list[list[int]] = [[]]
    for node in range(1, len(tokens)):
        paths.append([*paths[parents[node]], tokens[node]])
    # Only the drafted nodes are starting points, deepest first.
    for start in sorted(range(len(paths)), key=lambda node: (-depths[node], node)):
        node = start
        for token in grammars.forced_tokens(row, paths[start], free_nodes) if free_nodes else ():
            child = children.get((node, token))
            if child is None:
                if not free_nodes:
                    break
                child, free_nodes = len(tokens), free_nodes - 1
                children[node, token] = child
                tokens.append(token)
                parents.append(node)
                depths.append(depths[node] + 1)
            node = child
