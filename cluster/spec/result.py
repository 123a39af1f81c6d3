"""What a step decided: one row of numbers on the device, copied to the host behind the step.

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
    """When the device came to the step's phases, and to its end."""

    timer: Timer
    moments: list[Any]
    names: tuple[str, ...] = ("draft", "target", "extend")

    def seconds(self) -> dict[str, float]:
        """What each took."""
        spans = zip(self.names, pairwise(self.moments), strict=True)
        return {name: self.timer.between(*span) for name, span in spans}


@dataclass(frozen=True, slots=True)
class Trees:
    """The trees that a step verified, on the device: `packed` int64 `[R, 2 N + S + 1]` are the tokens and parents of
    each tree's N nodes, and its accepted path.
    """

    packed: Tensor
    nodes: int

    @staticmethod
    def of(tree: DraftTree, accepted: Accepted) -> "Trees":
        """Those of one step, in memory of their own."""
        return Trees(torch.cat([tree.tokens, tree.parents, accepted.path], 1), tree.tokens.shape[1])

    def read(self, request: int, tokens: list[int], drafted: int) -> StepTree:
        """The tree of decoding request `request`, to which the step gave `tokens`; its first `drafted` nodes are the
        draft's and the root. Nodes that only fill the shape are left out.
        """
        numbers: list[int] = self.packed[request].tolist()
        ids, parents, path = numbers[: self.nodes], numbers[self.nodes : 2 * self.nodes], numbers[2 * self.nodes :]
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
    """A step's decisions on the host.

    `tokens` are S + 1 for each request, of which `accept_len` were accepted; from number `finite` on the target's
    logits were not finite. `first` are the tokens after finished prompts, `sound` says of each prompt row whether its
    hidden and, after a finished prompt, the score of `first` are finite. `logprobs` are those of T tokens, where asked,
    `scores` those of the tokens after the prompt rows that are scored.
    `drawn` is a checksum of how they were drawn, where ranks made one choice together and so cannot tell by its tokens.
    `trees` are there where a request asked for its own. `nodes` says how many nodes but the root each tree had, where
    some only filled the shape; else all had as many as the shape has.
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
    """The same as tensors: `packed` int64 `[R (S + 3) + F + c]`, its first part `[R, S + 3]`; then `drawn`. With
    `counted` that part has one number more of each request, `nodes`.
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
        """`scores` `[R, S + 1]` are those of the accepted tokens; `prompts` are `first` `[F]` and `sound` `[c]`."""
        first, sound = prompts
        finite = (scores - scores == 0).cumprod(1).sum(1, keepdim=True)
        nodes = []
        if tree.padded:  # what fills the shape is its own parent, as the root is
            own = torch.arange(tree.parents.shape[1], device=tree.parents.device)
            nodes = [(tree.parents != own).sum(1, keepdim=True)]
        rows = torch.cat([accepted.tokens, accepted.accept_len[:, None], finite, *nodes], 1)
        packed = torch.cat([rows.view(-1), first, sound, drawn])
        sizes = rows.shape[0], accepted.tokens.shape[1], first.shape[0], sound.shape[0]
        return StepOutput(packed, *sizes, logprobs, phases, counted=tree.padded)

    def each(self, change: Callable[[Tensor], Tensor]) -> "StepOutput":
        """The same with another tensor in place of each, always in the same order."""
        logprobs, scores, trees = self.logprobs, self.scores, self.trees
        return replace(
            self,
            packed=change(self.packed),
            logprobs=None if logprobs is None else logprobs.each(change),
            scores=None if scores is None else Scores(scores.logprobs.each(change), change(scores.ranks)),
            trees=None if trees is None else replace(trees, packed=change(trees.packed)),
        )

    def kept(self) -> "StepOutput":
        """The same in memory of its own, which no later replay overwrites."""
        return self.each(Tensor.clone)

    def read(self) -> StepDecisions:
        """What it says, if it lies in the host's memory."""
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
    """The output of a step on its way to the host, begun behind that step and before the next."""

    def __init__(self, output: StepOutput) -> None:
        """The step has been queued."""
        self._output, tensors = output, list[Tensor]()
        output.each(lambda one: tensors.append(one) or one)  # type: ignore[func-returns-value]
        self._landing = Landing(tensors)

    def read(self) -> StepDecisions:
        """Wait for the device to have run the step; steps queued meanwhile go on."""
        landed = iter(self._landing.wait())
        return self._output.each(lambda _: next(landed)).read()
