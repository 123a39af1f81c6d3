"""The outlook learns from verified trees how many tokens each tree gives, and spends little time on exploring."""

from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config.tree_shape import TreeShape, tiers
from cluster.dp_attention.facts import NO_TIER, TreeVote
from cluster.dp_attention.tree_choice import NO_LAST_TREE, OUTLOOK_UNIT, choose_tier
from cluster.dp_attention.tree_times import MeasuredStep, TreeCosts, TreeTimes
from cluster.engine.tree_exploring import EXPLORED_SHARE
from cluster.engine.tree_outlook import (
    AVERAGED_STEPS,
    CLASS_WEIGHTS,
    FIRST_CHANCE,
    NOTED_CHANGES,
    UPDATE_INTERVAL,
    TreeOutlook,
)
from cluster.spec.result import AcceptedTree

ALL_CHAINS = tiers(TreeShape(num_steps=3, topk=1, num_draft_tokens=4), share_rows=True)
CHAIN = tuple(shape for shape in ALL_CHAINS if not shape.selects_nodes)
TREES = tiers(TreeShape(num_steps=2, topk=2, num_draft_tokens=6), share_rows=True)
COSTS = TreeCosts((1, 8), ((100, 200), (130, 400), (150, 600), (170, 800)), (150, 300))


def decodes_of(*rows: int) -> list[Any]:
    return [(None, SimpleNamespace(row=row)) for row in rows]


def chain_outlook(rows: int = 4) -> TreeOutlook:
    return TreeOutlook(CHAIN, rows, TreeTimes(COSTS))


def expected(outlook: TreeOutlook, *rows: int) -> list[float]:
    return [tokens / OUTLOOK_UNIT for tokens in outlook.vote(decodes_of(*rows), 3).outlook]


def path_of(ranks: Sequence[int]) -> AcceptedTree:
    """Return an accepted path of drafted nodes with these ranks."""
    return AcceptedTree(ranks, len(ranks))


def observe(outlook: TreeOutlook, tier: int, accepted: dict[int, int], times: int = 1) -> None:
    """Let chains of tier `tier` be verified `times` times; `accepted` are the accepted nodes by table row."""
    for _ in range(times):
        outlook.vote(decodes_of(*accepted), 3)
        outlook.observe(
            TreeVote(3),
            MeasuredStep(tier, len(accepted), 100),
            [1 + count for count in accepted.values()],
            [(row, path_of(range(1, 1 + count))) for row, count in accepted.items()],
        )


def test_adaptive_tiers_are_depths_and_numbers_of_verified_nodes() -> None:
    assert [(s.num_steps, s.num_draft_tokens, s.max_nodes) for s in ALL_CHAINS] == [
        *((0, 1, 0), (1, 2, 2), (2, 2, 3), (2, 3, 3), (3, 2, 4), (3, 4, 4)),
    ]
    assert [(s.num_steps, s.num_draft_tokens) for s in TREES] == [(0, 1), (1, 2), (1, 3), (2, 3), (2, 4), (2, 6)]


def test_first_outlook_is_hopeful_and_counts_every_request() -> None:
    outlook = chain_outlook()
    first = [1 + sum(FIRST_CHANCE**d for d in range(1, depth + 1)) for depth in range(4)]
    assert expected(outlook, 0) == pytest.approx(first, abs=1e-3)
    assert expected(outlook, 0, 2) == pytest.approx([2 * tokens for tokens in first], abs=2e-3)
    assert outlook.vote([], 3).outlook == (0, 0, 0, 0)


def test_outlook_approaches_the_accepted_tokens_of_each_request() -> None:
    outlook = chain_outlook()
    observe(outlook, 3, {0: 3, 1: 0}, times=100)
    always, never = expected(outlook, 0), expected(outlook, 1)
    assert always == pytest.approx([1, 2, 3, 4], abs=0.3) and never == pytest.approx([1, 1, 1, 1], abs=0.25)
    assert expected(outlook, 0, 1) == pytest.approx([a + b for a, b in zip(always, never, strict=True)], abs=2e-3)


def test_shallow_trees_say_nothing_about_deeper_levels() -> None:
    outlook = chain_outlook()
    observe(outlook, 3, {0: 3}, times=50)
    before = expected(outlook, 0)
    observe(outlook, 1, {0: 1}, times=200)
    after = expected(outlook, 0)
    assert after[3] - after[2] == pytest.approx(before[3] - before[2], abs=0.1)


def test_new_requests_begin_with_what_their_class_has_learned() -> None:
    outlook = chain_outlook()
    outlook.admit(0, sampled=True)
    observe(outlook, 3, {0: 0}, times=100)
    outlook.admit(1, sampled=True)
    outlook.admit(2, sampled=False)
    assert expected(outlook, 1)[3] < 1.05 and expected(outlook, 2)[3] > 2
    outlook.admit(0, sampled=False)  # the row has a new request, of the other class
    assert expected(outlook, 0) == expected(outlook, 2)


def test_trees_of_the_request_before_in_a_row_do_not_count_for_the_new_one() -> None:
    outlook = chain_outlook()
    outlook.admit(1, sampled=True)  # another class
    for _ in range(UPDATE_INTERVAL - 1):  # noted, and not read yet when the next request is admitted
        outlook.observe(TreeVote(3), MeasuredStep(3, 1, 100), [1], [(1, path_of(()))])
    outlook.admit(1, sampled=False)
    assert expected(outlook, 1) == expected(outlook, 0)


def test_requests_recover_when_their_text_becomes_predictable() -> None:
    outlook = chain_outlook()
    observe(outlook, 3, {0: 0, 1: 0}, times=100)
    observe(outlook, 3, {0: 3}, times=2 * UPDATE_INTERVAL)
    assert expected(outlook, 0)[3] > 3 > 2 > expected(outlook, 1)[3]


def test_outlook_of_smaller_trees_counts_the_nodes_that_they_would_have() -> None:
    outlook = TreeOutlook(TREES, 1, TreeTimes(TreeCosts((1,), ((100,),) * 6)))
    # The accepted path is always node 2 (by score) at depth 1, then node 4 at depth 2.
    for _ in range(200):
        outlook.observe(TreeVote(5), MeasuredStep(5, 1, 100), [3], [(0, path_of((2, 4)))])
    outlook_by_tier = outlook.vote(decodes_of(0), 5).outlook
    by_shape = {(s.num_steps, s.num_draft_tokens): outlook_by_tier[tier] / 1000 for tier, s in enumerate(TREES)}
    margin = 2 * FIRST_CHANCE * CLASS_WEIGHTS[0] / 24  # what is left of the first guess
    assert by_shape[1, 2] == pytest.approx(1, abs=margin), "a tree of two nodes has the root and node 1 only"
    assert by_shape[1, 3] == pytest.approx(2, abs=margin)
    assert by_shape[2, 3] == pytest.approx(2, abs=2 * margin) == by_shape[2, 4]
    assert by_shape[2, 6] == pytest.approx(3, abs=margin)


def test_estimates_are_computed_at_intervals_and_when_requests_change() -> None:
    outlook = chain_outlook()
    first = expected(outlook, 0)
    observe(outlook, 3, {0: 0}, times=UPDATE_INTERVAL - 1)
    assert expected(outlook, 0) == first
    assert expected(outlook, 0, 1)[3] < 2 * first[3], "another request has joined"
    observe(outlook, 3, {0: 0}, times=UPDATE_INTERVAL)
    assert expected(outlook, 0)[3] < first[3]


def chosen_tier(vote: TreeVote, costs: TreeCosts) -> int:
    """Return the tier of a step of 8 requests, as the plan chooses it."""
    return choose_tier(costs.of(8), [vote.outlook], NO_LAST_TREE).tier if vote.explores == NO_TIER else vote.explores


def simulated_time(outlook: TreeOutlook, chance: float, steps: int, random: Random) -> tuple[float, float, int]:
    """Run steps of 8 requests whose nodes are accepted with `chance`; return time, tokens, and explored steps."""
    time_us = tokens = 0.0
    explored = 0
    for _ in range(steps):
        vote = outlook.vote(decodes_of(*range(8)), 3)
        tier = chosen_tier(vote, COSTS)
        explored += vote.explores != NO_TIER
        counts = [next((d for d in range(tier) if random.random() >= chance), tier) for _ in range(8)]
        time_us += COSTS.of(8)[tier]
        tokens += 8 + sum(counts)
        step = MeasuredStep(tier, 8, round(COSTS.of(8)[tier]))
        paths = [(row, path_of(range(1, 1 + count))) for row, count in enumerate(counts)]
        outlook.observe(vote, step, [1 + count for count in counts], paths if outlook.notes(tier, 8) else ())
    return time_us, tokens, explored


def test_exploring_takes_little_time_while_trees_do_not_pay() -> None:
    outlook, random = TreeOutlook(CHAIN, 8, TreeTimes(COSTS)), Random(1)
    simulated_time(outlook, 0.1, 500, random)
    time_us, tokens, explored = simulated_time(outlook, 0.1, 20_000, random)
    assert explored > 10
    plain_rate, rate = 8 / COSTS.of(8)[0], tokens / time_us
    assert rate > plain_rate * (1 - 2 * EXPLORED_SHARE)


def test_trees_come_back_when_the_text_becomes_predictable() -> None:
    cheap = TreeCosts((1, 8), ((100, 200), (130, 220), (150, 240), (170, 260)), (150, 300))
    outlook = TreeOutlook(CHAIN, 8, TreeTimes(cheap))
    for row in range(8):
        outlook.admit(row, sampled=False)
    for _ in range(300):  # nothing is accepted
        outlook.vote(decodes_of(*range(8)), 3)
        outlook.observe(TreeVote(3), MeasuredStep(3, 8, 260), [1] * 8, [(row, path_of(())) for row in range(8)])
    vote = outlook.vote(decodes_of(*range(8)), 3)
    assert choose_tier(cheap.of(8), [vote.outlook], NO_LAST_TREE).tier == 0
    tiers_taken = []
    for _ in range(1500):  # all is accepted
        vote = outlook.vote(decodes_of(*range(8)), 3)
        tier = chosen_tier(vote, cheap)
        tiers_taken.append(tier)
        step = MeasuredStep(tier, 8, round(cheap.of(8)[tier]))
        paths = [(row, path_of(range(1, 1 + tier))) for row in range(8)]
        outlook.observe(vote, step, [1 + tier] * 8, paths if outlook.notes(tier, 8) else ())
    assert set(tiers_taken[-100:]) == {3}


def test_votes_report_each_measured_step_once_as_means_of_like_steps() -> None:
    outlook = chain_outlook()

    def reported(tier: int, us: int, is_typical: bool = True) -> MeasuredStep:
        step = MeasuredStep(tier, 1, us, overhead_us=us // 10)
        outlook.observe(TreeVote(3), step, [3], [(0, path_of((1, 2)))], is_typical)
        return outlook.vote(decodes_of(0), 3).measured

    assert {reported(3, 160 + us).steps for us in range(AVERAGED_STEPS - 1)} == {0}
    us = round(sum(160 + us for us in range(AVERAGED_STEPS)) / AVERAGED_STEPS)
    assert reported(3, 160 + AVERAGED_STEPS - 1) == MeasuredStep(3, 1, us, 0, us // 10, AVERAGED_STEPS)
    assert reported(3, 170).steps == reported(3, 180).steps == 0
    assert reported(2, 100) == MeasuredStep(3, 1, 175, 0, 18, 2), "the tier has changed"
    assert reported(3, 170) == MeasuredStep(2, 1, 100, 0, 10, 1)
    assert reported(3, 9000, is_typical=False) == MeasuredStep(3, 1, 170, 0, 17, 1), "what follows is a mean of its own"
    assert {reported(3, us).steps for us in (100, 100, 100, 100, 100, 100, 9000)} == {0}
    assert reported(3, 100).us == round((7 * 100 + 200) / 8), "a step that waited counts as at most twice as long"


def test_with_many_requests_about_eight_trees_are_noted_a_step() -> None:
    outlook = chain_outlook()
    assert [outlook.notes(2, 64) for _ in range(NOTED_CHANGES)] == [True] * NOTED_CHANGES, "the tier has changed"
    for decodes, notes in ((1, 48), (8, 48), (12, 32), (32, 12), (48, 8)):
        assert abs(sum(outlook.notes(2, decodes) for _ in range(48)) - notes) <= 1
    assert outlook.notes(3, 64) and outlook.notes(3, 64)


def test_explored_steps_are_not_charged_for_the_prompt_rows_beside_them() -> None:
    outlook = TreeOutlook(CHAIN, 8, TreeTimes(COSTS))
    outlook.vote(decodes_of(*range(8)), 3)
    vote = TreeVote(3, outlook.vote(decodes_of(*range(8)), 3).outlook, prompt_us=100_000, explores=1)
    outlook.observe(vote, MeasuredStep(1, 8, 100_400), [2] * 8, is_typical=False)
    assert outlook._exploring._saved_us > -400


def test_what_to_explore_is_chosen_anew_also_while_the_draft_rests() -> None:
    outlook, chosen = TreeOutlook(CHAIN, 8, TreeTimes(COSTS)), []
    outlook._exploring.choose = lambda *args: chosen.append(args)  # type: ignore[method-assign]
    for _ in range(4 * UPDATE_INTERVAL):
        vote = outlook.vote(decodes_of(0), 3)
        outlook.observe(vote, MeasuredStep(0, 1, 100), [1], [(0, path_of(()))] if outlook.notes(0, 1) else ())
    assert len(chosen) == 4
