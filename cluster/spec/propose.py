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
from cluster.sampling.sampler import adjust_logits, top_logprobs
from cluster.sampling.sampling_inputs import SamplingInputs
from cluster.sampling.torch_sampler import TORCH, Sampler
from cluster.spec.inputs import EagleDraftInput
from cluster.spec.verify import Accepted


class Ranking(Protocol):
    """Picks the proposals of a draft from its logits."""

    def propose(self, logits: ShardedLogits, inputs: SamplingInputs) -> tuple[Tensor, Tensor]:
        """Return the K best tokens after each of n rows of B requests: (log-probabilities, target token ids),
        `[B, n, K]` each.

        `logits` are the draft's logits of the B n rows. All rows of a request propose tokens for the same position;
        `inputs` has the target's noise at this position.
        """
        ...


class CoupledRanking:
    """Ranks with the *target's* noise where the temperature is above 0 (Gumbel coupling). So where draft and target
    have the same distribution, they also sample the same token.
    """

    def __init__(
        self, target_ids: Tensor, topk: int, shard_ids: Tensor | None = None, sampler: Sampler = TORCH
    ) -> None:
        """`target_ids` `[Vd]` map the draft vocabulary to target ids. `shard_ids` `[v]` are the target ids of the
        columns that this rank holds of the draft's logits. If `shard_ids` is None, the rank has all columns.
        """
        self._target_ids, self._topk, self._sampler = target_ids, topk, sampler
        is_identity = torch.equal(target_ids, torch.arange(target_ids.shape[0], device=target_ids.device))
        self._ids = None if is_identity else target_ids
        self._hashes = token_hashes(target_ids)
        self._shard_ids_and_hashes = (
            (target_ids, self._hashes) if shard_ids is None else (shard_ids, token_hashes(shard_ids))
        )

    def propose(self, logits: ShardedLogits, inputs: SamplingInputs) -> tuple[Tensor, Tensor]:
        """Return the K best by tempered, adjusted draft logits plus noise; see `Ranking.propose`."""
        logits, masks = adjust_logits(logits, [inputs], self._ids)
        # Noise is keyed by target id, so take the noise of the target ids of the columns. Logits that penalties or
        # grammars changed have all columns, so they need the ids of all columns.
        if inputs.noise is not None:
            ids_and_hashes = (
                self._shard_ids_and_hashes if inputs.processor is None else (self._target_ids, self._hashes)
            )
            inputs = replace(inputs, noise=inputs.noise.over(*ids_and_hashes))
        log_probabilities, columns = top_logprobs(logits, inputs, self._topk, self._sampler, masks)
        shape = inputs.requests, inputs.rows_per_request, self._topk
        return log_probabilities.view(shape), self._target_ids.take(columns).view(shape)


def next_draft_input(
    runner: DraftRunner,
    ranking: Ranking,
    inputs: SamplingInputs,
    accepted: Accepted,
    extend_output: tuple[Tensor, Tensor],
) -> EagleDraftInput:
    """Return what requests carry to the next draft phase.

    `extend_output` has two outputs of the draft's forward at each request's last committed row, `[B, H]` each: the
    normed hidden, which the head reads, and the recurrent hidden. `inputs` are as in `Ranking.propose`.
    """
    normed, recurrent = extend_output
    log_probabilities, proposals = ranking.propose(runner.logits(normed), inputs)
    return EagleDraftInput(log_probabilities[:, 0], proposals[:, 0], recurrent, accepted.bonus)
