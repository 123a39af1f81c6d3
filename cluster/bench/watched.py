"""An EAGLE draft that records its distribution and its ranking at every depth that a chain reaches.

A chain reaches depth d if its first d - 1 draft tokens were accepted. The context is then committed text, so the
target's distribution at that depth can be computed later from the text alone.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cluster.batch import Batch, SamplingBatch
from cluster.config import EngineConfig
from cluster.config.tree_shape import TreeShape
from cluster.engine import Engine
from cluster.engine.backends import sampler_of
from cluster.engine.build import engine_of, prepare_alone
from cluster.models.runner import DraftRunner
from cluster.models.vocab import ShardedLogits
from cluster.sampling.noise import Noise, token_hashes
from cluster.sampling.sampling_inputs import PhaseSampling, SamplingInputs
from cluster.sampling.torch_sampler import TORCH, Sampler, scored
from cluster.spec.draft import EagleDraft
from cluster.spec.inputs import EagleDraftInput
from cluster.spec.propose import CoupledRanking
from cluster.spec.tree import DraftTree
from cluster.spec.verify import Accepted

WIDTH = 4  # number of best tokens to record, for the top-4 figures


@dataclass(frozen=True, slots=True)
class Glance:
    """The draft's distribution `[Vd]` in one context. `likely`: the `WIDTH` target ids of highest probability.
    `coupled`: the `WIDTH` best ids when ranked with the target's Gumbel noise.
    """

    probabilities: Tensor
    coupled: list[int]
    likely: list[int]


@dataclass(frozen=True, slots=True)
class Reached:
    """One `depth` (from 1) that a chain reached: the request's `seed`, the position in the text, the target's `token`,
    the draft's `proposed` token, and the draft's `glance` in that context.
    """

    seed: int
    position: int
    depth: int
    token: int
    proposed: int
    glance: Glance


class WatchedRanking:
    """Ranks like `CoupledRanking` or, if `alone`, by the draft's probability. Records both rankings in any case."""

    def __init__(self, ids: Tensor, alone: bool, sampler: Sampler) -> None:
        """`ids` `[Vd]` are the target's ids of the draft vocabulary."""
        self.ids, self.levels = ids, list[list[Glance]]()
        self._alone, self._ranking = alone, CoupledRanking(ids, 1, sampler=sampler)

    def propose(self, columns: ShardedLogits, draw: SamplingInputs) -> tuple[Tensor, Tensor]:
        """Record a `Glance` of every request, and return the ranking's proposals."""
        self.levels.append(self._glances(columns.values[:, None], draw.sampling, draw.noise))
        return self._ranking.propose(columns, replace(draw, noise=None) if self._alone else draw)

    def _glances(self, logits: Tensor, sampling: SamplingBatch, noise: Noise | None) -> list[Glance]:
        """Return one `Glance` per request, from `logits` `[B, 1, Vd]`."""
        tempered = logits[:, 0] * sampling.inverse_temperature[:, None]
        if noise is None:
            ranked = logits
        else:
            ranked = scored(logits, sampling, noise.over(self.ids, token_hashes(self.ids)))
        coupled, likely = (self.ids[s.topk(WIDTH, -1).indices].tolist() for s in (ranked[:, 0], tempered))
        return [Glance(*seen) for seen in zip(tempered.softmax(-1), coupled, likely, strict=True)]


class WatchedDraft:
    """An `EagleDraft` of chains that appends a `Reached` to `reached` for every depth that was reached."""

    def __init__(self, runner: DraftRunner, alone: bool = False, sampler: Sampler = TORCH) -> None:
        """`alone`: rank by the draft's probability, without noise."""
        self.reached: list[Reached] = []
        self.ids = runner.model.target_ids
        self._ranking = WatchedRanking(self.ids, alone, sampler)
        self._draft = EagleDraft(runner, self._ranking)
        self._levels: list[list[Glance]] = []
        self._carried: dict[int, Glance] = {}
        self._tokens = torch.zeros(0)

    def draft(self, batch: Batch, carried: EagleDraftInput, drawing: PhaseSampling, shape: TreeShape) -> DraftTree:
        """Draft a chain. Its tokens and the glances of its levels are kept until `extend`."""
        self._ranking.levels = self._levels = []
        tree = self._draft.draft(batch, carried, drawing, shape)
        self._tokens = tree.tokens
        return tree

    def extend(
        self, batch: Batch, accepted: Accepted, features: list[Tensor], draw: SamplingInputs, shape: TreeShape
    ) -> EagleDraftInput:
        """Record the depths that this step's chains reached, then extend the draft and keep each request's first
        glance.
        """
        self._note(batch, accepted)
        self._ranking.levels = []
        carried = self._draft.extend(batch, accepted, features, draw, shape)
        for row, glance in zip(batch.rows.tolist(), self._ranking.levels[0], strict=True):
            self._carried[row] = glance
        return carried

    def _note(self, batch: Batch, accepted: Accepted) -> None:
        # Depth 1 was ranked by the previous step's extend (`_carried`), depth d > 1 by forward d - 1 of this draft.
        rows, lens, depths = batch.decode_rows.tolist(), batch.seq_lens.tolist(), self._tokens.shape[1] - 1
        seeds, tokens, proposed = batch.sampling.seeds.tolist(), accepted.tokens.tolist(), self._tokens.tolist()
        for i, count in enumerate(accepted.accept_len.tolist()):
            for depth in range(1, min(count, depths) + 1):
                glance = self._carried[rows[i]] if depth == 1 else self._levels[depth - 2][i]
                seen = Reached(seeds[i], lens[i] + depth, depth, tokens[i][depth - 1], proposed[i][depth], glance)
                self.reached.append(seen)


def watched_engine(config: EngineConfig, alone: bool = False) -> tuple[Engine, WatchedDraft]:
    """Return an engine of `config` with a recording draft, and that draft."""
    prepared = prepare_alone(config.model_copy(update={"capture": "off"}))  # a replay would not run the recording
    assert prepared.resolved.shape.topk == 1, "only a chain has one context per depth"
    (runner,) = prepared.memory.draft_runner_list
    draft = WatchedDraft(runner, alone, sampler_of(prepared.models.kernels))
    return engine_of(prepared, draft), draft
