"""Proposals of a draft: the K best tokens after each row, ranked with the target's noise.

Legend: B requests, n rows of each, K topk, V vocabulary, Vd draft vocabulary, H draft width.
"""

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from cluster.models.runner import DraftRunner
from cluster.models.vocab import ShardedLogits
from cluster.sampling.noise import token_hashes
from cluster.sampling.sampler import adjusted, likeliest
from cluster.sampling.sampling_inputs import SamplingInputs
from cluster.sampling.torch_sampler import TORCH, Sampler
from cluster.spec.inputs import EagleDraftInput
from cluster.spec.verify import Accepted


class Ranking(Protocol):
    """Picks the proposals of a draft from its logits."""

    def propose(self, columns: ShardedLogits, draw: SamplingInputs) -> tuple[Tensor, Tensor]:
        """Logits of n rows of each of B requests -> the K best (log-probability, target token id), `[B, n, K]` each.

        All rows propose tokens for the same position; `draw` holds the target's noise there.
        """
        ...


class CoupledRanking:
    """Ranks with the *target's* noise where the temperature is above 0 (Gumbel coupling).

    Where draft and target agree on the distribution, they then also agree on the sampled token.
    """

    def __init__(self, target_ids: Tensor, topk: int, own_ids: Tensor | None = None, sampler: Sampler = TORCH) -> None:
        """`target_ids` `[Vd]` map the draft vocabulary to target ids. `own_ids` `[v]` are the target ids of this rank's
        columns. If `own_ids` is None, the rank has all columns.
        """
        self._target_ids, self._topk, self._sampler = target_ids, topk, sampler
        in_order = torch.equal(target_ids, torch.arange(target_ids.shape[0], device=target_ids.device))
        self._ids = None if in_order else target_ids
        self._hashes = token_hashes(target_ids)
        self._own = (target_ids, self._hashes) if own_ids is None else (own_ids, token_hashes(own_ids))

    def propose(self, columns: ShardedLogits, draw: SamplingInputs) -> tuple[Tensor, Tensor]:
        """Return the K best by tempered, adjusted draft logits plus noise; see `Ranking.propose`."""
        columns, masks = adjusted(columns, [draw], self._ids)
        # Noise is keyed by target id, so take the noise of the ids that the columns stand for. Adjusted logits are
        # whole rows, so they need the ids of all columns.
        if draw.noise is not None:
            own = self._own if draw.adjust is None else (self._target_ids, self._hashes)
            draw = replace(draw, noise=draw.noise.over(*own))
        likely, chosen = likeliest(columns, draw, self._topk, self._sampler, masks)
        shape = draw.requests, draw.each, self._topk
        return likely.view(shape), self._target_ids.take(chosen).view(shape)


def carry(
    runner: DraftRunner, ranking: Ranking, draw: SamplingInputs, accepted: Accepted, gave: tuple[Tensor, Tensor]
) -> EagleDraftInput:
    """Return what requests carry to the next draft phase.

    `gave` is the output of extend at each request's last committed row: (input of the head, recurrent hidden), `[B, H]`
    each. `draw` as in `Ranking.propose`.
    """
    normed, recurrent = gave
    likely, proposed = ranking.propose(runner.logits(normed), draw)
    return EagleDraftInput(likely[:, 0], proposed[:, 0], recurrent, accepted.bonus)
