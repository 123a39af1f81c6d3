"""The accepted path of each tree, and what was chosen along it."""

import triton
import triton.language as tl


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
    """Walks down one tree of `nodes` nodes for each program, by the child that has the token `chosen` `[R, nodes]` at
    its parent; a node that is its own parent only fills the tree.

    Writes `path` and `taken` `[R, WIDE]`, nodes and what was chosen after each, `lens` `[R]` how many count, and
    `bonus` `[R]` the last that counts. `tokens` and `parents` lie their strides apart.
    """
    tree, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    held = at < nodes
    token = tl.load(tokens + tree * tokens_stride + at, mask=held, other=-1)
    parent = tl.load(parents + tree * parents_stride + at, mask=held, other=-1)
    parent = tl.where(parent == at, -1, parent)
    choice = tl.load(chosen + tree * nodes + at, mask=held, other=-1)
    first = tl.sum(tl.where(at == 0, choice, 0), 0)
    node, last, count, walks = 0, first, 1, True
    tl.store(path + tree * WIDE, tl.full([], 0, tl.int64))
    tl.store(taken + tree * WIDE, first)
    for step in range(1, WIDE):
        child = tl.min(tl.where((parent == node) & (token == last), at, BLOCK), 0)
        walks = walks & (child < BLOCK)
        node = tl.where(walks, child, node)
        last = tl.where(walks, tl.sum(tl.where(at == node, choice, 0), 0), last)
        count += walks.to(tl.int32)
        tl.store(path + tree * WIDE + step, tl.where(walks, node, 0).to(tl.int64))
        tl.store(taken + tree * WIDE + step, tl.where(walks, last, first))
    tl.store(lens + tree, tl.full([], 0, tl.int64) + count)
    tl.store(bonus + tree, last)
