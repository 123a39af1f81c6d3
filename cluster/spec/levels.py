"""Growing a tree level by level, for drafts of one runner and for drafts with a runner per level.

Legend: R requests, K topk, S depth, N tree nodes.
"""

from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.attention.ancestor_bits import self_bits, word_count
from cluster.config.tree_shape import TreeShape
from cluster.models.vocab import ShardedLogits
from cluster.sampling.sampling_inputs import PhaseSampling
from cluster.spec.chances import NodeChances
from cluster.spec.inputs import EagleDraftInput
from cluster.spec.propose import Ranking
from cluster.spec.tree import DraftTree, GrowthFactory, Proposed, TorchGrowth


class LevelRunner(Protocol):
    """Runs the levels of a step's trees, one after another."""

    def run(self, level: int, tokens: Tensor, parent: Tensor | None) -> ShardedLogits:
        """Run the rows of `level`, `tokens` `[R, K]`; return the logits of the R K rows.

        `parent` `[R, K]` is the index of each row's parent in the level before. In level 1, the first, it is None: the
        parent is the root.
        """
        ...


class GrowthSettings(NamedTuple):
    """How trees grow: `create_growth` makes the `Growth` that selects candidates. In steps whose requests share rows,
    it selects by the learned `chances` of acceptance. In other steps, and if `chances` is None, it selects by the
    draft's probabilities.
    """

    create_growth: GrowthFactory = TorchGrowth
    chances: NodeChances | None = None


BY_PROBABILITY = GrowthSettings()


def grow(
    draft_input: EagleDraftInput,
    phase_sampling: PhaseSampling,
    shape: TreeShape,
    ranking: Ranking,
    level_runner: LevelRunner,
    settings: GrowthSettings,
) -> DraftTree:
    """Return EAGLE-2's dynamic trees (arXiv 2406.16858): in each level, the K best candidates by cumulative score
    propose the candidates of the next level. A tree is the root and the N - 1 best candidates of all levels.
    """
    chances = settings.chances if shape.max_nodes else None
    sampled, levels = phase_sampling.sampling.noise_scale > 0, [draft_input.topk_logprobs]
    # The proposals in `draft_input` are the K rows of level 1.
    first_scores = levels[0] if chances is None else chances.log_chances(levels[0], sampled)
    growth = settings.create_growth(draft_input.topk_index, first_scores, shape.num_steps)
    tokens, parent_index = draft_input.topk_index, None
    path = None if phase_sampling.processor is None else tokens[..., None]
    for level in range(1, shape.num_steps):
        # A row of `level` proposes the token at seq_len + 1 + level, which has noise number `level`.
        logits = level_runner.run(level, tokens, parent_index)
        log_probabilities, proposals = ranking.propose(logits, phase_sampling.at_position(level, shape.topk, path))
        levels.append(log_probabilities.flatten(1))
        growth.add(proposals, log_probabilities if chances is None else chances.log_chances(log_probabilities, sampled))
        if level < shape.num_steps - 1:
            tokens, parent_index = growth.best()
            # Penalties and grammars need the drafted tokens on the path to each row, `[R, K, depth]`, without the root.
            if path is not None:
                path = torch.cat([gather_by_parent(path, parent_index), tokens[..., None]], 2)
    tree = growth.tree(draft_input.bonus, shape.drafted_nodes)
    if chances is None or tree.candidates is None:
        return tree
    # Candidate number i K + k of a level is proposal k of row i.
    log_probabilities, is_likeliest = torch.cat(levels, 1).gather(1, tree.candidates), tree.candidates % shape.topk == 0
    proposed = Proposed(F.pad(log_probabilities, (1, 0)), F.pad(is_likeliest, (1, 0), value=True))
    return replace(tree, proposed=proposed)


class Ancestry:
    """The ancestor masks of a tree's rows, as bits: each row sees its ancestors in earlier levels, and itself."""

    def __init__(self, draft_input: EagleDraftInput, shape: TreeShape) -> None:
        self._r, self._k = draft_input.topk_index.shape
        self._width, self._device = (shape.num_steps - 1) * self._k, draft_input.topk_index.device
        self._bits: Tensor | None = None

    def descend(self, level: int, parent: Tensor | None) -> Tensor:
        """Return the ancestor masks of the K rows of `level` as bits `[R, K, words]`, with one bit for each of the
        `level * K` window slots of levels 1 to `level`. `parent` is as in `LevelRunner.run`.
        """
        # bits(row) = bits(parent) | own slot, (level - 1) K + row.
        own_slot_bits = self_bits((level - 1) * self._k, self._k, self._width, self._device)
        if self._bits is None or parent is None:
            self._bits = own_slot_bits.expand(self._r, -1, -1)
        else:
            self._bits = gather_by_parent(self._bits, parent) | own_slot_bits
        return self._bits[..., : word_count(level * self._k)]


def gather_by_parent(rows: Tensor, parent: Tensor | None) -> Tensor:
    """Return for each row the entry of its parent in `rows` `[R, K, ..]`; if `parent` is None, return `rows`."""
    return rows if parent is None else rows.gather(1, parent[..., None].expand_as(rows))
