"""Growth of draft trees: the scores and best candidates of a level, the nodes that a tree keeps, and their ancestors.

Of candidates with equal scores, the one with the lower number comes first. Shape legend: R requests.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from cluster.kernels.choice.gpu import sort_key, to_unsigned


class LevelArguments(NamedTuple):
    """The arguments of the kernel `level`, in order, without its constants, which `launch` passes by name."""

    proposed: Tensor
    logprobs: Tensor
    row_scores: Tensor | None
    row_numbers: Tensor | None
    tokens: Tensor
    scores: Tensor
    parents: Tensor
    next_token: Tensor
    next_parent: Tensor
    next_score: Tensor
    next_number: Tensor
    first_number: int
    num_candidates: int


@triton.jit
def level(
    proposed,
    logprobs,
    row_scores,
    row_numbers,
    tokens,
    scores,
    parents,
    next_token,
    next_parent,
    next_score,
    next_number,
    first_number,
    num_candidates,
    FIRST: tl.constexpr,
    TOPK: tl.constexpr,
    SCORE_DTYPE: tl.constexpr,
    FLOOR: tl.constexpr,
    DECAY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the draft's proposals of one level as candidates for tree nodes, numbered from `first_number` on. Each of a
    request's `TOPK` rows (the best candidates of the level before) is the parent of `TOPK` candidates.

    `proposed` and `logprobs` `[R, TOPK, TOPK]` are tokens and log-probabilities; in the first level (`FIRST`), which
    follows the root, they are `[R, TOPK]`. `row_scores` and `row_numbers` `[R, TOPK]` are the rows' cumulative scores
    and candidate numbers. Writes the candidates' `tokens`, `scores`, `parents` `[R, num_candidates]`; a parent is a
    candidate number, or -1 for the root. The `TOPK` best candidates of the level are the rows of the next level. The
    kernel writes their tokens, parent rows, scores and candidate numbers to `next_token`, `next_parent`, `next_score`
    and `next_number`, `[R, TOPK]`. In the first level these are all candidates, in order.

    score = score of the row + clamp(log-probability, FLOOR, 0) - DECAY. NaN counts as FLOOR. DECAY makes a child score
    below its parent, so that a tree which keeps a node keeps its parent too.
    """
    request, offsets = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    COUNT: tl.constexpr = TOPK if FIRST else TOPK * TOPK
    mask = offsets < COUNT
    token = tl.load(proposed + request * COUNT + offsets, mask=mask, other=0)
    candidate_scores = tl.load(logprobs + request * COUNT + offsets, mask=mask, other=0.0).to(SCORE_DTYPE)
    lowest, decay = tl.full([], FLOOR, SCORE_DTYPE), tl.full([], DECAY, SCORE_DTYPE)
    candidate_scores = tl.where(candidate_scores != candidate_scores, lowest, candidate_scores)
    candidate_scores = (
        tl.where(candidate_scores < lowest, lowest, tl.where(candidate_scores > 0, 0.0, candidate_scores)) - decay
    )
    candidate_offsets = request * num_candidates + first_number + offsets
    if FIRST:
        tl.store(parents + candidate_offsets, tl.full([BLOCK], -1, tl.int32), mask=mask)
    else:
        candidate_scores += tl.load(row_scores + request * TOPK + offsets // TOPK, mask=mask, other=0.0)
        tl.store(
            parents + candidate_offsets,
            tl.load(row_numbers + request * TOPK + offsets // TOPK, mask=mask, other=0),
            mask=mask,
        )
    tl.store(tokens + candidate_offsets, token, mask=mask)
    tl.store(scores + candidate_offsets, candidate_scores, mask=mask)
    remaining_scores = tl.where(mask, candidate_scores, float("-inf"))
    for rank in range(TOPK):
        if FIRST:
            best_index = tl.full([], 0, tl.int32) + rank
        else:
            _, best_index = tl.max(remaining_scores, 0, return_indices=True, return_indices_tie_break_left=True)
        is_best = offsets == best_index
        next_offset = request * TOPK + rank
        tl.store(next_token + next_offset, tl.sum(tl.where(is_best, token, 0), 0))
        tl.store(next_score + next_offset, tl.sum(tl.where(is_best, candidate_scores, 0.0), 0))
        tl.store(next_parent + next_offset, (best_index // TOPK).to(tl.int64))
        tl.store(next_number + next_offset, (first_number + best_index).to(tl.int32))
        remaining_scores = tl.where(is_best, float("-inf"), remaining_scores)


class KeepArguments(NamedTuple):
    """The arguments of the kernel `keep`, in order, without its constants, which `launch` passes by name."""

    tokens: Tensor
    scores: Tensor
    parents: Tensor
    bonus: Tensor
    node_tokens: Tensor
    node_parents: Tensor
    node_depths: Tensor
    node_scores: Tensor
    num_candidates: int
    num_kept: int
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
    node_scores,
    num_candidates,
    num_kept,
    nodes,
    TOPK: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keep the root and the `num_kept` candidates with the best scores, in ascending order of their numbers. `tokens`,
    `scores` and `parents` of the candidates are `[R, num_candidates]`, as `level` writes them. `bonus` `[R]` is the
    token of the root.

    Writes tokens, parents, depths and scores of the kept nodes, `[R, nodes]`. The lowest kept score is found bit by bit
    (radix select).
    """
    request, offsets = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask, candidate_offsets = offsets < num_candidates, request * num_candidates + offsets
    candidate_scores = tl.load(scores + candidate_offsets, mask=mask, other=0.0)
    score_keys = to_unsigned(sort_key(candidate_scores))
    threshold = tl.full([], 0, score_keys.dtype)
    bit = tl.full([], 1, score_keys.dtype) << (BITS - 1)
    for _ in range(BITS):
        trial = threshold | bit
        bit = bit >> 1
        threshold = tl.where(tl.sum((mask & (score_keys >= trial)).to(tl.int32), 0) >= num_kept, trial, threshold)
    # All candidates above the threshold are kept. The other places, up to `num_kept`, go to the first candidates whose
    # score equals the threshold.
    above, equal = mask & (score_keys > threshold), mask & (score_keys == threshold)
    num_ties = num_kept - tl.sum(above.to(tl.int32), 0)
    is_kept = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= num_ties))
    node = tl.where(is_kept, tl.cumsum(is_kept.to(tl.int32), 0), 0)
    parent = tl.load(parents + candidate_offsets, mask=mask, other=-1)
    parent_node = tl.where(parent < 0, 0, tl.gather(node, tl.maximum(parent, 0), 0))
    depth = tl.where(
        offsets < TOPK, 1, (offsets - TOPK) // (TOPK * TOPK) + 2
    )  # level 1 has TOPK candidates, later ones TOPK^2
    out = request * nodes + node
    tl.store(node_tokens + out, tl.load(tokens + candidate_offsets, mask=is_kept, other=0), mask=is_kept)
    tl.store(node_parents + out, parent_node.to(tl.int64), mask=is_kept)
    tl.store(node_depths + out, depth.to(tl.int64), mask=is_kept)
    tl.store(node_scores + out, candidate_scores, mask=is_kept)
    tl.store(node_tokens + request * nodes, tl.load(bonus + request))
    tl.store(node_parents + request * nodes, tl.full([], 0, tl.int64))
    tl.store(node_depths + request * nodes, tl.full([], 0, tl.int64))
    tl.store(node_scores + request * nodes, tl.full([], 0.0, candidate_scores.dtype))


class AncestryArguments(NamedTuple):
    """The arguments of the kernel `ancestry`, in order, without its constants, which `launch` passes by name."""

    parents: Tensor
    ancestors: Tensor
    nodes: int
    max_depth: int


@triton.jit
def ancestry(parents, ancestors, nodes, max_depth, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Write `ancestors` `[R, nodes, nodes]`: True where the column's node is the row's node or one of its ancestors.
    `parents` `[R, nodes]` are trees of depth at most `max_depth`.
    """
    request = tl.program_id(0).to(tl.int64)
    row, column = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    node, is_ancestor = row, row[:, None] == column[None, :]
    for _ in range(max_depth):  # each iteration follows one parent link; the root is its own parent
        node = tl.load(parents + request * nodes + node, mask=row < nodes, other=0).to(tl.int32)
        is_ancestor = is_ancestor | (node[:, None] == column[None, :])
    mask = (row < nodes)[:, None] & (column < nodes)[None, :]
    tl.store(ancestors + (request * nodes + row[:, None]) * nodes + column[None, :], is_ancestor, mask=mask)
