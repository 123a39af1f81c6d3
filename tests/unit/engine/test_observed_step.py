"""Committed steps reach the choice among trees, a few at a time, and nothing of them is lost."""

from types import SimpleNamespace
from typing import Any

import pytest

from cluster.batch import ExtendMode
from cluster.config.tree_shape import TreeShape, tiers
from cluster.dp_attention.facts import NO_TIER, TreeVote
from cluster.dp_attention.tree_times import MeasuredStep, TreeCosts, TreeTimes
from cluster.engine.observed_step import ObservedStep
from cluster.engine.tree_outlook import AVERAGED_STEPS, UPDATE_INTERVAL, TreeOutlook
from cluster.observability.step_stats import REPLAY
from cluster.spec.result import AcceptedTree

CHAIN = tuple(
    shape for shape in tiers(TreeShape(num_steps=3, topk=1, num_draft_tokens=4), share_rows=True)
    if not shape.selects_nodes
)  # fmt: skip
COSTS = TreeCosts((1, 8), ((100, 200), (130, 420), (150, 640), (170, 860)), (150, 500))


def decodes_of(*rows: int) -> list[Any]:
    return [(None, SimpleNamespace(row=row)) for row in rows]


def committed(vote: TreeVote, accepted: dict[int, int], tier: int = 3, **changes: Any) -> ObservedStep:
    """A step of 10 ms in which the request of each table row had so many accepted nodes. Scheduling took 1 ms of it,
    the agreement 2 ms. `changes` replace fields of the plan, `since_last_s`, `overlaps`, or the output's `names`.
    """
    plan = {
        "tier": tier,
        "decodes": (len(accepted),),
        "prompt_rows": (0,),
        "context": 50,
        "captured": True,
        "extend_mode": ExtendMode.ACCEPTED,
    }
    plan |= {name: value for name, value in changes.items() if name in plan}
    output: Any = SimpleNamespace(
        phases=SimpleNamespace(names=changes.get("names", (REPLAY,))),
        accepted_tree=lambda i, count: AcceptedTree(range(1, count), count - 1, 0),
    )
    step: Any = SimpleNamespace(
        plan=SimpleNamespace(**plan),
        schedule=SimpleNamespace(vote=vote),
        seconds={"schedule": 0.001, "agree": 0.002},
        elapsed_s=0.010,
    )
    entries = [(i, row, 1 + count) for i, (row, count) in enumerate(accepted.items())]
    since_last_s = changes.get("since_last_s", 0.012)
    return ObservedStep(step, output, entries, since_last_s, changes.get("overlaps", False))


def outlook_of(outlook: TreeOutlook, *rows: int, max_tier: int = 3) -> list[float]:
    return [tokens / 1000 for tokens in outlook.vote(decodes_of(*rows), max_tier).outlook]


def test_exploring_asks_for_the_price_of_programs_of_the_last_plan() -> None:
    asked = list[tuple[Any, int]]()

    def price_us(plan: Any, tier: int) -> int:
        asked.append((plan, tier))
        return 10**9

    outlook = TreeOutlook(CHAIN, 2, TreeTimes(COSTS), price_us=price_us)
    explored, steps = set[int](), list[ObservedStep]()
    for _ in range(40 * UPDATE_INTERVAL):
        vote = outlook.vote(decodes_of(0), 3)
        explored.add(vote.explores)
        steps.append(committed(vote, {0: 0}, tier=0))
        outlook.add(steps[-1])
    assert explored == {NO_TIER}, "a capture of 1000 s is never paid"
    plans = [step.step.plan for step in steps]
    assert asked and all(any(plan is other for other in plans) for plan, _ in asked)
    assert any(asked[-1][0] is plan for plan in plans[-2 * UPDATE_INTERVAL :]), "the last steps count"
    assert {tier for _, tier in asked} <= {0, 1, 2, 3}


def test_the_time_of_a_step_is_divided_into_its_own_and_overhead() -> None:
    vote = TreeVote(3)
    assert committed(vote, {0: 1}).measured == MeasuredStep(3, 1, 7000, 50, 5000), "12 ms from commit to commit"
    assert committed(vote, {0: 1}, overlaps=True).measured == MeasuredStep(3, 1, 10_000, 50, 2000)
    assert committed(vote, {0: 1}, since_last_s=None).measured.overhead_us == 0


@pytest.mark.parametrize(
    ("changes", "is_typical"),
    [
        ({}, True),
        ({"names": ("draft",)}, False),
        ({"names": ("draft",), "captured": False}, True),
        ({"prompt_rows": (5,)}, False),
        ({"extend_mode": ExtendMode.MISSED}, False),
        ({"since_last_s": None}, False),
        ({"decodes": (0,)}, False),
    ],
)
def test_only_steps_like_others_are_typical(changes: dict[str, Any], is_typical: bool) -> None:
    assert committed(TreeVote(3), {0: 1}, **changes).is_typical == is_typical


def test_steps_are_read_together_and_the_vote_is_repeated_meanwhile() -> None:
    outlook = TreeOutlook(CHAIN, 2, TreeTimes(COSTS))
    first, votes = outlook.vote(decodes_of(0), 3), []
    for i in range(1, AVERAGED_STEPS + 1):
        outlook.add(committed(first, {0: 3}))
        votes.append(outlook.vote(decodes_of(0), 3))
        assert (votes[-1] is votes[0]) == (i < AVERAGED_STEPS)
    assert [vote.measured.steps for vote in votes] == [0] * (AVERAGED_STEPS - 1) + [AVERAGED_STEPS]
    outlook.add(committed(first, {0: 3}))
    again = outlook.vote(decodes_of(0), 3)
    assert again.measured.steps == 0 and again.explores == NO_TIER, "each mean is reported once"


def test_a_vote_is_not_repeated_for_other_requests_or_another_limit() -> None:
    outlook = TreeOutlook(CHAIN, 2, TreeTimes(COSTS))
    vote = outlook.vote(decodes_of(0), 3)
    outlook.add(committed(vote, {0: 3}))
    assert outlook.vote(decodes_of(0), 2).max_tier == 2
    assert len(outlook_of(outlook, 0, 1)) == 4 and outlook_of(outlook, 0, 1)[0] == 2
    outlook.admit(0, sampled=True)
    assert outlook.vote([], 3).outlook == (0, 0, 0, 0), "no request decodes"


def test_a_new_request_does_not_get_the_steps_of_the_one_before_in_its_row() -> None:
    outlook = TreeOutlook(CHAIN, 2, TreeTimes(COSTS))
    for _ in range(4 * UPDATE_INTERVAL):  # greedy requests: nothing is accepted
        outlook.add(committed(outlook.vote(decodes_of(0), 3), {0: 0}))
    outlook.admit(1, sampled=True)
    first = outlook_of(outlook, 1)
    outlook.admit(0, sampled=True)
    assert outlook_of(outlook, 0) == first


def test_trees_are_noted_when_they_are_read() -> None:
    outlook = TreeOutlook(CHAIN, 64, TreeTimes(COSTS))
    rows = range(64)
    for _ in range(8 * UPDATE_INTERVAL):
        outlook.add(committed(outlook.vote(decodes_of(*rows), 3), dict.fromkeys(rows, 3)))
    assert outlook_of(outlook, *rows)[3] > 0.9 * 4 * 64
    for _ in range(24 * UPDATE_INTERVAL):
        outlook.add(committed(outlook.vote(decodes_of(*rows), 3), dict.fromkeys(rows, 0)))
    assert outlook_of(outlook, *rows)[3] < 1.5 * 64
