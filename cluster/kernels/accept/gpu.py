"""The accepted path of each tree, and the target's choices along it."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class AcceptArguments(NamedTuple):
    """The arguments of the kernel `accept`, in order, without its constants, which `launch` passes by name."""

    tokens: Tensor
    parents: Tensor
    target_choices: Tensor
    path: Tensor
    path_tokens: Tensor
    path_lens: Tensor
    bonus: Tensor
    nodes: int
    tokens_stride: int
    parents_stride: int


@triton.jit
def accept(
    tokens,
    parents,
    target_choices,
    path,
    path_tokens,
    path_lens,
    bonus,
    nodes,
    tokens_stride,
    parents_stride,
    PATH_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Walk down one tree of `nodes` nodes per program. The walk goes from a node to the child whose token the target
    chose after the node. `target_choices` `[R, nodes]` has the token that the target chose after each node. Padding
    nodes are their own parents.

    Writes `path` and `path_tokens` `[R, PATH_SIZE]` (the nodes, and the token chosen after each), `path_lens` `[R]`
    (how many entries of the two are valid) and `bonus` `[R]` (the last valid entry of `path_tokens`). Rows of `tokens`
    and `parents` begin `tokens_stride` and `parents_stride` numbers apart.
    """
    tree, offsets = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = offsets < nodes
    tree_tokens = tl.load(tokens + tree * tokens_stride + offsets, mask=mask, other=-1)
    tree_parents = tl.load(parents + tree * parents_stride + offsets, mask=mask, other=-1)
    # Padding nodes and the root are their own parents; the walk must not take them for children.
    tree_parents = tl.where(tree_parents == offsets, -1, tree_parents)
    choices = tl.load(target_choices + tree * nodes + offsets, mask=mask, other=-1)
    first_choice = tl.sum(tl.where(offsets == 0, choices, 0), 0)
    node, last_token, path_len, is_descending = 0, first_choice, 1, True
    tl.store(path + tree * PATH_SIZE, tl.full([], 0, tl.int64))
    tl.store(path_tokens + tree * PATH_SIZE, first_choice)
    for step in range(1, PATH_SIZE):
        # The lowest matching child, or BLOCK if none. Once the walk ends, `is_descending` stays False. Then the
        # remaining entries of `path` become 0, and those of `path_tokens` become `first_choice`.
        child = tl.min(tl.where((tree_parents == node) & (tree_tokens == last_token), offsets, BLOCK), 0)
        is_descending = is_descending & (child < BLOCK)
        node = tl.where(is_descending, child, node)
        last_token = tl.where(is_descending, tl.sum(tl.where(offsets == node, choices, 0), 0), last_token)
        path_len += is_descending.to(tl.int32)
        tl.store(path + tree * PATH_SIZE + step, tl.where(is_descending, node, 0).to(tl.int64))
        tl.store(path_tokens + tree * PATH_SIZE + step, tl.where(is_descending, last_token, first_choice))
    tl.store(path_lens + tree, tl.full([], 0, tl.int64) + path_len)
    tl.store(bonus + tree, last_token)
