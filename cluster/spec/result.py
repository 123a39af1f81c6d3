"""Results of a step: one vector of integers on the device, and the tensors that only some requests ask for. They are
copied to the host after the step.

Legend: R decoding requests, S depth, F finished prompts, c prompt rows, T = R (S + 1) + F tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cluster.device.timing import Timer
from cluster.device.transfers import HostCopies
from cluster.request import StepTree
from cluster.sampling.sampler import Logprobs, Scores
from cluster.spec.tree import NO_TOKEN, DraftTree
from cluster.spec.verify import Accepted


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """The times at which the device began each phase of a step, and at which it ended the step: `timestamps` has one
    entry more than `names`.
    """

    timer: Timer
    timestamps: list[Any]
    names: tuple[str, ...] = ("draft", "target", "extend")

    def seconds(self) -> dict[str, float]:
        """Return the seconds that each phase took."""
        spans = zip(self.names, pairwise(self.timestamps), strict=True)
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
        """Return the trees of one step, copied into one tensor."""
        return Trees(torch.cat([tree.tokens, tree.parents, accepted.path], 1), tree.tokens.shape[1])

    def read(self, request: int, tokens: list[int], drafted_nodes: int) -> StepTree:
        """Return the tree of decoding request number `request`, for which the step committed `tokens`.

        The first `drafted_nodes` nodes are the root and the nodes that draft and lookup proposed. The others are nodes
        for tokens that a grammar forces. Padding and nodes that were not verified are left out.
        """
        values: list[int] = self.packed[request].tolist()
        token_ids, parents, path = values[: self.nodes], values[self.nodes : 2 * self.nodes], values[2 * self.nodes :]
        # Each padding node is its own parent.
        kept = [0, *(i for i in range(1, self.nodes) if parents[i] != i and token_ids[i] != NO_TOKEN)]
        number_of = {node: number for number, node in enumerate(kept)}
        return StepTree(
            token_ids=tuple(token_ids[node] for node in kept),
            parents=tuple(number_of[parents[node]] for node in kept),
            accepted=tuple(number_of[node] for node in path[: len(tokens)]),
            bonus=tokens[-1],
            forced=sum(node >= drafted_nodes for node in kept),
        )


class PathFacts(NamedTuple):
    """What the host is told about accepted paths besides their tokens.

    `ranks` `[R, S + 1]` are the ranks of the nodes of each path, as in `NodeSelection`. It is None if requests do not
    share rows. `agreeing` `[R]` counts, for each request, the looked-up tokens (those that followed the same text
    earlier) that equal the committed tokens (`lookup.count_agreeing`). It is None if nothing is looked up. `drafted`
    `[R]` counts the drafted nodes of each path, without the root. It is None if the trees have no looked-up nodes.
    """

    ranks: Tensor | None = None
    agreeing: Tensor | None = None
    drafted: Tensor | None = None


NO_FACTS = PathFacts()


class AcceptedTree(NamedTuple):
    """The accepted path of one request: the `ranks` of its nodes without the root, in order of depth (see `PathFacts`);
    how many of these nodes are `drafted`; how many looked-up tokens are `agreeing` with the committed tokens.
    """

    ranks: Sequence[int]
    drafted: int
    agreeing: int = 0


@dataclass(slots=True)
class StepOutput:
    """The results of a step. The tensors are on the device. The output that `read` returns has the tensors in host
    memory, and the integers of `packed` in the list `values`.

    `packed` int64 holds, for each of the R decoding requests, `tokens`, `accept_len`, `finite`, (only if
    `has_node_counts`) `nodes`, (if `lookup_columns` is 1 or 2) `agreeing`, (if it is 2) `drafted`, and (only if
    `has_ranks`) `ranks`. Then come `first_tokens` `[F]`, `finite_rows` `[c]` and `inputs_checksum` `[0 or 1]`. R is
    `requests`, S + 1 is `path_length`, F is `final_prompts`, c is `prompt_rows`.

    - `tokens`: S + 1 per request, of which the first `accept_len` are committed. The target's scores of the first
      `finite` tokens are finite. `nodes`: how many nodes of the tree could be accepted, without the root.
      `agreeing`, `drafted`: as in `PathFacts`. `ranks`: S + 1 per request, the ranks of the nodes on the accepted path,
      as in `NodeSelection`; the first `accept_len` are valid.
    - `first_tokens`: the token after each finished prompt. `finite_rows`: whether the hidden of each prompt row is
      finite; for the last row of a prompt, whether the score of its first token is finite too.
    - `inputs_checksum`: a checksum of the sampling inputs if the head is sharded and a request samples, else empty.
      Ranks compare it, because their tokens are equal even if their inputs differ.
    - `logprobs`: the log-probabilities of all T tokens; `scores`: the log-probabilities and ranks of prompt tokens;
      `trees`: the verified trees. Each is None if no request asked for it.
    """

    packed: Tensor
    requests: int
    path_length: int
    final_prompts: int
    prompt_rows: int
    phases: PhaseTimes
    has_node_counts: bool = False
    has_ranks: bool = False
    lookup_columns: int = 0
    logprobs: Logprobs | None = None
    scores: Scores | None = None
    trees: Trees | None = None
    values: list[int] = field(default_factory=list)
    host_copy: HostCopies | None = None

    @staticmethod
    def of(
        tree: DraftTree,
        accepted: Accepted,
        scores: Tensor,
        prompts: tuple[Tensor, Tensor, Tensor],
        phases: PhaseTimes,
        facts: PathFacts = NO_FACTS,
    ) -> "StepOutput":
        """Return the output of a step. `scores` `[R, S + 1]` are the target's scores of `accepted.tokens`; `prompts`
        are (`first_tokens`, `finite_rows`, `inputs_checksum`).
        """
        # x - x is 0 for finite x, else NaN. The running product is 0 from the first score that is not finite on.
        finite = (scores - scores == 0).cumprod(1).sum(1, keepdim=True)
        node_counts = tree.node_counts() if tree.padded or tree.masked else None
        lookups = [column[:, None] for column in (facts.agreeing, facts.drafted) if column is not None]
        columns = [accepted.tokens, accepted.accept_len[:, None], finite, node_counts, *lookups, facts.ranks]
        request_rows = torch.cat([column for column in columns if column is not None], 1)
        sizes = request_rows.shape[0], accepted.tokens.shape[1], prompts[0].shape[0], prompts[1].shape[0]
        packed = torch.cat([request_rows.view(-1), *prompts])
        flags = node_counts is not None, facts.ranks is not None, len(lookups)
        return StepOutput(packed, *sizes, phases, *flags)

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "StepOutput":
        """Return a copy with `change` applied to each tensor, always in the same order."""
        logprobs, scores, trees = self.logprobs, self.scores, self.trees
        return replace(
            self,
            packed=change(self.packed),
            logprobs=None if logprobs is None else logprobs.map_tensors(change),
            scores=None if scores is None else Scores(scores.logprobs.map_tensors(change), change(scores.ranks)),
            trees=None if trees is None else replace(trees, packed=change(trees.packed)),
        )

    def clone(self) -> "StepOutput":
        """Return a copy in new memory, which later replays of a captured program do not overwrite."""
        return self.map_tensors(Tensor.clone)

    def start_copy(self) -> "StepOutput":
        """Queue the copy of the results to the host, and return this output. Call it after this step was queued, and
        before the next step is queued.
        """
        tensors = list[Tensor]()
        self.map_tensors(lambda tensor: tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
        self.host_copy = HostCopies(tensors)
        return self

    def read(self) -> "StepOutput":
        """Wait until the device has run the step, and return its results on the host. Steps queued behind it run
        meanwhile. Without `start_copy` the tensors must be in host memory already.
        """
        output = self
        if self.host_copy is not None:
            host_tensors = iter(self.host_copy.wait())
            output = self.map_tensors(lambda _: next(host_tensors))
        output.values = output.packed.tolist()
        return output

    def drop_tensors(self) -> None:
        """Give up the tensors of an output that was read and committed; `values` stay. The host may keep the output for
        some steps (`ObservedStep`), but its memory, which on a GPU is pinned, is needed for the next steps.
        """
        self.packed, self.host_copy = self.packed[:0], None
        self.logprobs = self.scores = self.trees = None

    def decode_result(self, request: int) -> tuple[list[int], int, int, int | None]:
        """Return `tokens`, `accept_len`, `finite` and `nodes` of a decoding request; `nodes` is None if not counted."""
        path_length, start = self.path_length, request * self._row_width
        row = self.values[start : start + path_length + 2 + self.has_node_counts]
        return row[:path_length], row[path_length], row[path_length + 1], row[-1] if self.has_node_counts else None

    def accepted_tree(self, request: int, accept_len: int) -> AcceptedTree:
        """Return the accepted path of a decoding request; `accept_len` is as in `decode_result`. If requests do not
        share rows, the ranks of the nodes are their depths. Without looked-up nodes, all nodes are drafted; without a
        lookup, `agreeing` is 0.
        """
        end = (request + 1) * self._row_width
        ranks: Sequence[int] = range(1, accept_len)
        if self.has_ranks:
            end -= self.path_length
            ranks = self.values[end + 1 : end + accept_len]
        agreeing, drafted = (*self.values[end - self.lookup_columns : end], *(0, accept_len - 1)[self.lookup_columns :])
        return AcceptedTree(ranks, drafted, agreeing)

    @property
    def _row_width(self) -> int:
        """How many integers `packed` has per decoding request."""
        return self.path_length * (1 + self.has_ranks) + 2 + self.has_node_counts + self.lookup_columns

    @property
    def prompt_results(self) -> tuple[list[int], list[int], list[int]]:
        """The lists `first_tokens`, `finite_rows` and `inputs_checksum`."""
        start = self.requests * self._row_width
        prompt_values, checksum_index = self.values[start:], self.final_prompts + self.prompt_rows
        return (
            prompt_values[: self.final_prompts],
            prompt_values[self.final_prompts : checksum_index],
            prompt_values[checksum_index:],
        )
