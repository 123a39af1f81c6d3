"""Estimates how many tokens each tree would give to the running requests, from what the target has accepted so far.

A tier is the number of a tree shape that steps may use. The outlook is the list of expected tokens by tier. Looked-up
tokens are tokens that followed an earlier occurrence of the end of the text.

The chance that the target accepts a node depends on the node's depth d and on its tree: how many of the likeliest nodes
of each tree the step verifies, and whether the tree has looked-up tokens. One step also shows what many other trees
would have given (`engine/tree_kinds.py`). In particular, a step shows how many looked-up tokens were right, up to the
number of tokens that it committed, even if its trees had no looked-up tokens. So tiers with looked-up tokens need no
exploring.

The estimates are conditional: the share of the trees in which the node of depth d was accepted, among those in which
the node of depth d - 1 was accepted. So a shallow tree does not change the estimates of deeper levels. Trees with
looked-up tokens are an exception: a level that the draft did not compute can count as not accepted (`TreeKinds`). Each
request has estimates of its own, which forget old trees. They begin with the estimates of the request's class, which
count all greedy requests or all sampled ones. Each kind of tree (`TreeKinds`) has estimates of its own.

Legend: R decoding requests, S depth of the largest tree, W kinds of trees.
"""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from cluster.config.tree_shape import TreeShape
from cluster.dp_attention.facts import NO_TIER, TreeVote
from cluster.dp_attention.plan import StepPlan
from cluster.dp_attention.tree_choice import OUTLOOK_UNIT
from cluster.dp_attention.tree_times import NOT_MEASURED, MeasuredStep, TreeTimes
from cluster.engine.observed_step import ObservedStep
from cluster.engine.request_state import RequestState
from cluster.engine.tree_exploring import TreeExploring
from cluster.engine.tree_kinds import ALL_NODES, ROW_YIELD, Bools, Integers, TreeKinds
from cluster.kv.cache import Lease
from cluster.spec.result import AcceptedTree

REQUEST_MEMORY, CLASS_MEMORY = 24.0, 400.0
"""How long the estimates of a request, and of a class, remember: after this many later trees, the weight of a tree has
fallen to 1/e.
"""
CLASS_WEIGHTS = np.array([6.0, 32.0])
"""The estimates of the class of greedy requests, and of that of sampled ones, weigh as much as this many trees of the
request itself. How predictable a request is differs much among greedy requests, because texts of small models run into
loops, and little among sampled ones (docs/log.md).
"""
FIRST_CHANCE = 0.8
"""The chance of every level before the first tree: high, so that trees are tried."""
UPDATE_INTERVAL = 24
"""The estimates are computed anew after this many committed steps with trees, and when the requests change."""
PLAIN_INTERVAL = 4
"""One of this many steps without trees is noted. Such steps only show whether the first looked-up token was right."""
NOTED_TREES, NOTED_CHANGES = 8, 8
"""With more than `NOTED_TREES` requests, not every step with trees is noted: on average about `NOTED_TREES` trees per
step are, because the host needs time to read them. The first `NOTED_CHANGES` steps after a change of the tier are
always noted.
"""
AVERAGED_STEPS, MAX_MEANS = 8, 4
"""The ranks are told the mean time of `AVERAGED_STEPS` steps of one tier and size at once, or of fewer if a step of
another kind follows. At most `MAX_MEANS` means wait for the next vote; older ones are dropped.
"""

Floats = NDArray[np.float64]


class StepAverage:
    """Averages the measured times of steps that follow each other and have the same tier and about the same size. The
    time and the overhead of a step count as at most twice the median of the times: it may have waited for something
    else.
    """

    def __init__(self) -> None:
        self._steps = list[MeasuredStep]()
        self._means = deque[MeasuredStep](maxlen=MAX_MEANS)

    def add(self, step: MeasuredStep) -> None:
        """Add a step."""
        if self._steps:
            last = self._steps[-1]
            if step.tier != last.tier or step.decodes.bit_length() != last.decodes.bit_length():
                self.flush()
        self._steps.append(step)
        if len(self._steps) >= AVERAGED_STEPS:
            self.flush()

    def flush(self) -> None:
        """Begin a new mean: the next step does not follow the last one."""
        steps, self._steps = self._steps, []
        if steps:
            count = len(steps)
            limit_us = 2 * sorted(step.us for step in steps)[(count - 1) // 2]
            us, overhead_us = (
                round(sum(min(value, limit_us) for value in values) / count)
                for values in ([step.us for step in steps], [step.overhead_us for step in steps])
            )
            decodes, context = (
                sum(values) // count for values in zip(*((step.decodes, step.context) for step in steps), strict=True)
            )
            self._means.append(MeasuredStep(steps[0].tier, decodes, us, context, overhead_us, count))

    @property
    def has_means(self) -> bool:
        """Whether there are means that were not taken yet."""
        return bool(self._means)

    def take(self) -> MeasuredStep:
        """Return the oldest mean that was not taken yet, `NOT_MEASURED` if there is none."""
        return self._means.popleft() if self._means else NOT_MEASURED


class TreeOutlook:
    """Keeps the estimates of one rank, and votes for trees."""

    def __init__(
        self,
        tiers: Sequence[TreeShape],
        rows: int,
        times: TreeTimes,
        groups: int = 1,
        price_us: Callable[[StepPlan, int], int] | None = None,
    ) -> None:
        """`rows` is the number of requests that may run. The `groups` attention groups share the time for exploring.
        `price_us` is `Programs.price_us`; None if steps are not captured.
        """
        self._depth = max(1, tiers[-1].num_steps)
        self._is_chain = tiers[-1].topk == 1
        self._steps = np.array([shape.num_steps for shape in tiers])
        self._kinds = TreeKinds(tiers)
        # By tier, the most nodes of a request that are expected to be accepted. The estimates of trees with looked-up
        # tokens are for trees that verify all nodes, so they are too high for tiers that verify only some.
        self._most_accepted = np.array(
            [ROW_YIELD * (s.num_draft_tokens - 1) if s.lookup_tokens and s.selects_nodes else ALL_NODES for s in tiers]
        )
        shape = len(self._kinds.nodes), self._depth
        self._trials, self._hits = np.zeros((rows, *shape)), np.zeros((rows, *shape))
        self._class_trials, self._class_hits = np.ones((2, *shape)), np.full((2, *shape), FIRST_CHANCE)
        self._classes = np.zeros(rows, dtype=np.int64)
        self._pending: list[tuple[int, int, AcceptedTree]] = []
        self._steps_since_update = self._plain_steps = self._steps_since_choice = self._unnoted_trees = 0
        self._key: tuple[int, ...] | None = None  # the rows of the last vote; None if estimates have changed since
        self._outlook: tuple[int, ...] = ()
        self._exploring = TreeExploring(tiers, times, groups, self._capture_us)
        self._average = StepAverage()
        self._unread = list[ObservedStep]()
        self._vote = TreeVote(0)  # the last vote, without `explores` and `measured`
        self._last_tier, self._changed_steps = 0, 0  # steps that are noted because the tier has changed
        self._context = 0  # of the last step, as in `TreeCosts.of`
        self._plan_price_us = price_us
        self._plan: StepPlan | None = None  # of the last step that was read

    def admit(self, row: int, sampled: bool) -> None:
        """Forget the estimates of table row `row`, because another request begins to use it. `sampled` is its class."""
        self._read()  # steps that were not read yet belong to the request before
        self._learn()
        self._trials[row] = self._hits[row] = 0.0
        self._classes[row] = sampled
        self._key = None

    def add(self, step: ObservedStep) -> None:
        """Keep a committed step. The outlook reads it together with later steps, or before the next change of the
        requests.
        """
        self._unread.append(step)
        if len(self._unread) >= AVERAGED_STEPS:
            self._read()

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        for step in unread:
            self._plan = step.step.plan
            is_noted = bool(step.entries) and self.notes(step.tier, len(step.entries))
            paths = step.paths() if is_noted else ()
            self.observe(step.vote, step.measured, step.counts, paths, step.is_typical)

    def notes(self, tier: int, decodes: int) -> bool:
        """Whether `observe` takes the accepted paths of a step of this tier, with `decodes` requests. Call this once
        for each step, before `observe`.
        """
        if tier != self._last_tier:
            self._last_tier, self._changed_steps = tier, NOTED_CHANGES
        if self._steps[tier]:
            self._changed_steps -= 1
            self._unnoted_trees = min(self._unnoted_trees, decodes) + NOTED_TREES
            if self._unnoted_trees < decodes and self._changed_steps < 0:
                return False
            self._unnoted_trees = max(0, self._unnoted_trees - decodes)
            return True
        self._plain_steps = (self._plain_steps + 1) % PLAIN_INTERVAL
        return self._kinds.has_lookups and not self._plain_steps

    def observe(
        self,
        vote: TreeVote,
        step: MeasuredStep,
        counts: Sequence[int],
        accepted: Sequence[tuple[int, AcceptedTree]] = (),
        is_typical: bool = True,
    ) -> None:
        """Take the results of `step`; `vote` was this rank's vote, and `counts` are the tokens of each request. If
        `notes` said so, `accepted` has for each request its table row and its accepted path. `is_typical` says that the
        step took about what every step of its tier and size takes.
        """
        self._context = step.context
        if is_typical:
            self._average.add(step)
        else:
            self._average.flush()
        if accepted:
            self._pending += [(row, step.tier, path) for row, path in accepted]
        if accepted or self._steps[step.tier]:
            self._steps_since_update += 1
        self._steps_since_choice += 1
        if counts:
            self._exploring.observe(vote, step, sum(counts))

    def vote(self, decodes: Sequence[tuple[RequestState, Lease]], max_tier: int) -> TreeVote:
        """Return the vote for a step in which the requests `decodes` decode. While the requests stay the same, it is
        the last vote, as long as only a few steps were added since, and nothing is explored or reported.
        """
        key = tuple(lease.row for _, lease in decodes)
        if (
            self._unread
            and key == self._key
            and max_tier == self._vote.max_tier
            and not (self._exploring.is_exploring or self._average.has_means)
        ):
            return self._vote
        self._read()
        if key != self._key:
            self._exploring.stop()
        is_new = key != self._key or self._steps_since_update >= UPDATE_INTERVAL
        if is_new:
            self._learn()
            self._key, self._outlook = key, self._expected(key)
        if key and (is_new or self._steps_since_choice >= UPDATE_INTERVAL):
            self._exploring.choose(len(key), self._context, self._outlook, max_tier)
            self._steps_since_choice = 0
        explores = self._exploring.next_tier(len(key), max_tier) if key else NO_TIER
        self._vote = TreeVote(max_tier, self._outlook)
        return self._vote._replace(explores=explores, measured=self._average.take())

    def _capture_us(self, tier: int) -> int:
        """Return the time of a capture in microseconds if a step with the sizes of the last step, and with `tier`, has
        no captured program yet. Otherwise return 0.
        """
        return 0 if self._plan is None or self._plan_price_us is None else self._plan_price_us(self._plan, tier)

    def _expected(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Return `OUTLOOK_UNIT` times the tokens that requests in table rows `rows` are expected to get, by tier."""
        index = np.array(rows, dtype=np.int64)
        classes = self._classes[index]
        chances = self._class_hits[classes] / self._class_trials[classes]
        weights = CLASS_WEIGHTS[classes][:, None, None]
        chances = (self._hits[index] + weights * chances) / (self._trials[index] + weights)
        # E(tokens) = 1 + sum over d of P(the node of depth d is accepted), a product of conditional chances.
        totals = np.zeros((len(self._kinds.nodes), self._depth + 1))
        totals[:, 1:] = chances.cumprod(2).sum(0).cumsum(1)
        # Do not verify only a part of a single chain: a tier that drafts only that part gives the same for less.
        if self._is_chain and len(rows) == 1:
            totals[(self._kinds.nodes < ALL_NODES) & ~self._kinds.looks_up] = 0
        expected = len(rows) + np.minimum(
            totals[self._kinds.kind_of_tier, self._steps], len(rows) * self._most_accepted
        )
        return tuple((OUTLOOK_UNIT * expected).astype(np.int64).tolist())

    def _learn(self) -> None:
        """Take the noted trees into the estimates."""
        pending, self._pending, self._steps_since_update = self._pending, [], 0
        if not pending:
            return
        rows, tiers = np.array([row for row, _, _ in pending]), np.array([tier for _, tier, _ in pending])
        tried, hit = self._kinds.read(tiers, [path for _, _, path in pending])
        self._add(self._trials, self._hits, rows, tried, hit, REQUEST_MEMORY)
        self._add(self._class_trials, self._class_hits, self._classes[rows], tried, hit, CLASS_MEMORY)

    @staticmethod
    def _add(trials: Floats, hits: Floats, index: Integers, tried: Bools, hit: Bools, memory: float) -> None:
        new_trials, new_hits = np.zeros_like(trials), np.zeros_like(hits)
        # Sort the trees by row, so that `reduceat` can add up those of a row. `np.add.at` would take ten times as long.
        order = np.argsort(index, kind="stable")
        rows, starts = np.unique(index[order], return_index=True)
        new_trials[rows] = np.add.reduceat(tried[order].astype(np.float64), starts)
        new_hits[rows] = np.add.reduceat(hit[order].astype(np.float64), starts)
        kept = np.exp(-new_trials / memory)
        trials *= kept
        hits *= kept
        trials += new_trials
        hits += new_hits
