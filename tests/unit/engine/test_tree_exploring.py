"""Exploring finds better trees, costs little, and recovers from what it has cost."""

from collections.abc import Sequence

import pytest

from cluster.config.tree_shape import TreeShape, tiers
from cluster.dp_attention.facts import NO_TIER, TreeVote
from cluster.dp_attention.tree_choice import OUTLOOK_UNIT, LastTree, choose_tier
from cluster.dp_attention.tree_times import MeasuredStep, TreeCosts, TreeTimes
from cluster.engine.tree_exploring import CREDIT_STEPS, EXPLORED_SHARE, EXPLORED_STEPS, MAX_SAVED, TreeExploring

SHAPES = tuple(
    shape for shape in tiers(TreeShape(num_steps=3, topk=1, num_draft_tokens=4), share_rows=True)
    if not shape.selects_nodes
)  # fmt: skip
TRUE_US = (1000, 1500, 2000, 2500)
WAKING_US = 2000


class SimulatedEngine:
    """Requests that get `tokens[tier]` tokens a step, on a machine on which steps take `TRUE_US`. At start, the times
    `measured_us` were measured. The first step of a tier takes `capture_us` longer, except without trees.
    """

    def __init__(
        self, measured_us: Sequence[int], tokens: Sequence[float], groups: int = 1, capture_us: int = 0
    ) -> None:
        self.times = TreeTimes(TreeCosts((1,), tuple((us,) for us in measured_us), (WAKING_US,)))
        self.exploring = TreeExploring(SHAPES, self.times, groups, self.price_us)
        self.tokens, self.last = list(tokens), LastTree()
        self.tiers, self.explored, self.us, self.given = list[int](), list[int](), 0.0, 0.0
        self.captured, self.capture_us = {0}, capture_us

    def price_us(self, tier: int) -> int:
        """As `Programs.price_us`."""
        return 0 if tier in self.captured else self.capture_us

    def run(self, steps: int, max_tier: int = 3, more_us: float = 0.0, obeys: bool = True) -> None:
        """Run steps. Explored steps take `more_us` longer. If not `obeys`, no step has the tier that is explored."""
        for i in range(steps):
            outlook = [round(OUTLOOK_UNIT * tokens) for tokens in self.tokens]
            if i % 16 == 0:
                self.exploring.choose(1, 0, outlook, max_tier)
            explores = self.exploring.next_tier(1, max_tier)
            is_exploring = explores != NO_TIER and obeys
            chosen = choose_tier(self.times.of(1)[: max_tier + 1], [outlook], self.last).tier
            tier = explores if is_exploring else chosen
            wakes = self.last.rests and tier > 0
            tier, us = (0, WAKING_US) if wakes else (tier, TRUE_US[tier])
            self.last = LastTree(self.last.tier if is_exploring or wakes else tier, tier == 0 and not wakes)
            us = round(us + more_us * is_exploring + self.price_us(tier))
            is_typical = not (wakes or self.price_us(tier))
            self.captured.add(tier)
            self.tiers.append(tier)
            self.explored.append(explores)
            self.us, self.given = self.us + us, self.given + self.tokens[tier]
            step = MeasuredStep(tier, 1, us)
            self.exploring.observe(
                TreeVote(max_tier, tuple(outlook), explores=explores), step, round(self.tokens[tier])
            )
            if is_typical:
                self.times.observe(step)

    @property
    def rate(self) -> float:
        """Tokens per microsecond."""
        return self.given / self.us


def test_a_rival_that_was_measured_too_slow_is_found() -> None:
    engine = SimulatedEngine((1000, 1500, 2000 * 1.3, 2500), (1, 2, 4, 4))
    engine.run(600)
    assert engine.times.of(1)[2] == pytest.approx(2000, rel=0.1)
    engine.run(400)
    assert set(engine.tiers[-100:]) - {2} == set() or engine.tiers[-100:].count(2) > 80


def test_a_tree_in_use_that_was_measured_too_fast_is_left() -> None:
    engine = SimulatedEngine((1000, 1500, 2000 * 0.7, 2500), (1, 2, 2, 2))
    engine.run(600)
    assert engine.tiers[-200:].count(1) > 170


def test_exploring_rivals_costs_no_more_than_the_credit_and_its_share() -> None:
    tokens = (1, 1.3, 1.6, 1.9)  # all trees are about a tenth worse than none
    engine = SimulatedEngine(TRUE_US, tokens)
    engine.run(20_000)
    lost_us = engine.us - engine.given * TRUE_US[0]
    exploration_us = EXPLORED_STEPS * TRUE_US[3] + WAKING_US
    assert 0 < lost_us < CREDIT_STEPS * TRUE_US[0] + 2 * EXPLORED_SHARE * engine.us + 2 * exploration_us
    assert {1, 2, 3} & set(engine.explored[-10_000:]), "exploring goes on"


def test_exploring_pays_for_captures() -> None:
    """A capture takes the time of 15 steps without trees. The credit for exploring is the time of 20 such steps."""
    tokens, capture_us = (1, 1.3, 1.6, 1.9), 15 * TRUE_US[0]  # all trees are about a tenth worse than none
    engine = SimulatedEngine(TRUE_US, tokens, capture_us=capture_us)
    engine.run(600)
    assert engine.captured == {0}, "2% of the time are released from the credit"
    engine.run(900)
    assert len(engine.captured) == 2
    engine.run(20_000)
    lost_us = engine.us - engine.given * TRUE_US[0]
    exploration_us = EXPLORED_STEPS * TRUE_US[3] + WAKING_US + capture_us
    assert lost_us < CREDIT_STEPS * TRUE_US[0] + EXPLORED_SHARE * engine.us + exploration_us
    assert engine.captured == {0, 1, 2, 3} or max(engine.explored[-10_000:]) != NO_TIER, "exploring goes on"


def test_a_tier_that_needs_a_capture_by_now_is_not_explored_at_the_old_price() -> None:
    engine = SimulatedEngine(TRUE_US, (1, 1.3, 1.6, 1.9))
    explored = list[int]()
    for _ in range(500):  # another group's requests come and go, so that the program exists when the tier is chosen
        engine.exploring.choose(1, 0, (1000, 1300, 1600, 1900), 3)
        engine.capture_us = 50_000
        explored.append(engine.exploring.next_tier(1, 3))
        engine.capture_us = 0
        step = MeasuredStep(0, 1, TRUE_US[0])
        engine.exploring.observe(TreeVote(3, (1000, 1300, 1600, 1900), explores=explored[-1]), step, 1)
    assert set(explored) == {NO_TIER}


def test_after_an_exploration_without_trees_the_tree_in_use_comes_back() -> None:
    engine = SimulatedEngine(TRUE_US, (1, 1.53, 1.6, 1.7))  # a chain of one is 2% better than none
    engine.last = LastTree(1)
    engine.run(3000)
    assert 0 in engine.explored
    assert engine.tiers.count(1) > 0.9 * len(engine.tiers)


def test_the_balance_recovers_from_steps_that_stalled() -> None:
    engine = SimulatedEngine(TRUE_US, (1, 1.3, 1.6, 1.9))
    engine.run(200, more_us=10_000_000)
    assert engine.exploring._saved_us >= -MAX_SAVED * engine.exploring._price_us
    engine.explored.clear()
    engine.run(20_000)
    assert len(engine.explored) - engine.explored.count(NO_TIER) >= EXPLORED_STEPS


def test_deeper_trees_are_explored_too_while_there_is_a_rival() -> None:
    engine = SimulatedEngine(TRUE_US, (1, 1.53, 1.1, 1.1))  # none is nearly as good as a chain of one
    engine.run(40_000)
    assert {0, 3} <= set(engine.explored)


def test_steps_that_have_another_tree_than_the_one_to_explore_cost_nothing() -> None:
    engine = SimulatedEngine(TRUE_US, (1, 1.4, 1.7, 2.0))
    engine.run(1000, obeys=False)
    exploring = engine.exploring
    assert exploring._credits_us[1] + exploring._released_us == pytest.approx(CREDIT_STEPS * TRUE_US[0])


def test_no_tier_beyond_the_allowed_ones_is_explored_or_compared_with() -> None:
    engine = SimulatedEngine(TRUE_US, (1, 1.6, 3, 6))
    engine.run(2000, max_tier=1)
    assert set(engine.explored) <= {NO_TIER, 0, 1} and engine.tiers[-100:].count(1) > 80


def test_groups_share_the_credit() -> None:
    engine = SimulatedEngine(TRUE_US, (1, 1.4, 1.7, 2.0), groups=4)
    engine.exploring.choose(1, 0, (1000, 1400, 1700, 2000), 3)
    assert engine.exploring._credits_us[1] == CREDIT_STEPS * TRUE_US[0] / 4
