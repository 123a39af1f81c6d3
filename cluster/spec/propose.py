"""What a draft's logits propose: the K best tokens after each row, ranked with the target's noise.

Legend: B requests, n rows of each, K topk, V vocabulary, Vd draft vocabulary, H draft width.
"""

from typing import Protocol

from torch import Tensor

from cluster.batch import SamplingBatch
from cluster.forward.choose import likeliest
from cluster.forward.noise import Noise, token_hashes
from cluster.forward.runner import DraftRunner
from cluster.spec.inputs import EagleDraftInput
from cluster.spec.verify import Accepted


class Ranking(Protocol):
    """Picks the proposals of a draft."""

    def propose(self, logits: Tensor, sampling: SamplingBatch, noise: Noise | None) -> tuple[Tensor, Tensor]:
        """Logits `[B, n, Vd]` -> the K best (log-probability, target token id), `[B, n, K]` each.

        `noise` is the target's at the one position of the proposals; None at temperature 0.
        """
        ...


class CoupledRanking:
    """Ranks with the *target's* noise at T > 0 (Gumbel coupling).

    Where draft and target agree on the distribution, they then also agree on the draw.
    """

    def __init__(self, target_ids: Tensor, topk: int) -> None:
        """`target_ids` `[Vd]` map the draft vocabulary to target ids."""
        self._target_ids, self._hashes, self._topk = target_ids, token_hashes(target_ids), topk

    def propose(self, logits: Tensor, sampling: SamplingBatch, noise: Noise | None) -> tuple[Tensor, Tensor]:
        """See `Ranking.propose`."""
        own = None if noise is None else noise.over(self._target_ids, self._hashes)
        likely, columns = likeliest(logits, sampling, own, self._topk)
        return likely, self._target_ids[columns]


def carry(
    runner: DraftRunner,
    ranking: Ranking,
    sampling: SamplingBatch,
    accepted: Accepted,
    gave: tuple[Tensor, Tensor],
    noise: Noise | None,
) -> EagleDraftInput:
    """What requests carry to the next draft, from the output `gave` of the extend at each request's last row.

    `gave` is (input of the head, recurrent hidden), `[B, H]` each; `noise` as in `Ranking.propose`.
    """
    normed, recurrent = gave
    logits = runner.logits(normed)[:, None]
    likely, proposed = ranking.propose(logits, sampling, noise)
    return EagleDraftInput(likely[:, 0], proposed[:, 0], recurrent, accepted.bonus)
