"""The plan of a step is a pure function of the ranks' gathered facts. Ranks compare headers before any other data."""

from dataclasses import replace
from itertools import product

import pytest

from cluster.batch import DecodeRequest, PromptChunk, SamplingMode, StepInput
from cluster.config.tree_shape import NO_SPECULATION, TreeShape, tiers
from cluster.distributed.mesh import Mesh, OutOfStepError
from cluster.dp_attention.coordinator import Coordinator
from cluster.dp_attention.facts import RankFacts
from cluster.dp_attention.padding import pad_step_input
from cluster.dp_attention.plan import ExpertParallel, Ops, PlanRule, ScriptCall, script
from cluster.dp_attention.sizes import MAX_CAPTURED_ROWS, Buckets
from cluster.models.exchange import EXPERT_CALLS
from cluster.sampling.sharded import ShardedHead

SHAPE = TreeShape(num_steps=3, topk=2, num_draft_tokens=6)
TARGET = Ops(("embed", "reduce", "gather", "scatter"), ("head",))
DRAFT = Ops(("gather", "scatter"), ())


def facts(decodes: int = 0, prompt_rows: int = 0, finals: int = 0, max_tier: int = 3) -> RankFacts:
    return RankFacts(0, 5, 0, 0, decodes, prompt_rows, finals, max_tier=max_tier, requests=decodes + prompt_rows)


def rule(
    padding: str = "auto", attn_tp: int = 1, waste: float = 0.0, buckets: tuple[int, ...] | None = None
) -> PlanRule:
    sizes = None if buckets is None else Buckets(buckets)
    return PlanRule(attn_tp, padding, waste, sizes)  # type: ignore[arg-type]


def test_plan_uses_the_largest_tier_that_all_groups_allow() -> None:
    table = [facts(2, max_tier=3), facts(1, max_tier=1), facts(0, max_tier=2)]
    assert rule().plan(table, SHAPE).tier == 1


@pytest.mark.parametrize(("decodes", "expected_nodes"), [((1, 0), 6), ((1, 2), 4), ((3, 5), 1), ((9, 1), 0)])
def test_plan_adds_forced_nodes_for_grammars_within_the_row_limit(
    decodes: tuple[int, int], expected_nodes: int
) -> None:
    shape = SHAPE.model_copy(update={"max_forced_nodes": 6})
    shapes = tiers(shape)
    unconstrained = [facts(decodes[0]), facts(decodes[1])]
    plan = replace(rule(), max_forced_rows=8).plan(unconstrained, shape)
    assert plan.forced_nodes == 0 and plan.tree(shapes) == shape
    constrained = [unconstrained[0], unconstrained[1]._replace(mode=int(SamplingMode.CONSTRAINED))]
    constrained_plan = replace(rule(), max_forced_rows=8).plan(constrained, shape)
    assert (
        constrained_plan.forced_nodes == expected_nodes
        and constrained_plan.tree(shapes).num_draft_tokens == shape.num_draft_tokens + expected_nodes
    )
    assert constrained_plan.tree(shapes).drafted_shape.num_draft_tokens == shape.num_draft_tokens
    table_without_speculation = [fact._replace(max_tier=0) for fact in constrained]
    assert replace(rule(), max_forced_rows=8).plan(table_without_speculation, shape).tree(shapes).num_draft_tokens == 1


def test_padded_plan_gives_every_group_the_sizes_of_the_largest() -> None:
    table = [facts(2, 7, 1), facts(0, 0), facts(5, 3)]
    exact, padded = (rule(name).plan(table, SHAPE) for name in ("exact", "padded"))
    assert exact.sizes == ((2, 7, 1), (0, 0, 0), (5, 3, 0))
    assert padded.sizes == ((5, 7, 1), (5, 7, 0), (5, 7, 0))
    assert not exact.captured and not padded.captured


@pytest.mark.parametrize(("max_waste", "is_padded"), [(0.0, False), (0.49, False), (0.5, True)])
def test_auto_padding_pads_while_idle_rows_are_within_the_limit(max_waste: float, is_padded: bool) -> None:
    plan = rule(waste=max_waste).plan([facts(4), facts(0)], SHAPE)
    assert plan.sizes == ((4, 0, 0), (4 if is_padded else 0, 0, 0))


@pytest.mark.parametrize(
    ("padding", "sizes", "counted"),
    [("exact", None, True), ("auto", None, True), ("padded", None, False), ("exact", (1, 2, 4, 8), False)],
)
def test_expert_rows_are_sent_by_counts_unless_padded_or_captured(
    padding: str, sizes: tuple[int, ...] | None, counted: bool
) -> None:
    """A padded step has groups of equal sizes, and a captured step must not read a value from the device."""
    plan_rule, table = replace(rule(padding, buckets=sizes), expert_parallel=True), [facts(2), facts(4, 3)]
    plan = plan_rule.plan(table, SHAPE)
    assert (
        plan.routes_to_experts is counted
        and not replace(plan_rule, expert_parallel=False).plan(table, SHAPE).routes_to_experts
    )
    assert not plan_rule.plan(table[:1], SHAPE).routes_to_experts, "one group has all rows on each of its ranks"
    ops = Ops(("reduce", EXPERT_CALLS, "reduce", "gather", "scatter"), (), 8, expert_parallel=ExpertParallel(2, 3))
    rows = tuple(group_sizes.rows(6) for group_sizes in plan.sizes)
    expert_calls = (
        [("counts", 2, 3), ("dispatch", 14, 0), ("combine", 8, 0)] if counted else [("gather", 8, 0), ("scatter", 8, 0)]
    )
    expected_calls = [("reduce", 8, 0), *expert_calls, ("reduce", 8, 0), ("gather", 8, 0), ("scatter", 8, 0)]
    assert script(plan, SHAPE, ops, None) == [ScriptCall("target", op, rows, *widths) for op, *widths in expected_calls]


def test_captured_plan_rounds_sizes_up_to_captured_sizes() -> None:
    """Each group gets its own captured sizes, or all get the same with padding. If a group is too large for all
    programs, no group replays one.
    """
    table = [facts(3, 7, 3), facts(1), facts(5, 2, 1)]
    exact, padded = (rule(name, buckets=(1, 2, 4, 8)).plan(table, SHAPE) for name in ("exact", "padded"))
    assert exact.captured and exact.sizes == ((4, 8, 4), (1, 0, 0), (8, 2, 1))
    assert padded.captured and padded.sizes == ((8, 8, 4),) * 3
    assert [padded.idle(group) for group in range(3)] == [(5, 1, 1), (7, 8, 4), (3, 6, 3)]
    large = rule("exact", buckets=(1, 2, 4, 8)).plan([*table, facts(1, 9)], SHAPE)
    assert not large.captured and large.sizes == ((3, 7, 3), (1, 0, 0), (5, 2, 1), (1, 9, 0))
    assert rule("exact", buckets=()).plan(table, SHAPE).sizes == rule("exact").plan(table, SHAPE).sizes
    assert rule("exact", buckets=()).plan(table, SHAPE).captured
    for count, is_captured in ((MAX_CAPTURED_ROWS // 6, True), (MAX_CAPTURED_ROWS // 6 + 1, False)):
        assert rule(buckets=()).plan([facts(count)], SHAPE).captured is is_captured


def test_steps_with_bad_words_are_not_captured_and_padded_as_usual() -> None:
    for padding in ("exact", "padded"):
        table = [facts(3, 7, 3)._replace(mode=int(SamplingMode.ADJUSTED | SamplingMode.BAD_WORDS)), facts(1)]
        plan = rule(padding, buckets=(1, 2, 4, 8)).plan(table, SHAPE)
        assert not plan.captured and plan.mode == SamplingMode.ADJUSTED | SamplingMode.BAD_WORDS
        assert plan.sizes == rule(padding).plan(table, SHAPE).sizes


def test_steps_with_penalties_or_a_grammar_are_captured() -> None:
    for mode in (SamplingMode.ADJUSTED, SamplingMode.CONSTRAINED):
        plan_rule = replace(rule("exact"), buckets=Buckets())
        assert plan_rule.plan([facts(3)._replace(mode=int(mode))], SHAPE).captured


def test_equal_size_buckets_capture_several_groups_only_when_padded() -> None:
    """Without padding, the parts of a collective have different sizes."""
    for padding, groups, captured in (("exact", 1, True), ("exact", 2, False), ("padded", 2, True)):
        plan_rule = replace(rule(padding), buckets=Buckets((2, 4), equal_sizes=True))
        plan = plan_rule.plan([facts(3), facts(1)][:groups], SHAPE)
        assert plan.captured is captured
        assert not captured or {group_sizes.decodes for group_sizes in plan.sizes} == {4}


def test_steps_that_return_trees_are_not_captured() -> None:
    table = [facts(3, 7, 3)._replace(mode=int(SamplingMode.RANDOM | SamplingMode.TREES)), facts(1)]
    plan = rule("exact", buckets=(1, 2, 4, 8)).plan(table, SHAPE)
    assert not plan.captured and plan.mode == SamplingMode.RANDOM | SamplingMode.TREES
    assert rule("exact", buckets=(1, 2, 4, 8)).plan([facts(3, 7, 3), facts(1)], SHAPE).captured
    assert script(plan, SHAPE, TARGET, DRAFT) == script(plan._replace(mode=SamplingMode.RANDOM), SHAPE, TARGET, DRAFT)


def test_plan_key_depends_on_sizes_tier_and_mode() -> None:
    """Loads that run at the same sizes, tier and mode share a key. Other sizes, another tier or mode: another key."""
    plan_rule = rule("exact", buckets=(1, 2, 4, 8))
    keys = [
        plan_rule.plan([facts(*load), facts(1)], SHAPE).key for load in ((3, 7, 1), (4, 5, 1), (3, 7, 2), (2, 7, 1))
    ]
    assert keys[0] == keys[1] and len(set(keys)) == 3
    changed_facts = (facts(3, 7, 1, max_tier=2), facts(3, 7, 1)._replace(mode=int(SamplingMode.RANDOM)))
    assert len({keys[0], *(plan_rule.plan([changed, facts(1)], SHAPE).key for changed in changed_facts)}) == 3
    assert plan_rule.plan([facts(3, 7, 1), facts(2)], SHAPE).key != keys[0], "collectives have counts of all groups"


def test_script_uses_the_padded_row_counts() -> None:
    plan = rule("padded", buckets=(4, 8)).plan([facts(2, 7, 1), facts(1)], SHAPE)
    calls = {(call.phase, call.op): call.rows for call in script(plan, SHAPE, TARGET, DRAFT)}
    assert calls["draft", "gather"] == (8, 8) and calls["target", "gather"] == (32, 32)
    assert calls["target", "head"] == (28, 28) and calls["extend", "gather"] == (24, 24)


def test_plan_uses_only_the_facts_of_group_leaders() -> None:
    table = [facts(3, 4, 1), facts(max_tier=0), facts(1), facts(max_tier=0)]
    plan = rule("exact", attn_tp=2).plan(table, SHAPE)
    assert plan.decodes == (3, 1) and plan.prompt_rows == (4, 0) and plan.finishing_prompts == (1, 0) and plan.tier == 3


def test_plan_carries_the_decode_time_of_each_group() -> None:
    table = [facts(3)._replace(decode_us=700), facts(), facts(1)._replace(decode_us=300), facts()]
    plan = rule("exact", attn_tp=2).plan(table, SHAPE)
    assert plan.decode_us == (700, 300)
    table[2] = table[2]._replace(decode_us=301)
    assert rule("exact", attn_tp=2).plan(table, SHAPE).digest != plan.digest


def test_plan_is_quiet_if_all_ranks_are_idle_and_leaving_if_any_rank_leaves() -> None:
    idle_table = [facts(), facts()]
    assert rule().plan(idle_table, SHAPE).no_requests and not rule().plan(idle_table, SHAPE).leaving
    waiting_table = [facts(), facts()._replace(requests=1)]
    assert not rule().plan(waiting_table, SHAPE).no_requests, "a request that only waits is work"
    assert rule().plan([facts()._replace(leaving=1), facts(2)], SHAPE).leaving


def test_different_plans_have_different_digests() -> None:
    tables = [[facts(a, b), facts(c)] for a, b, c in product(range(4), repeat=3)]
    assert len({rule("exact").plan(table, SHAPE).digest for table in tables}) == 64


def test_script_lists_draft_target_and_extend_calls() -> None:
    plan = rule("exact").plan([facts(2, 7, 1), facts(1)], SHAPE)
    level = [ScriptCall("draft", op, (4, 2)) for op in DRAFT.forward]
    target = [ScriptCall("target", op, (19, 6)) for op in TARGET.forward] + [ScriptCall("target", "head", (13, 6))]
    extend = [ScriptCall("extend", op, (15, 4)) for op in DRAFT.forward]
    assert script(plan, SHAPE, TARGET, DRAFT) == level * 2 + target + extend
    assert script(plan, NO_SPECULATION, TARGET, None) == [
        *(ScriptCall("target", op, (9, 1)) for op in TARGET.forward),
        ScriptCall("target", "head", (3, 1)),
    ]


def test_script_of_several_draft_runners_lists_the_rows_of_each_level() -> None:
    """At level l one runner runs the rows of all levels up to l, and the head for the last of them. In the extend phase
    all runners run, and only the first runs the head.
    """
    plan = rule("exact").plan([facts(2, 7, 1), facts(1)], SHAPE)
    calls = script(plan, SHAPE, TARGET, DRAFT._replace(head=("head",), runners=3))
    draft_calls = [(call.op, call.rows) for call in calls if call.phase == "draft"]
    assert draft_calls == [
        *((op, (4, 2)) for op in (*DRAFT.forward, "head")),
        *((op, (8, 4)) for op in DRAFT.forward),
        ("head", (4, 2)),
    ]
    extend_calls = [(call.op, call.rows) for call in calls if call.phase == "extend"]
    assert extend_calls == [(op, (15, 4)) for op in DRAFT.forward * 3] + [("head", (3, 1))]


def test_plan_mode_is_the_union_of_group_leader_modes() -> None:
    """The mode of a follower does not count, because a follower runs in its leader's mode."""
    modes = (SamplingMode.RANDOM, SamplingMode(0), SamplingMode.LOGPROBS, SamplingMode.FILTERED)
    table = [facts(1)._replace(mode=int(mode)) for mode in modes]
    assert rule().plan(table, SHAPE).mode == SamplingMode.RANDOM | SamplingMode.LOGPROBS | SamplingMode.FILTERED
    assert rule(attn_tp=2).plan(table, SHAPE).mode == SamplingMode.RANDOM | SamplingMode.LOGPROBS
    assert rule().plan(table, SHAPE).digest != rule().plan(table[:3] + table[1:2], SHAPE).digest


def sampling_calls(mode: SamplingMode, wide: bool, bits: int = 32) -> list[tuple[str, str, tuple[int, ...], int]]:
    """Return the calls of a step between the shards of a head with 100 columns per shard, as (phase, op, rows, width).
    The calls of the head itself are left out.
    """
    ops = Ops((), ("head",), 8, 100, ShardedHead(100, bits, wide))
    plan = rule("exact").plan([facts(2, 7, 1)._replace(mode=int(mode)), facts(1)], SHAPE)
    calls = script(plan, SHAPE, ops, ops)
    assert sum(call.op == "head" for call in calls) == 4
    return [(call.phase, call.op, call.rows, call.width) for call in calls if call.op != "head"]


def test_script_adds_sampling_calls_after_a_sharded_head() -> None:
    """Shards always compare candidates. Wide noise, filters and log-probabilities add calls, in this order."""
    levels, nodes, ends, reported = (4, 2), (13, 6), (3, 1), (9, 4)
    compares = [("draft", "compare", levels, 5), ("target", "compare", nodes, 2), ("extend", "compare", ends, 5)]
    assert sampling_calls(SamplingMode(0), False) == [compares[0], *compares]
    assert sampling_calls(SamplingMode.RANDOM, False) == [compares[0], *compares]
    sampled = [call for compare in compares for call in ((compare[0], "spread", compare[2], 6), compare)]
    assert sampling_calls(SamplingMode.RANDOM, True) == [*sampled[:2], *sampled]
    compare_logprobs = ("extend", "compare", reported, 42)
    assert sampling_calls(SamplingMode.LOGPROBS, False)[4:] == [compare_logprobs]
    assert sampling_calls(SamplingMode.LOGPROBS, True)[4:] == [("extend", "spread", reported, 2), compare_logprobs]
    for bits in (32, 64):
        digits = [("target", "add", nodes, 256)] * (bits // 8)
        filtered = sampling_calls(SamplingMode.RANDOM | SamplingMode.FILTERED, False, bits)
        search = [("target", "highest", nodes, 1), *digits, ("target", "add", nodes, 1), *digits]
        assert [call for call in filtered if call[0] == "target"] == [*search, compares[1]]


def test_script_adds_head_and_ranking_calls_for_prompt_logprobs() -> None:
    """The head runs once more, for the scored rows, and its shards compare and rank these. The step is not captured."""

    def extend_calls(wide: bool | None) -> list[tuple[str, str, tuple[int, ...], int]]:
        ops = Ops((), ("head",), 8, 100, None if wide is None else ShardedHead(100, 32, wide))
        scoring_facts = facts(2, 7, 1)._replace(mode=int(SamplingMode.PROMPT_LOGPROBS), scored=5)
        plan = rule("exact", buckets=(1, 8)).plan([scoring_facts, facts(1)], SHAPE)
        assert plan.scored == (5, 0) and not plan.captured
        calls = [(call.phase, call.op, call.rows, call.width) for call in script(plan, SHAPE, ops, None)]
        return [call for call in calls if call[0] == "extend"]

    rows = (5, 0)
    head, compare = ("extend", "head", rows, 8), ("extend", "compare", rows, 42)
    ranking = [("extend", "highest", rows, 1), ("extend", "add", rows, 1)]
    assert extend_calls(None) == [head]
    assert extend_calls(False) == [head, compare, *ranking]
    wide_calls = [("extend", "spread", rows, 2), compare, ("extend", "spread", rows, 1), *ranking]
    assert extend_calls(True) == [head, *wide_calls]


def test_script_length_follows_the_depth_of_the_tier() -> None:
    plan = rule("exact").plan([facts(2)], SHAPE)
    lengths = [len(script(plan, shape, TARGET, DRAFT)) for shape in tiers(SHAPE)]
    assert lengths == [7, 7, 9, 11], "plain steps extend too, to keep the draft's KV complete"


def test_tiers_keep_topk_and_limit_draft_tokens_to_their_levels() -> None:
    assert [(t.num_steps, t.topk, t.num_draft_tokens) for t in tiers(SHAPE)] == [
        (0, 2, 1),
        (1, 2, 3),
        (2, 2, 6),
        (3, 2, 6),
    ]
    assert tiers(NO_SPECULATION) == (NO_SPECULATION,)


def test_padding_adds_idle_requests_and_chunks_on_the_idle_row() -> None:
    plan = rule("padded").plan([facts(2, 5), facts(3, 8)], SHAPE)
    chunk = PromptChunk(1, 0, 5, True, (4, 4, 4, 4, 4))
    step_input = StepInput(decodes=(DecodeRequest(0, 9), DecodeRequest(2, 4)), chunks=(chunk,))
    padded = pad_step_input(step_input, plan, 0, idle_row=7)
    assert padded.decodes == (DecodeRequest(0, 9), DecodeRequest(2, 4), DecodeRequest(7, 0))
    assert padded.chunks[-1] == chunk and [c.row for c in padded.chunks] == [7, 7, 7, 1]
    assert sum(c.stop - c.start for c in padded.chunks) == 8 and not any(c.final for c in padded.chunks[:3])
    assert pad_step_input(step_input, rule("exact").plan([facts(2, 5), facts(3, 8)], SHAPE), 0, 7) is step_input


def test_captured_step_input_gets_idle_finishing_prompts_and_padded_chunks() -> None:
    plan = rule(buckets=(4, 8)).plan([facts(2, 5, 1)], SHAPE)
    step_input = StepInput(
        decodes=(DecodeRequest(0, 9), DecodeRequest(2, 4)), chunks=(PromptChunk(1, 0, 5, True, (4, 4, 4, 4, 4)),)
    )
    padded = pad_step_input(step_input, plan, 0, idle_row=7)
    assert (len(padded.decodes), padded.idle_finishing_prompts, padded.padded_chunks) == (4, 3, 8)
    assert [chunk.row for chunk in padded.chunks] == [7, 7, 7, 1]


class FakeMesh(Mesh):
    """A fake mesh of two ranks. Rank 1 reports the facts of rank 0, with `changed_fields` replaced."""

    def __init__(self, changed_fields: dict[str, int]) -> None:
        super().__init__()
        self.changed_fields = changed_fields

    def all_gather_row(self, row: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [row, RankFacts.from_row(row)._replace(**self.changed_fields).to_row()]


@pytest.mark.parametrize("name", ["epoch", "step", "digest", "calls", "rule_checksum", "captured"])
def test_differing_header_error_names_rank_step_and_field(name: str) -> None:
    coordinator = Coordinator(FakeMesh({name: 99}), rule(), tiers(SHAPE), TARGET)
    with pytest.raises(
        OutOfStepError, match=rf"rank 1 is at {name} 99, rank 0 at \d+ \(step 0, phase agree\)"
    ) as raised:
        coordinator.agree(coordinator.header())
    assert (raised.value.rank, raised.value.step, raised.value.phase) == (1, 0, "agree")


def test_coordinator_advances_steps_while_headers_agree() -> None:
    coordinator = Coordinator(FakeMesh({"decodes": 3}), rule(), tiers(SHAPE), TARGET)
    plans = []
    for _ in range(4):
        plans.append(coordinator.agree(coordinator.header()))
        coordinator.finish_step()
    assert [plan.step for plan in plans] == [0, 1, 2, 3] and plans[0].decodes == (0, 3)


def test_coordinator_refuses_a_plan_of_an_earlier_step(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = Coordinator(FakeMesh({}), rule(), tiers(SHAPE), TARGET)
    first_plan = coordinator.agree(coordinator.header())
    coordinator.finish_step()
    monkeypatch.setattr(PlanRule, "plan", lambda *_: first_plan)
    with pytest.raises(OutOfStepError, match="rank 0 has a plan for step 0 in step 1"):
        coordinator.agree(coordinator.header())


def test_coordinator_refuses_the_next_step_before_finish_step() -> None:
    coordinator = Coordinator(FakeMesh({}), rule(), tiers(SHAPE), TARGET)
    coordinator.agree(coordinator.header())
    with pytest.raises(OutOfStepError, match="agrees on step 1 but has not taken the one before"):
        coordinator.agree(coordinator.header())


def test_every_rank_blames_the_rank_that_differs_from_the_majority() -> None:
    for own_rank in range(4):
        mesh = FakeMesh({})
        mesh.rank = own_rank
        table = [facts()._replace(step=0, rule_checksum=9 if rank == 2 else 8) for rank in range(4)]
        mesh.all_gather_row = lambda _, table=table: table  # type: ignore[method-assign, misc]
        coordinator = Coordinator(mesh, rule(), tiers(SHAPE), TARGET)
        with pytest.raises(OutOfStepError, match="rank 2 is at rule_checksum 9, rank 0 at 8"):
            coordinator.agree(coordinator.header())


@pytest.mark.parametrize("name", ["step_input_checksum", "results_checksum"])
@pytest.mark.parametrize("attn_tp", [1, 2])
def test_ranks_of_a_group_must_agree_on_input_and_result_checksums(attn_tp: int, name: str) -> None:
    coordinator = Coordinator(FakeMesh({name: 5}), rule(attn_tp=attn_tp), tiers(SHAPE), TARGET)
    if attn_tp == 1:
        coordinator.agree(coordinator.header())
        return
    with pytest.raises(OutOfStepError, match=f"rank 1 is at {name} 5, rank 0 at 0"):
        coordinator.agree(coordinator.header())


def test_confirm_refuses_a_plan_that_differs_between_ranks() -> None:
    coordinator = Coordinator(FakeMesh({}), rule(), tiers(SHAPE), TARGET)
    plan = coordinator.agree(coordinator.header())
    mesh = FakeMesh({})
    mesh.all_gather_row = lambda own_row: [own_row, (own_row[0] + 1,)]  # type: ignore[method-assign]
    with pytest.raises(OutOfStepError, match="rank 1 is at plan"):
        Coordinator(mesh, rule(), tiers(SHAPE), TARGET).confirm(plan)
