"""Trees by Triton kernels, for GPUs: one launch for each level, two for the tree, one for its accepted path.

Results must equal those of `TorchGrowth` and `verify.accept`, except that these kernels keep the first of equal scores,
and torch may keep any. Trees that kernels select have no `candidates`.
Legend: R requests, K topk, N nodes, C candidates.
"""

import torch
from torch import Tensor

from cluster.batch import with_prompts
from cluster.kernels.accept import gpu as accepting
from cluster.kernels.launch import ACC_DTYPES, launch, next_power_of_2, warps
from cluster.kernels.tree import gpu
from cluster.sampling.noise import at_least_float32
from cluster.spec import tree
from cluster.spec.tree import DECAY, Candidates, DraftTree, best_tree, depths_of
from cluster.spec.verify import Accepted

NODES_PER_PROGRAM = 16  # nodes whose ancestors one program finds
MAX_CANDIDATES = 1 << 12  # candidates that fit into the registers of one program; of more, torch selects


class TritonGrowth:
    """`Growth` by Triton. The candidates of all levels share buffers `[R, C]`, which are allocated at the start."""

    def __init__(self, tokens: Tensor, log_probabilities: Tensor, num_steps: int) -> None:
        """Allocate the candidates of `num_steps` levels, and write those of level 1."""
        (r, k), score_dtype = tokens.shape, at_least_float32(log_probabilities.dtype)
        self._depth, self._k, self._previous_candidates = num_steps, k, 0
        candidate_count = k + (num_steps - 1) * k * k
        self._candidates = (
            tokens.new_empty(r, candidate_count),
            tokens.new_empty(r, candidate_count, dtype=score_dtype),
            tokens.new_empty(r, candidate_count, dtype=torch.int32),
        )
        self._score_dtype = score_dtype
        self._best = self._level(tokens, log_probabilities, None)
        self._previous_candidates = k

    def add(self, proposals: Tensor, log_probabilities: Tensor) -> None:
        """Append K^2 candidates; see `Growth.add`.

        Raises:
            ValueError: all levels were added already.
        """
        if self._previous_candidates == self._candidates[0].shape[1]:
            raise ValueError(f"all {self._depth} levels were added already")
        self._best = self._level(proposals, log_probabilities, self._best)
        self._previous_candidates += self._k * self._k

    def best(self) -> tuple[Tensor, Tensor]:
        """Return the rows that `add` selected already; see `Growth.best`."""
        return self._best[0], self._best[1]

    def tree(self, bonus: Tensor, nodes: int) -> DraftTree:
        """Select the nodes among all candidates; see `Growth.tree`.

        Raises:
            ValueError: not all levels were added, or `nodes` is not between 1 and C + 1.
        """
        tokens, scores, parents = self._candidates
        r, candidate_count = tokens.shape
        if self._previous_candidates != candidate_count:
            raise ValueError(
                f"{self._previous_candidates} candidates were added of the {candidate_count} of {self._depth} levels"
            )
        if not 1 <= nodes <= candidate_count + 1:
            raise ValueError(f"{nodes} nodes of {candidate_count} candidates and a root")
        if candidate_count > MAX_CANDIDATES:
            depths = depths_of(candidate_count, self._k, tokens.device)
            return best_tree(Candidates(tokens, scores, parents.long(), depths, self._depth), bonus, nodes)
        # Tokens, parents, depths and scores of the nodes; the second kernel finds ancestors from the parents.
        node_tensors = tokens.new_empty(r, nodes), tokens.new_empty(r, nodes), tokens.new_empty(r, nodes)
        node_scores = scores.new_empty(r, nodes)
        launch(
            gpu.keep,
            (r,),
            gpu.KeepArguments(
                tokens,
                scores,
                parents,
                bonus.contiguous(),
                *node_tensors,
                node_scores,
                num_candidates=candidate_count,
                num_kept=nodes - 1,
                nodes=nodes,
            ),
            TOPK=self._k,
            BITS=8 * scores.dtype.itemsize,
            BLOCK=next_power_of_2(candidate_count),
            num_warps=warps(next_power_of_2(candidate_count)),
        )
        ancestors = torch.empty(r, nodes, nodes, dtype=torch.bool, device=tokens.device)
        arguments = gpu.AncestryArguments(node_tensors[1], ancestors.view(torch.uint8), nodes, max_depth=self._depth)
        launch(
            gpu.ancestry,
            (r, -(-nodes // NODES_PER_PROGRAM)),
            arguments,
            ROWS=NODES_PER_PROGRAM,
            BLOCK=next_power_of_2(nodes),
        )
        return DraftTree(*node_tensors, ancestors, scores=node_scores)

    def _level(
        self, proposals: Tensor, log_probabilities: Tensor, previous_level: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Write the candidates of one level; return tokens, parent rows, scores and candidate numbers of the K best.

        `previous_level` are the same four results for the level before. If `previous_level` is None, this is level 1,
        below the root.
        """
        r, k = proposals.shape[:2]
        best_candidates = (
            proposals.new_empty(r, k),
            proposals.new_empty(r, k),
            proposals.new_empty(r, k, dtype=self._score_dtype),
            proposals.new_empty(r, k, dtype=torch.int32),
        )
        scores, candidate_numbers = (None, None) if previous_level is None else previous_level[2:]
        block = next_power_of_2(k if previous_level is None else k * k)
        launch(
            gpu.level,
            (r,),
            gpu.LevelArguments(
                *(proposals.contiguous(), log_probabilities.contiguous(), scores, candidate_numbers),
                *self._candidates,
                *best_candidates,
                first_number=self._previous_candidates,
                num_candidates=self._candidates[0].shape[1],
            ),
            FIRST=previous_level is None,
            TOPK=k,
            SCORE_DTYPE=ACC_DTYPES[self._score_dtype],
            FLOOR=tree.FLOOR,
            DECAY=DECAY,
            BLOCK=block,
            num_warps=warps(block),
        )
        return best_candidates


def accept(tree: DraftTree, target_tokens: Tensor, first_tokens: Tensor, num_steps: int) -> Accepted:
    """Return the accepted paths; arguments and result as in `verify.accept`."""
    (trees, nodes), path_length = target_tokens.shape, num_steps + 1
    tokens, parents = (
        tensor if tensor.stride(1) == 1 else tensor.contiguous() for tensor in (tree.tokens, tree.parents)
    )
    path, path_tokens = target_tokens.new_empty(trees, path_length), target_tokens.new_empty(trees, path_length)
    lens, bonus = target_tokens.new_empty(trees), target_tokens.new_empty(trees)
    arguments = accepting.AcceptArguments(
        *(tokens, parents, target_tokens.contiguous()),
        *(path, path_tokens, lens, bonus),
        nodes=nodes,
        tokens_stride=tokens.stride(0),
        parents_stride=parents.stride(0),
    )
    block = next_power_of_2(nodes)
    launch(accepting.accept, (trees,), arguments, PATH_SIZE=path_length, BLOCK=block, num_warps=warps(block))
    return Accepted(path, path_tokens, lens, with_prompts(bonus, first_tokens))
