"""Trees by Triton kernels, for GPUs: one launch for each level, two for the tree, one for its accepted path.

Results must equal those of `TorchGrowth` and `verify.accept`. Among equal scores these kernels keep the first; torch
may keep any.
Legend: R requests, K topk, N nodes, C candidates.
"""

import torch
from torch import Tensor

from cluster.batch import with_prompts
from cluster.kernels.accept import gpu as accepting
from cluster.kernels.launch import WIDE, launch, warps, whole
from cluster.kernels.tree import gpu
from cluster.sampling.noise import at_least_float32
from cluster.spec import tree
from cluster.spec.tree import DECAY, Candidates, DraftTree, best_tree, depths_of
from cluster.spec.verify import Accepted

ROWS = 16  # nodes whose ancestors one program finds
MOST = 1 << 12  # candidates that fit into the registers of one program; if there are more, torch selects


class TritonGrowth:
    """`Growth` by Triton. The candidates of all levels share buffers `[R, C]`, which are allocated at the start."""

    def __init__(self, tokens: Tensor, likely: Tensor, num_steps: int) -> None:
        """Allocate the candidates of `num_steps` levels, and write those of level 1."""
        (r, k), wide = tokens.shape, at_least_float32(likely.dtype)
        self._depth, self._k, self._before = num_steps, k, 0
        total = k + (num_steps - 1) * k * k
        self._candidates = (
            tokens.new_empty(r, total),
            tokens.new_empty(r, total, dtype=wide),
            tokens.new_empty(r, total, dtype=torch.int32),
        )
        self._wide = wide
        self._rows = self._level(tokens, likely, None)
        self._before = k

    def add(self, proposed: Tensor, likely: Tensor) -> None:
        """Append K^2 candidates; see `Growth.add`."""
        self._rows = self._level(proposed, likely, self._rows)
        self._before += self._k * self._k

    def best(self) -> tuple[Tensor, Tensor]:
        """Return the rows that `add` selected already; see `Growth.best`."""
        return self._rows[0], self._rows[1]

    def tree(self, bonus: Tensor, nodes: int) -> DraftTree:
        """Select the nodes among all candidates; see `Growth.tree`.

        Raises:
            ValueError: not all levels were added, or `nodes` is not between 1 and C + 1.
        """
        tokens, scores, parents = self._candidates
        r, total = tokens.shape
        if self._before != total:
            raise ValueError(f"{self._before} candidates were added of the {total} of {self._depth} levels")
        if not 1 <= nodes <= total + 1:
            raise ValueError(f"{nodes} nodes of {total} candidates and a root")
        if total > MOST:
            depths = depths_of(total, self._k, tokens.device)
            return best_tree(Candidates(tokens, scores, parents.long(), depths, self._depth), bonus, nodes)
        # Tokens, parents and depths of the nodes; the second kernel finds ancestors from the parents.
        kept = tokens.new_empty(r, nodes), tokens.new_empty(r, nodes), tokens.new_empty(r, nodes)
        launch(
            gpu.keep,
            (r,),
            gpu.KeepArguments(
                tokens, scores, parents, bonus.contiguous(), *kept, total=total, wanted=nodes - 1, nodes=nodes
            ),
            TOPK=self._k,
            BITS=8 * scores.dtype.itemsize,
            BLOCK=whole(total),
            num_warps=warps(whole(total)),
        )
        ancestors = torch.empty(r, nodes, nodes, dtype=torch.bool, device=tokens.device)
        arguments = gpu.AncestryArguments(kept[1], ancestors.view(torch.uint8), nodes, deepest=self._depth)
        launch(gpu.ancestry, (r, -(-nodes // ROWS)), arguments, ROWS=ROWS, BLOCK=whole(nodes))
        return DraftTree(*kept, ancestors)

    def _level(
        self, proposed: Tensor, likely: Tensor, rows: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Write the candidates of one level; return tokens, parent rows, scores and candidate numbers of the K best.

        `rows` are the same four results for the level before. If `rows` is None, this is level 1, below the root.
        """
        r, k = proposed.shape[:2]
        best = (
            proposed.new_empty(r, k),
            proposed.new_empty(r, k),
            proposed.new_empty(r, k, dtype=self._wide),
            proposed.new_empty(r, k, dtype=torch.int32),
        )
        score, number = (None, None) if rows is None else rows[2:]
        block = whole(k if rows is None else k * k)
        launch(
            gpu.level,
            (r,),
            gpu.LevelArguments(
                *(proposed.contiguous(), likely.contiguous(), score, number),
                *self._candidates,
                *best,
                before=self._before,
                total=self._candidates[0].shape[1],
            ),
            FIRST=rows is None,
            TOPK=k,
            WIDE=WIDE[self._wide],
            FLOOR=tree.FLOOR,
            DECAY=DECAY,
            BLOCK=block,
            num_warps=warps(block),
        )
        return best


def accept(tree: DraftTree, chosen: Tensor, first: Tensor, num_steps: int) -> Accepted:
    """Return the accepted paths; arguments and result as in `verify.accept`."""
    (trees, nodes), wide = chosen.shape, num_steps + 1
    tokens, parents = (each if each.stride(1) == 1 else each.contiguous() for each in (tree.tokens, tree.parents))
    path, taken = chosen.new_empty(trees, wide), chosen.new_empty(trees, wide)
    lens, bonus = chosen.new_empty(trees), chosen.new_empty(trees)
    arguments = accepting.AcceptArguments(
        *(tokens, parents, chosen.contiguous()),
        *(path, taken, lens, bonus),
        nodes=nodes,
        tokens_stride=tokens.stride(0),
        parents_stride=parents.stride(0),
    )
    block = whole(nodes)
    launch(accepting.accept, (trees,), arguments, WIDE=wide, BLOCK=block, num_warps=warps(block))
    return Accepted(path, taken, lens, with_prompts(bonus, first))
