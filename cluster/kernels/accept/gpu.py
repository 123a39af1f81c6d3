"""The accepted path of each tree, and the target's choices along it."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class AcceptArguments(NamedTuple):
    """What `accept` takes, in its order; its constants follow by name."""

    tokens: Tensor
    parents: Tensor
    chosen: Tensor
    path: Tensor
    taken: Tensor
    lens: Tensor
    bonus: Tensor
    nodes: int
    tokens_stride: int
    parents_stride: int


@triton.jit
def accept(
    tokens,
    parents,
    chosen,
    path,
    taken,
    lens,
    bonus,
    nodes,
    tokens_stride,
    parents_stride,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Walk down one tree of `nodes` nodes per program: from a node to the child whose token the target chose there,
    `chosen` `[R, nodes]`. Padding nodes are their own parents.

    Writes `path` and `taken` `[R, WIDE]` (the nodes, and the token chosen after each), `lens` `[R]` (how many entries
    are valid) and `bonus` `[R]` (the last valid token). Rows of `tokens` and `parents` are at their strides.
    """
    tree, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    held = at < nodes
    token = tl.load(tokens + tree * tokens_stride + at, mask=held, other=-1)
    parent = tl.load(parents + tree * parents_stride + at, mask=held, other=-1)
    # Padding entries and the root are their own parents; they are no children.
    parent = tl.where(parent == at, -1, parent)
    choice = tl.load(chosen + tree * nodes + at, mask=held, other=-1)
    first = tl.sum(tl.where(at == 0, choice, 0), 0)
    node, last, count, walks = 0, first, 1, True
    tl.store(path + tree * WIDE, tl.full([], 0, tl.int64))
    tl.store(taken + tree * WIDE, first)
    for step in range(1, WIDE):
        # The lowest matching child, or BLOCK if none. Once the walk ends, `walks` stays False, and the rest of `path`
        # is 0, that of `taken` is `first`.
        child = tl.min(tl.where((parent == node) & (token == last), at, BLOCK), 0)
        walks = walks & (child < BLOCK)
        node = tl.where(walks, child, node)
        last = tl.where(walks, tl.sum(tl.where(at == node, choice, 0), 0), last)
        count += walks.to(tl.int32)
        tl.store(path + tree * WIDE + step, tl.where(walks, node, 0).to(tl.int64))
        tl.store(taken + tree * WIDE + step, tl.where(walks, last, first))
    tl.store(lens + tree, tl.full([], 0, tl.int64) + count)
    tl.store(bonus + tree, last)
