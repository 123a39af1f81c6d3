"""What a step decided: one row of numbers on the device, read by the host in one copy.

Legend: R decoding requests, S depth, F finished prompts, c prompt rows, T = R (S + 1) + F tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.forward.choose import Logprobs
from cluster.spec.verify import Accepted


@dataclass(frozen=True, slots=True)
class Decided:
    """A step's decisions on the host.

    `tokens` are S + 1 for each request, of which `accept_len` were accepted; from number `finite` on the target's
    logits were not finite. `first` are the tokens after finished prompts, `sound` says of each prompt row whether its
    hidden and, after a finished prompt, the score of `first` are finite. `logprobs` are those of T tokens, where asked.
    """

    tokens: list[list[int]]
    accept_len: list[int]
    finite: list[int]
    first: list[int]
    sound: list[bool]
    logprobs: Logprobs | None
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The same on the device: `packed` int64 `[R (S + 3) + F + c]`, the first part `[R, S + 3]` by request."""

    packed: Tensor
    requests: int
    width: int
    finals: int
    logprobs: Logprobs | None
    seconds: dict[str, float]

    @staticmethod
    def of(
        accepted: Accepted,
        scores: Tensor,
        prompts: tuple[Tensor, Tensor],
        logprobs: Logprobs | None,
        seconds: dict[str, float],
    ) -> "StepOutput":
        """`scores` `[R, S + 1]` are those of the accepted tokens; `prompts` are `first` `[F]` and `sound` `[c]`."""
        first, sound = prompts
        finite = scores.isfinite().to(torch.int64).cumprod(1).sum(1, keepdim=True)
        rows = torch.cat([accepted.tokens, accepted.accept_len[:, None], finite], 1)
        packed = torch.cat([rows.view(-1), first, sound.to(torch.int64)])
        return StepOutput(packed, rows.shape[0], accepted.tokens.shape[1], first.shape[0], logprobs, seconds)

    def read(self) -> Decided:
        """Wait for the device, and copy."""
        numbers: list[int] = self.packed.tolist()
        each, end = self.width + 2, self.requests * (self.width + 2)
        rows = [numbers[start : start + each] for start in range(0, end, each)]
        prompts = numbers[end:]
        return Decided(
            tokens=[row[: self.width] for row in rows],
            accept_len=[row[-2] for row in rows],
            finite=[row[-1] for row in rows],
            first=prompts[: self.finals],
            sound=[bool(whole) for whole in prompts[self.finals :]],
            logprobs=self.logprobs,
            seconds=self.seconds,
        )
