"""Growth of draft trees: the scores and best rows of a level, the nodes that a tree keeps, and their ancestors.

Of equal scores, the candidate with the lower number comes first.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from cluster.kernels.choice.gpu import in_order, unsigned


class LevelArguments(NamedTuple):
    """What `level` takes, in its order; its constants follow by name."""

    proposed: Tensor
    likely: Tensor
    score: Tensor | None
    number: Tensor | None
    tokens: Tensor
    scores: Tensor
    parents: Tensor
    next_token: Tensor
    next_parent: Tensor
    next_score: Tensor
    next_number: Tensor
    before: int
    total: int


@triton.jit
def level(
    proposed,
    likely,
    score,
    number,
    tokens,
    scores,
    parents,
    next_token,
    next_parent,
    next_score,
    next_number,
    before,
    total,
    FIRST: tl.constexpr,
    TOPK: tl.constexpr,
    WIDE: tl.constexpr,
    FLOOR: tl.constexpr,
    DECAY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the proposals of one level as candidates, numbered from `before` on. Each of a request's `TOPK` rows is the
    parent of `TOPK` candidates.

    `proposed` and `likely` `[R, TOPK, TOPK]` are tokens and log-probabilities; in the first level (`FIRST`), which
    follows the root, they are `[R, TOPK]`. `score` and `number` `[R, TOPK]` are the rows' cumulative scores and
    candidate numbers. Writes the candidates' `tokens`, `scores`, `parents` `[R, total]`. For the `TOPK` best candidates
    of the level, also writes token, parent row, score and number; in the first level all candidates are written, in
    order.

    score = score of the row + clamp(log-probability, FLOOR, 0) - DECAY. NaN counts as FLOOR. DECAY makes a child score
    below its parent, so that a tree which keeps a node keeps its parent too.
    """
    request, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    COUNT: tl.constexpr = TOPK if FIRST else TOPK * TOPK
    held = at < COUNT
    token = tl.load(proposed + request * COUNT + at, mask=held, other=0)
    own = tl.load(likely + request * COUNT + at, mask=held, other=0.0).to(WIDE)
    lowest, decay = tl.full([], FLOOR, WIDE), tl.full([], DECAY, WIDE)
    own = tl.where(own != own, lowest, own)
    own = tl.where(own < lowest, lowest, tl.where(own > 0, 0.0, own)) - decay
    place = request * total + before + at
    if FIRST:
        tl.store(parents + place, tl.full([BLOCK], -1, tl.int32), mask=held)
    else:
        own += tl.load(score + request * TOPK + at // TOPK, mask=held, other=0.0)
        tl.store(parents + place, tl.load(number + request * TOPK + at // TOPK, mask=held, other=0), mask=held)
    tl.store(tokens + place, token, mask=held)
    tl.store(scores + place, own, mask=held)
    left = tl.where(held, own, float("-inf"))
    for one in range(TOPK):
        if FIRST:
            which = tl.full([], 0, tl.int32) + one
        else:
            _, which = tl.max(left, 0, return_indices=True, return_indices_tie_break_left=True)
        chosen = at == which
        next_place = request * TOPK + one
        tl.store(next_token + next_place, tl.sum(tl.where(chosen, token, 0), 0))
        tl.store(next_score + next_place, tl.sum(tl.where(chosen, own, 0.0), 0))
        tl.store(next_parent + next_place, (which // TOPK).to(tl.int64))
        tl.store(next_number + next_place, (before + which).to(tl.int32))
        left = tl.where(chosen, float("-inf"), left)


class KeepArguments(NamedTuple):
    """What `keep` takes, in its order; its constants follow by name."""

    tokens: Tensor
    scores: Tensor
    parents: Tensor
    bonus: Tensor
    node_tokens: Tensor
    node_parents: Tensor
    node_depths: Tensor
    total: int
    wanted: int
    nodes: int


@triton.jit
def keep(
    tokens,
    scores,
    parents,
    bonus,
    node_tokens,
    node_parents,
    node_depths,
    total,
    wanted,
    nodes,
    TOPK: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keep the root and the `wanted` best of the candidates `tokens`, `scores`, `parents` `[R, total]`, in their order.

    Writes tokens, parents and depths of these nodes, `[R, nodes]`. The lowest kept score is found bit by bit (radix
    select).
    """
    request, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    held, place = at < total, request * total + at
    order = unsigned(in_order(tl.load(scores + place, mask=held, other=0.0)))
    least = tl.full([], 0, order.dtype)
    bit = tl.full([], 1, order.dtype) << (BITS - 1)
    for _ in range(BITS):
        tried = least | bit
        bit = bit >> 1
        least = tl.where(tl.sum((held & (order >= tried)).to(tl.int32), 0) >= wanted, tried, least)
    # All candidates above the threshold stay, and of those equal to it the first ones, up to `wanted`.
    above, equal = held & (order > least), held & (order == least)
    spare = wanted - tl.sum(above.to(tl.int32), 0)
    kept = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= spare))
    node = tl.where(kept, tl.cumsum(kept.to(tl.int32), 0), 0)
    parent = tl.load(parents + place, mask=held, other=-1)
    above_node = tl.where(parent < 0, 0, tl.gather(node, tl.maximum(parent, 0), 0))
    depth = tl.where(at < TOPK, 1, (at - TOPK) // (TOPK * TOPK) + 2)  # level 1 has TOPK candidates, later ones TOPK^2
    out = request * nodes + node
    tl.store(node_tokens + out, tl.load(tokens + place, mask=kept, other=0), mask=kept)
    tl.store(node_parents + out, above_node.to(tl.int64), mask=kept)
    tl.store(node_depths + out, depth.to(tl.int64), mask=kept)
    tl.store(node_tokens + request * nodes, tl.load(bonus + request))
    tl.store(node_parents + request * nodes, tl.full([], 0, tl.int64))
    tl.store(node_depths + request * nodes, tl.full([], 0, tl.int64))


class AncestryArguments(NamedTuple):
    """What `ancestry` takes, in its order; its constants follow by name."""

    parents: Tensor
    ancestors: Tensor
    nodes: int
    deepest: int


@triton.jit
def ancestry(parents, ancestors, nodes, deepest, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Write `ancestors` `[R, nodes, nodes]`: True where the column is an ancestor of the row or the row itself, in
    trees `parents` `[R, nodes]` of depth at most `deepest`.
    """
    request = tl.program_id(0).to(tl.int64)
    row, column = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    node, seen = row, row[:, None] == column[None, :]
    for _ in range(deepest):  # each iteration follows one parent link; the root is its own parent
        node = tl.load(parents + request * nodes + node, mask=row < nodes, other=0).to(tl.int32)
        seen = seen | (node[:, None] == column[None, :])
    held = (row < nodes)[:, None] & (column < nodes)[None, :]
    tl.store(ancestors + (request * nodes + row[:, None]) * nodes + column[None, :], seen, mask=held)
