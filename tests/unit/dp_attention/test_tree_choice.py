"""Each step chooses the tree that is expected to give the most tokens per second; all ranks choose the same tree."""

import zlib
from dataclasses import replace

import pytest

from cluster.batch import ExtendMode, SamplingMode
from cluster.config.speculation import MISSED_TOKENS
from cluster.config.tree_shape import TreeShape, tiers
from cluster.distributed.mesh import OutOfStepError
from cluster.dp_attention.coordinator import Coordinator
from cluster.dp_attention.facts import RankFacts
from cluster.dp_attention.plan import StepPlan, script
from cluster.dp_attention.sizes import ProgramKey
from cluster.dp_attention.tree_choice import ChosenTier, LastTree, choose_tier
from cluster.dp_attention.tree_times import LEAST_SHARE, MAX_KEPT, MeasuredStep, TreeCosts, TreeTimes
from tests.unit.dp_attention.test_plan import DRAFT, TARGET, FakeMesh, rule

SHAPE = TreeShape(num_steps=3, topk=1, num_draft_tokens=4)
COSTS = TreeCosts((1, 4, 16), ((100, 120, 200), (150, 200, 500), (180, 260, 800), (220, 300, 1100)), (130, 180, 400))
AWAKE, RESTING = LastTree(0, rests=False), LastTree(0, rests=True)


def vote(decodes: int, outlook: tuple[int, ...], **fields: int) -> RankFacts:
    return RankFacts(0, 5, 0, 0, decodes, max_tier=3, requests=decodes, outlook=outlook)._replace(**fields)


def plan(
    *votes: RankFacts, last: LastTree = AWAKE, rests: bool = True, last_drafted_tier: int | None = None
) -> StepPlan:
    plan_rule = replace(rule(), draft_rests=rests, last_drafted_tier=last_drafted_tier)
    return plan_rule.plan(votes, SHAPE, last, TreeTimes(COSTS))


def test_costs_are_linear_between_measured_counts_and_beyond_the_last() -> None:
    assert COSTS.of(1) == [100, 150, 180, 220]
    assert COSTS.of(2)[0] == pytest.approx(100 + 20 / 3)
    assert COSTS.of(16) == [200, 500, 800, 1100]
    assert COSTS.of(28)[3] == 1100 + 800
    assert COSTS.waking(4) == 180 and TreeCosts((1,), ((9,),)).waking(4) == 0
    assert TreeCosts((1,), ((9,), (11,))).of(5) == [9, 11]


def test_choice_has_the_most_tokens_per_time() -> None:
    times = COSTS.of(1)
    all_accepted, half_accepted, none_accepted = (1000, 2000, 3000, 4000), (1000, 1500, 1750, 1875), (1000,) * 4
    assert choose_tier(times, [all_accepted], AWAKE).tier == 3
    assert choose_tier(times[:3], [all_accepted], AWAKE).tier == 2, "the settings allow no deeper tree"
    assert choose_tier(times, [half_accepted], AWAKE).tier == 0, "1500 / 150 is as much as 1000 / 100"
    assert choose_tier(times, [none_accepted], AWAKE).tier == 0
    # With prompt rows that take 300 us, a step takes 400, 450, 480 or 520 us.
    assert choose_tier(times, [half_accepted], AWAKE, prompt_us=300).tier == 2
    assert choose_tier(times, [all_accepted, none_accepted], AWAKE).tier == 3, "the tokens of all groups count"


def test_small_gains_do_not_change_the_tree() -> None:
    times = [100.0, 100.0]
    assert choose_tier(times, [(1000, 1009)], LastTree(0)).tier == 0
    assert choose_tier(times, [(1000, 1011)], LastTree(0)).tier == 1
    assert choose_tier(times, [(1000, 1011)], LastTree(0, rests=True)).tier == 0, "waking the draft costs a step"
    assert choose_tier(times, [(1000, 1031)], LastTree(0, rests=True)).tier == 1
    assert choose_tier(times, [(1009, 1000)], LastTree(1)).tier == 1
    assert choose_tier(times[:1], [(1000, 900)], LastTree(1)).tier == 0, "the last tree is not allowed any more"


def test_tree_with_a_program_is_used_before_a_better_one_without() -> None:
    times, outlook = [100.0, 150.0, 200.0], (1000, 2000, 3000)  # 10, 13.3 and 15 tokens per ms

    def choose(captured: set[int], last: int = 0, outlook: tuple[int, ...] = outlook) -> ChosenTier:
        return choose_tier(times, [outlook], LastTree(last), may_use=lambda tier, best: tier in captured)

    assert choose({0, 1, 2}) == ChosenTier(2)
    assert choose(set()) == ChosenTier(2), "no tree has a program, so one must be captured: the best"
    assert choose({0, 1}) == ChosenTier(1, round(150 * (1 - 13.3333 / 15)))
    assert choose({0}) == ChosenTier(0, round(100 * (1 - 10 / 15)))
    almost_as_good = (1000, 2240, 3000)
    assert choose({0, 1, 2}, 1, almost_as_good) == ChosenTier(1), "a small gain does not change the tree"
    assert choose({0, 2}, 1, almost_as_good) == ChosenTier(2), "the last tree has no program for these sizes"
    assert choose({0, 1}, 1, almost_as_good) == ChosenTier(1), "a gain that does not change the tree is no loss"


class CapturedSteps:
    """Steps that one rank's coordinator plans. A program is captured in the second step of its key."""

    def __init__(self, rests: bool) -> None:
        self.captured: set[ProgramKey] = set()
        self._seen: set[ProgramKey] = set()
        plan_rule = replace(rule(buckets=()), draft_rests=rests)
        self._coordinator = Coordinator(FakeMesh({}), plan_rule, tiers(SHAPE), TARGET)
        costs = TreeCosts((4,), ((10_000,), (10_500,), (11_000,), (12_000,)), (10_000,))
        self._coordinator.use_costs(costs, self.captured.__contains__)

    def run(self, *outlook: int, decodes: int = 4) -> StepPlan:
        captured = zlib.crc32(repr(sorted(self.captured)).encode())
        facts = self._coordinator.header()._replace(
            decodes=decodes, outlook=outlook, capture_us=40_000, captured=captured
        )
        step_plan = self._coordinator.agree(facts)
        self._coordinator.finish_step()
        if step_plan.key in self._seen:
            self.captured.add(step_plan.key)
        self._seen.add(step_plan.key)
        return step_plan


LITTLE, MUCH = (4000, 4100, 4200, 4300), (4000, 8000, 12000, 16000)


def test_better_tree_is_captured_when_steps_have_lost_the_price_of_a_capture() -> None:
    steps = CapturedSteps(rests=False)
    assert [steps.run(*LITTLE).tier for _ in range(3)] == [0, 0, 0]
    plans = [steps.run(*MUCH) for _ in range(12)]
    assert plans[0].lost_us == 10_000 - 12_000 / 4, "4 tokens take 10 or 3 ms"
    waits = -(-40_000 // plans[0].lost_us)
    assert [p.tier for p in plans] == [0] * waits + [3] * (12 - waits)
    assert not any(p.lost_us for p in plans[waits:])
    assert steps.run(*LITTLE).tier == 0 and steps.run(*MUCH).tier == 3, "both have programs now"
    assert steps.run(*MUCH, decodes=3).tier == 3, "nothing is captured for three requests"


def test_program_that_was_dropped_is_not_captured_again_at_once() -> None:
    """Its old losses are paid. The choice that was kept while it was there does not hold any more."""
    steps = CapturedSteps(rests=False)
    assert [steps.run(*LITTLE).tier for _ in range(2)] == [0, 0]
    plans = [steps.run(*MUCH) for _ in range(12)]
    assert plans[-1].tier == 3
    steps.captured.remove(plans[-1].key)
    assert steps.run(*MUCH).tier == 0 and steps.run(*MUCH).lost_us == plans[0].lost_us


def test_a_kept_choice_holds_only_for_the_same_load_and_the_same_times() -> None:
    times, outlook = TreeTimes(COSTS), (4000, 6000, 7000, 7500)

    def chosen(changed: tuple[int, ...] = outlook, last: LastTree = AWAKE, **load: int) -> int:
        return rule().plan((vote(4, changed, **load),), SHAPE, last, times).tier

    first = chosen()
    assert times.choices and chosen() == first
    fresh = {
        name: rule().plan((vote(4, outlook, **load),), SHAPE, AWAKE, TreeTimes(COSTS)).tier
        for name, load in (("prompt_us", {"prompt_us": 10_000}), ("max_tier", {"max_tier": 0}))
    }
    assert chosen(prompt_us=10_000) == fresh["prompt_us"] != first and chosen(max_tier=0) == fresh["max_tier"] == 0
    assert chosen((4000, 4000, 4000, 4000)) == 0
    for _ in range(30):  # trees turn out to take ten times as long
        times.observe(MeasuredStep(first, 4, 2000, steps=8))
        times.observe(MeasuredStep(0, 4, 120, steps=8))
    assert not times.choices and chosen() != first
    for decodes in range(1, 30):
        rule().plan((vote(decodes, outlook),), SHAPE, AWAKE, times)
    assert len(times.choices) <= MAX_KEPT
    times.reset(COSTS)
    assert not times.choices and chosen() == first


@pytest.mark.parametrize("rests", [False, True])
def test_step_without_trees_waits_no_longer_than_a_capture_takes(rests: bool) -> None:
    """The program of such a step depends on whether the draft rests."""
    steps = CapturedSteps(rests)
    assert [steps.run(*MUCH).tier for _ in range(3)] == [3, 3, 3]
    plans = [steps.run(*LITTLE) for _ in range(100)]  # each loses 1.3 ms, because 4.3 tokens take 12 or 10.75 ms
    waits = -(-40_000 // plans[0].lost_us)
    assert [p.tier for p in plans] == [3] * waits + [0] * (100 - waits)
    assert [steps.run(*MUCH).tier for _ in range(2)] == ([0, 3] if rests else [3, 3]), "a draft that rested wakes first"


def test_draft_neither_rests_nor_wakes_for_want_of_a_program() -> None:
    """The number of requests alternates. One tree is captured for four requests, another one for three."""
    steps = CapturedSteps(rests=True)
    assert [steps.run(*MUCH).tier for _ in range(3)] == [3, 3, 3]
    assert [steps.run(*LITTLE, decodes=3).tier for _ in range(3)] == [0, 0, 0]
    plans = [steps.run(*LITTLE, decodes=decodes) for decodes in (4, 3, 4, 3, 4)]
    assert {plan.extend_mode for plan in plans} == {ExtendMode.NOTHING} and not any(plan.lost_us for plan in plans)
    plans = [steps.run(*MUCH, decodes=decodes) for decodes in (4, 3, 4, 3, 4)]
    assert [plan.extend_mode for plan in plans] == [ExtendMode.MISSED] + [ExtendMode.ACCEPTED] * 4
    assert [plan.tier for plan in plans] == [0, 3, 3, 3, 3], "once awake, the draft goes on for three requests too"


def test_all_ranks_take_the_price_of_a_capture_from_the_first_rank() -> None:
    for own_us in (40_000, 1):
        coordinator = Coordinator(FakeMesh({}), rule(), tiers(SHAPE), TARGET)
        coordinator.use_costs(COSTS, lambda key: True)
        facts = coordinator.header()._replace(capture_us=own_us)
        first_rank = facts._replace(capture_us=40_000)
        coordinator._mesh.all_gather_row = lambda row, first=first_rank: [first.to_row(), row]  # type: ignore[method-assign,misc]
        coordinator.agree(facts)
        assert coordinator._postponed is not None and coordinator._postponed.capture_us == 40_000


def test_each_committed_token_costs_more_in_larger_trees() -> None:
    costs = TreeCosts((1, 4), ((100, 160), (200, 320)), context=50, token_ns=(1000, 3000))
    assert costs.of(4) == costs.of(4, 50) == [160, 320]
    assert costs.of(4, 150) == [160 + 400, 320 + 1200] and costs.of(1, 150) == [200, 500]
    assert costs.of(4, 40) == [160 - 40, 320 - 120]
    assert costs.of(4, 1)[1] == 320 * LEAST_SHARE, "a shorter context never makes a step free"
    times = TreeTimes(costs)
    for _ in range(20):
        times.observe(MeasuredStep(0, 4, 160 + 400, 150))
    assert times.of(4, 160)[0] == pytest.approx(600, rel=0.01), "steps are compared with the costs of their context"
    groups = vote(4, (1000,) * 4, context=20), vote(2, (1000,) * 4, context=900)
    assert plan(*groups).context == 900


def test_plan_chooses_by_the_largest_group_and_the_tokens_of_all_groups() -> None:
    all_accepted, nothing = (1000, 2000, 3000, 4000), (0, 0, 0, 0)
    assert plan(vote(1, all_accepted)).tier == 3
    assert plan(vote(1, all_accepted), vote(0, nothing)).tier == 3
    # 16 requests of which one gains: 16 / 200, 17 / 500, ... tokens per us.
    assert plan(vote(16, (16000, 17000, 18000, 19000)), vote(1, all_accepted)).tier == 0
    assert plan(vote(1, all_accepted), vote(1, all_accepted, max_tier=1)).tier == 1
    assert plan(vote(0, nothing)).tier == 3, "without decoding requests the tree does not matter"


def test_exploring_takes_the_tier_asked_for_and_grammars_the_largest_tree() -> None:
    nothing_accepted = (4000, 4000, 4000, 4000)
    assert plan(vote(4, nothing_accepted)).tier == 0
    assert plan(vote(4, nothing_accepted, explores=1)).tier == 1
    assert plan(vote(4, nothing_accepted, explores=1), vote(4, nothing_accepted, explores=3)).tier == 3
    assert plan(vote(4, nothing_accepted), vote(4, nothing_accepted, explores=3, max_tier=2)).tier == 2
    grammar = vote(4, nothing_accepted, mode=int(SamplingMode.CONSTRAINED))
    assert plan(grammar).tier == 3 and plan(grammar, last_drafted_tier=2).tier == 2


def test_draft_rests_in_steps_without_trees_and_wakes_in_a_step_of_its_own() -> None:
    none_accepted, all_accepted = (1000,) * 4, (1000, 2000, 3000, 4000)
    resting = plan(vote(1, none_accepted))
    assert (resting.tier, resting.extend_mode) == (0, ExtendMode.NOTHING)
    beside_prompts = plan(vote(1, none_accepted), vote(0, (0,) * 4, prompt_rows=5))
    assert beside_prompts.extend_mode is ExtendMode.PROMPTS, "all ranks run the draft if one has prompt rows"
    waking = plan(vote(1, all_accepted), last=RESTING)
    assert (waking.tier, waking.extend_mode) == (0, ExtendMode.MISSED)
    awake = plan(vote(1, all_accepted), last=AWAKE)
    assert (awake.tier, awake.extend_mode) == (3, ExtendMode.ACCEPTED)
    assert plan(vote(1, none_accepted), rests=False).extend_mode is ExtendMode.ACCEPTED
    assert plan(vote(0, (0,) * 4, prompt_rows=5), last=RESTING).extend_mode is ExtendMode.ACCEPTED
    keys = {step_plan.key for step_plan in (resting, beside_prompts, waking, awake)}
    assert len(keys) == 4, "programs differ in what the draft reads"


@pytest.mark.parametrize(
    ("extend_mode", "rows", "scored"),
    [
        (ExtendMode.ACCEPTED, (2 + 7, 1), (3, 1)),
        (ExtendMode.PROMPTS, (7, 0), (1, 0)),
        (ExtendMode.NOTHING, None, None),
        (ExtendMode.MISSED, (2 * MISSED_TOKENS + 7, MISSED_TOKENS), (3, 1)),
    ],
)
def test_script_has_the_draft_rows_of_the_extend_mode(
    extend_mode: ExtendMode, rows: tuple[int, int] | None, scored: tuple[int, int] | None
) -> None:
    step_plan = plan(vote(2, (2000,) * 4, prompt_rows=7, finishing_prompts=1), vote(1, (1000,) * 4))
    step_plan = step_plan._replace(extend_mode=extend_mode)
    draft = DRAFT._replace(head=("head",))
    calls = [call for call in script(step_plan, step_plan.tree(tiers(SHAPE)), TARGET, draft) if call.phase == "extend"]
    assert [call.rows for call in calls] == ([] if rows is None else [rows, rows, scored])


def test_facts_travel_with_the_outlook_as_one_row() -> None:
    facts = vote(3, (3000, 4000, 5000))
    assert RankFacts.from_row(facts.to_row()) == facts
    assert all(isinstance(number, int) for number in facts.to_row())
    assert RankFacts.from_row(facts._replace(outlook=()).to_row()).outlook == ()


def test_ranks_with_other_costs_are_named_before_a_step() -> None:
    coordinator = Coordinator(FakeMesh({}), rule(), tiers(SHAPE), TARGET)
    peer = Coordinator(FakeMesh({}), rule(), tiers(SHAPE), TARGET)
    coordinator.use_costs(COSTS)
    peer.use_costs(replace(COSTS, us=((101, 120, 200), *COSTS.us[1:])))
    facts, peer_facts = coordinator.header(), peer.header()
    assert facts.rule_checksum != peer_facts.rule_checksum and facts.outlook == (0,) * 4
    coordinator._mesh = FakeMesh({"rule_checksum": peer_facts.rule_checksum})
    with pytest.raises(OutOfStepError, match="rank 1 is at rule_checksum"):
        coordinator.agree(facts)


def test_all_ranks_correct_their_times_by_the_steps_of_the_first_rank() -> None:
    coordinators = [Coordinator(FakeMesh({}), rule(), tiers(SHAPE), TARGET) for _ in range(2)]
    for coordinator, own_us in zip(coordinators, (400, 100), strict=True):
        coordinator.use_costs(COSTS)
        facts = coordinator.header()._replace(
            decodes=4, measured_tier=1, measured_decodes=4, measured_us=own_us, measured_steps=1
        )
        first_rank = facts._replace(measured_us=400)
        coordinator._mesh.all_gather_row = lambda row, first=first_rank: [first.to_row(), row]  # type: ignore[method-assign,misc]
        coordinator.agree(facts)
    assert coordinators[0].tree_times is not None and coordinators[1].tree_times is not None
    assert coordinators[0].tree_times.of(4) == coordinators[1].tree_times.of(4) != COSTS.of(4)


def test_coordinator_remembers_whether_the_draft_rests() -> None:
    adaptive = replace(rule(), draft_rests=True)
    coordinator = Coordinator(FakeMesh({}), adaptive, tiers(SHAPE), TARGET)
    coordinator.use_costs(COSTS)
    modes = []
    for decodes, tokens in ((1, 1000), (0, 0), (1, 4000), (1, 4000)):
        outlook = (min(1000, tokens), tokens, tokens, tokens)
        facts = coordinator.header()._replace(decodes=decodes, requests=1, outlook=outlook)
        modes.append(coordinator.agree(facts).extend_mode)
        coordinator.finish_step()
    assert modes == [ExtendMode.NOTHING, ExtendMode.ACCEPTED, ExtendMode.MISSED, ExtendMode.ACCEPTED]
