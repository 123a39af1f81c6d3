"""Results of a step: one vector of integers on the device, which is copied to the host behind the step.

Legend: R decoding requests, S depth, F finished prompts, c prompt rows, T = R (S + 1) + F tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from cluster.device.timing import Timer
from cluster.device.transfers import Landing
from cluster.request import StepTree
from cluster.sampling.sampler import Logprobs, Scores
from cluster.spec.tree import DraftTree
from cluster.spec.verify import Accepted


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """The times at which the device began each phase of a step, and at which it ended the step: `moments` has one
    entry more than `names`.
    """

    timer: Timer
    moments: list[Any]
    names: tuple[str, ...] = ("draft", "target", "extend")

    def seconds(self) -> dict[str, float]:
        """Return the seconds that each phase took."""
        spans = zip(self.names, pairwise(self.moments), strict=True)
        return {name: self.timer.between(*span) for name, span in spans}


@dataclass(frozen=True, slots=True)
class Trees:
    """The trees that a step verified. `packed` int64 `[R, 2 N + S + 1]`: the tokens of each tree's N nodes, their
    parents, and the accepted path. `nodes` is N.
    """

    packed: Tensor
    nodes: int

    @staticmethod
    def of(tree: DraftTree, accepted: Accepted) -> "Trees":
        """Return a copy of the trees of one step."""
        return Trees(torch.cat([tree.tokens, tree.parents, accepted.path], 1), tree.tokens.shape[1])

    def read(self, request: int, tokens: list[int], drafted: int) -> StepTree:
        """Return the tree of decoding request number `request`, for which the step committed `tokens`.

        The first `drafted` nodes are the root and the draft's; a grammar forced the others. Padding is left out.
        """
        numbers: list[int] = self.packed[request].tolist()
        ids, parents, path = numbers[: self.nodes], numbers[self.nodes : 2 * self.nodes], numbers[2 * self.nodes :]
        # Padding comes last, and each padding node is its own parent.
        real = next((node for node in range(1, self.nodes) if parents[node] == node), self.nodes)
        return StepTree(
            token_ids=tuple(ids[:real]),
            parents=tuple(parents[:real]),
            accepted=tuple(path[: len(tokens)]),
            bonus=tokens[-1],
            forced=max(0, real - drafted),
        )


@dataclass(frozen=True, slots=True)
class StepDecisions:
    """The results of a step on the host.

    - `tokens`: S + 1 per request, of which the first `accept_len` are committed. The target's scores of the first
      `finite` tokens are finite.
    - `first`: the token after each finished prompt. `sound`: whether the hidden of each prompt row is finite; for the
      last row of a prompt, whether the score of its `first` is finite too.
    - `logprobs`: those of all T tokens, if a request asked for them.
    - `scores`: log-probabilities and ranks of prompt tokens, if a request asked for them.
    - `seconds`: the duration of each phase.
    - `drawn`: a checksum of the sampling inputs if the head is sharded and a request samples, else empty. Ranks compare
      it, because their tokens are equal even if their inputs differ.
    - `trees`: the verified trees, if a request asked for them.
    - `nodes`: the number of nodes of each tree, without root and padding; None if the trees cannot have padding.
    """

    tokens: list[list[int]]
    accept_len: list[int]
    finite: list[int]
    first: list[int]
    sound: list[bool]
    logprobs: Logprobs | None
    seconds: dict[str, float]
    drawn: list[int] = field(default_factory=list)
    scores: Scores | None = None
    trees: Trees | None = None
    nodes: list[int] | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The results of a step as tensors; see `StepDecisions` for their meaning.

    `packed` int64 is the concatenation of `[R, S + 3]` (`tokens`, `accept_len`, `finite`), `first` `[F]`, `sound` `[c]`
    and `drawn` `[0 or 1]`. If `counted`, the first part has one more column, `nodes`. R is `requests`, S + 1 is
    `width`, F is `finals`, c is `rows`.
    """

    packed: Tensor
    requests: int
    width: int
    finals: int
    rows: int
    logprobs: Logprobs | None
    phases: PhaseTimes
    scores: Scores | None = None
    trees: Trees | None = None
    counted: bool = False

    @staticmethod
    def of(
        tree: DraftTree,
        accepted: Accepted,
        scores: Tensor,
        prompts: tuple[Tensor, Tensor],
        drawn: Tensor,
        logprobs: Logprobs | None,
        phases: PhaseTimes,
    ) -> "StepOutput":
        """Pack the results. `scores` `[R, S + 1]` are those of `accepted.tokens`; `prompts` is (`first`, `sound`)."""
        first, sound = prompts
        # x - x is 0 for finite x, else NaN. The running product is 0 from the first score that is not finite on.
        finite = (scores - scores == 0).cumprod(1).sum(1, keepdim=True)
        nodes = []
        if tree.padded:  # the root and padding nodes are their own parents; count the others
            own = torch.arange(tree.parents.shape[1], device=tree.parents.device)
            nodes = [(tree.parents != own).sum(1, keepdim=True)]
        rows = torch.cat([accepted.tokens, accepted.accept_len[:, None], finite, *nodes], 1)
        packed = torch.cat([rows.view(-1), first, sound, drawn])
        sizes = rows.shape[0], accepted.tokens.shape[1], first.shape[0], sound.shape[0]
        return StepOutput(packed, *sizes, logprobs, phases, counted=tree.padded)

    def each(self, change: Callable[[Tensor], Tensor]) -> "StepOutput":
        """Return a copy with `change` applied to each tensor, always in the same order."""
        logprobs, scores, trees = self.logprobs, self.scores, self.trees
        return replace(
            self,
            packed=change(self.packed),
            logprobs=None if logprobs is None else logprobs.each(change),
            scores=None if scores is None else Scores(scores.logprobs.each(change), change(scores.ranks)),
            trees=None if trees is None else replace(trees, packed=change(trees.packed)),
        )

    def kept(self) -> "StepOutput":
        """Return a copy in new memory: a later replay of the captured program does not overwrite it."""
        return self.each(Tensor.clone)

    def read(self) -> StepDecisions:
        """Unpack the results; the tensors must be in host memory."""
        numbers: list[int] = self.packed.tolist()
        each = self.width + 2 + self.counted
        end = self.requests * each
        rows = [numbers[start : start + each] for start in range(0, end, each)]
        prompts, drawn = numbers[end : end + self.finals + self.rows], numbers[end + self.finals + self.rows :]
        return StepDecisions(
            tokens=[row[: self.width] for row in rows],
            accept_len=[row[self.width] for row in rows],
            finite=[row[self.width + 1] for row in rows],
            nodes=[row[-1] for row in rows] if self.counted else None,
            first=prompts[: self.finals],
            sound=[bool(whole) for whole in prompts[self.finals :]],
            logprobs=self.logprobs,
            seconds=self.phases.seconds(),
            drawn=drawn,
            scores=self.scores,
            trees=self.trees,
        )


class Results:
    """The copy of a step's output to the host, queued on the device behind that step and before the next one."""

    def __init__(self, output: StepOutput) -> None:
        """Start the copy; the step must be queued already."""
        self._output, tensors = output, list[Tensor]()
        output.each(lambda one: tensors.append(one) or one)  # type: ignore[func-returns-value]
        self._landing = Landing(tensors)

    def read(self) -> StepDecisions:
        """Wait until the device has run the step, and return its results. Steps queued behind it run meanwhile."""
        landed = iter(self._landing.wait())
        return self._output.each(lambda _: next(landed)).read()
