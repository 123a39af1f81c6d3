"""What a draft's logits propose: the K best tokens after each row, ranked with the target's noise.

Legend: B requests, n rows of each, K topk, V vocabulary, Vd draft vocabulary, H draft width.
"""

from typing import Protocol

from torch import Tensor

from cluster.batch import SamplingBatch
from cluster.forward.runner import DraftRunner
from cluster.forward.sampler import at_least_float32, scores
from cluster.spec.inputs import EagleDraftInput
from cluster.spec.verify import Accepted


class Ranking(Protocol):
    """Picks the proposals of a draft."""

    def propose(self, logits: Tensor, sampling: SamplingBatch, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """Logits `[B, n, Vd]` -> the K best (log-probability, target token id), `[B, n, K]` each.

        `noise` `[B, n, V]` is the target's at the position of the proposals; None at temperature 0.
        """
        ...


class CoupledRanking:
    """Ranks with the *target's* noise at T > 0 (Gumbel coupling).

    Where draft and target agree on the distribution, they then also agree on the draw.
    """

    def __init__(self, target_ids: Tensor, topk: int) -> None:
        """`target_ids` `[Vd]` map the draft vocabulary to target ids."""
        self._target_ids, self._topk = target_ids, topk

    def propose(self, logits: Tensor, sampling: SamplingBatch, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `Ranking.propose`."""
        if noise is not None:
            noise = noise.index_select(-1, self._target_ids)
        ranked = scores(logits, sampling, noise)
        likely = ranked.log_softmax(-1, dtype=at_least_float32(ranked.dtype)).topk(self._topk, -1)
        return likely.values, self._target_ids[likely.indices]


def carry(
    runner: DraftRunner,
    ranking: Ranking,
    sampling: SamplingBatch,
    accepted: Accepted,
    gave: tuple[Tensor, Tensor],
    noise: Tensor | None,
) -> EagleDraftInput:
    """What requests carry to the next draft, from the output `gave` of the extend at each request's last row.

    `gave` is (input of the head, recurrent hidden), `[B, H]` each.
    """
    normed, recurrent = gave
    logits = runner.logits(normed)[:, None]
    likely, proposed = ranking.propose(logits, sampling, None if noise is None else noise[:, None])
    return EagleDraftInput(likely[:, 0], proposed[:, 0], recurrent, accepted.bonus)
