"""An EAGLE draft that records its distribution and its best tokens at every depth that a chain reaches.

A chain reaches depth d if its first d - 1 draft tokens were accepted. The draft token at depth d then continues
committed text, so the target's distribution at depth d can be computed later from the text alone.

Legend: B requests, Vd tokens of the draft's vocabulary.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cluster.batch import Batch, SamplingBatch
from cluster.config import EngineConfig
from cluster.config.tree_shape import TreeShape
from cluster.engine import Engine
from cluster.engine.backends import sampler_of
from cluster.engine.build import engine_of, prepare_single_rank
from cluster.models.runner import DraftRunner
from cluster.models.vocab import ShardedLogits
from cluster.sampling.noise import Noise, token_hashes
from cluster.sampling.sampling_inputs import PhaseSampling, SamplingInputs
from cluster.sampling.torch_sampler import TORCH, Sampler, score_logits
from cluster.spec.draft import EagleDraft
from cluster.spec.inputs import EagleDraftInput
from cluster.spec.propose import CoupledRanking
from cluster.spec.tree import DraftTree
from cluster.spec.verify import Accepted

TOP_COUNT = 4  # number of best tokens to record


@dataclass(frozen=True, slots=True)
class DraftDistribution:
    """The draft's `probabilities` `[Vd]` in one context. `top_by_probability`: the `TOP_COUNT` target ids of highest
    probability. `top_coupled`: the `TOP_COUNT` best ids when ranked with the target's Gumbel noise.
    """

    probabilities: Tensor
    top_coupled: list[int]
    top_by_probability: list[int]


@dataclass(frozen=True, slots=True)
class ReachedDepth:
    """One `depth` (from 1) that a chain reached: the request's `seed`, the position in its text, the target's `token`
    at this position, the draft's `proposed` token, and the draft's `distribution` there.
    """

    seed: int
    position: int
    depth: int
    token: int
    proposed: int
    distribution: DraftDistribution


class RecordingRanking:
    """Ranks like `CoupledRanking` (with the target's Gumbel noise) or, if `by_probability`, without noise. Always
    records the best tokens by both rankings.
    """

    def __init__(self, ids: Tensor, by_probability: bool, sampler: Sampler) -> None:
        """`ids` `[Vd]` are the target's ids of the tokens of the draft's vocabulary."""
        self.ids, self.levels = ids, list[list[DraftDistribution]]()
        self._by_probability, self._ranking = by_probability, CoupledRanking(ids, 1, sampler=sampler)

    def propose(self, logits: ShardedLogits, inputs: SamplingInputs) -> tuple[Tensor, Tensor]:
        """Record a `DraftDistribution` of every request, and return the proposals of `CoupledRanking`."""
        self.levels.append(self._distributions(logits.values[:, None], inputs.sampling, inputs.noise))
        return self._ranking.propose(logits, replace(inputs, noise=None) if self._by_probability else inputs)

    def _distributions(self, logits: Tensor, sampling: SamplingBatch, noise: Noise | None) -> list[DraftDistribution]:
        """Return one `DraftDistribution` per request, from `logits` `[B, 1, Vd]`."""
        scaled = logits[:, 0] * sampling.inverse_temperature[:, None]
        if noise is None:
            coupled_scores = logits
        else:
            coupled_scores = score_logits(logits, sampling, noise.over(self.ids, token_hashes(self.ids)))
        top_coupled, top_by_probability = (
            self.ids[scores.topk(TOP_COUNT, -1).indices].tolist() for scores in (coupled_scores[:, 0], scaled)
        )
        return [
            DraftDistribution(*fields)
            for fields in zip(scaled.softmax(-1), top_coupled, top_by_probability, strict=True)
        ]


class RecordingDraft:
    """An `EagleDraft` of chains that appends a `ReachedDepth` to `reached` for every depth that was reached."""

    def __init__(self, runner: DraftRunner, by_probability: bool = False, sampler: Sampler = TORCH) -> None:
        """`by_probability`: rank by the draft's probability, without noise."""
        self.reached: list[ReachedDepth] = []
        self.ids = runner.model.target_ids
        self._ranking = RecordingRanking(self.ids, by_probability, sampler)
        self._draft = EagleDraft(runner, self._ranking)
        self._levels: list[list[DraftDistribution]] = []
        self._first_depth: dict[int, DraftDistribution] = {}
        self._tokens = torch.zeros(0)

    def draft(
        self, batch: Batch, draft_input: EagleDraftInput, phase_sampling: PhaseSampling, shape: TreeShape
    ) -> DraftTree:
        """Draft a chain. Its tokens and the distributions of its levels are stored until `extend`."""
        self._ranking.levels = self._levels = []
        tree = self._draft.draft(batch, draft_input, phase_sampling, shape)
        self._tokens = tree.tokens
        return tree

    def extend(
        self,
        batch: Batch,
        accepted: Accepted,
        target_hidden: list[Tensor],
        sampling_inputs: SamplingInputs,
        shape: TreeShape,
    ) -> EagleDraftInput:
        """Record the depths that this step's chains reached. Then extend the draft and store each request's
        distribution at depth 1 of the next chain.
        """
        self._record_depths(batch, accepted)
        self._ranking.levels = []
        draft_input = self._draft.extend(batch, accepted, target_hidden, sampling_inputs, shape)
        for row, distribution in zip(batch.rows.tolist(), self._ranking.levels[0], strict=True):
            self._first_depth[row] = distribution
        return draft_input

    def _record_depths(self, batch: Batch, accepted: Accepted) -> None:
        # The previous `extend` ranked depth 1 (`_first_depth`); forward d - 1 of this `draft` call ranked depth d > 1.
        rows, seq_lens, max_depth = batch.decode_rows.tolist(), batch.seq_lens.tolist(), self._tokens.shape[1] - 1
        seeds, tokens, proposed = batch.sampling.seeds.tolist(), accepted.tokens.tolist(), self._tokens.tolist()
        for index, accept_len in enumerate(accepted.accept_len.tolist()):
            for depth in range(1, min(accept_len, max_depth) + 1):
                distribution = self._first_depth[rows[index]] if depth == 1 else self._levels[depth - 2][index]
                reached = ReachedDepth(
                    seeds[index],
                    seq_lens[index] + depth,
                    depth,
                    tokens[index][depth - 1],
                    proposed[index][depth],
                    distribution,
                )
                self.reached.append(reached)


def recording_engine(config: EngineConfig, by_probability: bool = False) -> tuple[Engine, RecordingDraft]:
    """Return an engine of `config` with a recording draft, and this draft. `config` must have a chain as its tree."""
    prepared = prepare_single_rank(config.model_copy(update={"capture": "off"}))  # a replay would not run the recording
    assert prepared.resolved.shape.topk == 1, "only a chain has one context per depth"
    (runner,) = prepared.memory.draft_runner_list
    draft = RecordingDraft(runner, by_probability, sampler_of(prepared.models.kernels))
    return engine_of(prepared, draft), draft
