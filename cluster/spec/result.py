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


@dataclass(slots=True)
class StepOutput:
    """The results of a step: tensors on the device; after `read`, in host memory, with `numbers` as integers.

    `packed` int64 holds `tokens`, `accept_len`, `finite` and, if `counted`, `nodes` of each of the R decoding requests,
    then `first` `[F]`, `sound` `[c]` and `drawn` `[0 or 1]`. R is `requests`, S + 1 `width`, F `finals`, c `rows`.

    - `tokens`: S + 1 per request, of which the first `accept_len` are committed. The target's scores of the first
      `finite` tokens are finite. `nodes`: the number of nodes of the tree, without root and padding.
    - `first`: the token after each finished prompt. `sound`: whether the hidden of each prompt row is finite; for the
      last row of a prompt, whether the score of its `first` is finite too.
    - `drawn`: a checksum of the sampling inputs if the head is sharded and a request samples, else empty. Ranks compare
      it, because their tokens are equal even if their inputs differ.
    - `logprobs`: those of all T tokens; `scores`: log-probabilities and ranks of prompt tokens; `trees`: the verified
      trees. Each is None if no request asked for it.
    """

    packed: Tensor
    requests: int
    width: int
    finals: int
    rows: int
    phases: PhaseTimes
    counted: bool = False
    logprobs: Logprobs | None = None
    scores: Scores | None = None
    trees: Trees | None = None
    numbers: list[int] = field(default_factory=list)
    landing: Landing | None = None

    @staticmethod
    def of(
        tree: DraftTree, accepted: Accepted, scores: Tensor, prompts: tuple[Tensor, Tensor, Tensor], phases: PhaseTimes
    ) -> "StepOutput":
        """Pack the results. `scores` `[R, S + 1]` are those of `accepted.tokens`; `prompts` is (`first`, `sound`,
        `drawn`).
        """
        # x - x is 0 for finite x, else NaN. The running product is 0 from the first score that is not finite on.
        finite = (scores - scores == 0).cumprod(1).sum(1, keepdim=True)
        nodes = []
        if tree.padded:  # the root and padding nodes are their own parents; count the others
            own = torch.arange(tree.parents.shape[1], device=tree.parents.device)
            nodes = [(tree.parents != own).sum(1, keepdim=True)]
        rows = torch.cat([accepted.tokens, accepted.accept_len[:, None], finite, *nodes], 1)
        sizes = rows.shape[0], accepted.tokens.shape[1], prompts[0].shape[0], prompts[1].shape[0]
        return StepOutput(torch.cat([rows.view(-1), *prompts]), *sizes, phases, tree.padded)

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

    def start_copy(self) -> "StepOutput":
        """Queue the copy to the host, behind the step and before the next one. The step must be queued already."""
        tensors = list[Tensor]()
        self.each(lambda one: tensors.append(one) or one)  # type: ignore[func-returns-value]
        self.landing = Landing(tensors)
        return self

    def read(self) -> "StepOutput":
        """Wait until the device has run the step, and return its results on the host. Steps queued behind it run
        meanwhile. Without `start_copy` the tensors must be in host memory already.
        """
        output = self
        if self.landing is not None:
            landed = iter(self.landing.wait())
            output = self.each(lambda _: next(landed))
        output.numbers = output.packed.tolist()
        return output

    def decoded(self, request: int) -> tuple[list[int], int, int, int | None]:
        """Return `tokens`, `accept_len`, `finite` and `nodes` of a decoding request; `nodes` is None if not counted."""
        width = self.width
        row = self.numbers[request * (width + 2 + self.counted) : (request + 1) * (width + 2 + self.counted)]
        return row[:width], row[width], row[width + 1], row[-1] if self.counted else None

    @property
    def prompts(self) -> tuple[list[int], list[int], list[int]]:
        """The lists `first`, `sound` and `drawn`."""
        start = self.requests * (self.width + 2 + self.counted)
        rest, ends = self.numbers[start:], self.finals + self.rows
        return rest[: self.finals], rest[self.finals : ends], rest[ends:]
