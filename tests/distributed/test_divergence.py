"""When one rank falls out of step, every rank names it within two seconds, and no process ends because of it."""

import ast
import os
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import pytest

from tests.distributed.gang import (
    NOTICE_SLACK,
    ROOT,
    Action,
    Case,
    ExitedProcess,
    RankFailure,
    RankProcesses,
    RankReport,
)
from tests.distributed.of_experts import EXPERT_PLANTS, FAST_EXPERT_PLANTS
from tests.distributed.plants import CAPTURE_PLANTS, PLANTS, SHARD_PLANTS
from tests.distributed.test_experts import FIVE_EXPERT_TARGET
from tests.distributed.test_parity import config
from tests.parity.harness import VOCAB, tiny_pair
from tests.parity.pairs import draft_of
from tests.support.families import family_checkpoint
from tests.support.tiny_checkpoints import draft_folder, target_folder

RanksFactory = Callable[[int], RankProcesses]
MAX_NOTICE_S = 2.0 * NOTICE_SLACK
MAX_LOSS_NOTICE_S = 1.0 * NOTICE_SLACK
AT_STEP = 6
OVERLAP = int(os.environ.get("OVERLAP", "0"))  # 1: the host reads, and so compares, results one step later
PHASES = {"agree", "order", "draft", "target", "extend", "after extend", "replay"}
SINGLE_GROUP_PLANTS = {name for name in PLANTS if "reduce," in name or "follower" in name or "in a group" in name} | {
    "wrong width of a sum",
    "one reduce more",
    "other results",
}
FOUR_RANK_CASES = (
    ("wrong group", 2, 2),
    ("skips gather, draft", 2, 2),
    ("skips reduce, target", 2, 3),
    ("skips head, extend", 2, 1),
    ("reduce_scatter not entered", 4, 3),
    ("other tier", 4, 2),
    ("other last plan", 4, 3),
    ("follower reverses the requests", 2, 3),
    ("skips dispatch, target", 4, 2),
    ("sends other counts", 2, 3),
    ("sends counts of too many rows", 4, 1),
    ("all-to-all not entered", 2, 2),
)
# A pure function makes the plan from facts that are equal on all ranks. If the function itself is wrong on one rank,
# only the additional all-gather of `debug_lockstep` finds it in time.
NEEDS_DEBUG = ("other plan, padding", "other plan, tier", "other plan, mode", "other plan, key", "other plan, counts")
SEPARATELY_TESTED_PLANTS = ("breaks", "dies", "weak draft")
PADDED_PLANTS = ("no idle rows", "stale plan")
FILTERED_PARAMS = {"top_k": 12, "top_p": 0.9, "logprobs": 2}


def busy_actions(dp: int, **param_overrides: Any) -> list[Action]:
    """Actions that keep every rank busy with long requests: two for each rank before step 0, and up to two more for
    each rank before every other step. The last rank gets fewer than the others.
    """
    generator, actions = Random(5), []
    for request_number in range(12 * dp):
        rank = request_number % dp
        step = 0 if request_number < 2 * dp else 2 + request_number // (2 * dp) * 2
        if request_number >= 2 * dp and rank == dp - 1 and dp > 1 and request_number % 3:
            continue
        params = {"temperature": 0.8, "seed": request_number, "max_tokens": 60, "ignore_eos": True} | param_overrides
        prompt = [generator.randrange(VOCAB) for _ in range(generator.randint(5, 20))]
        request = {"request_id": f"r{request_number}", "prompt_token_ids": prompt, "params": params}
        actions.append(Action(step, rank, "submit", request))
    return sorted(actions, key=lambda action: action.step)


def planted_case(name: str, tp: int, dp: int, guilty: int) -> Case:
    """The case in which the plant called `name` goes wrong on rank `guilty`, with the settings that the plant needs."""
    settings: dict[str, Any] = {"debug_lockstep": name in NEEDS_DEBUG}
    if name in PADDED_PLANTS:
        settings["dp_padding"] = "padded"
    if name in SHARD_PLANTS and dp > 1:
        settings["vocab_parallel"] = "world"
    if name in CAPTURE_PLANTS:
        settings |= {"capture": "on", "capture_sizes": [1, 2, 4, 8, 16, 32], "dp_padding": "padded"}
    pair = tiny_pair()
    if name in EXPERT_PLANTS:
        settings |= {"ep_size": tp, "dp_padding": "exact", "speculative_algorithm": "NEXTN"}
        pair = family_checkpoint(*FIVE_EXPERT_TARGET).folder, draft_of("nextn-sparse")
    actions = busy_actions(dp, **(FILTERED_PARAMS if name in SHARD_PLANTS else {}))
    mesh_settings = {"tp_size": tp, "attn_dp_size": dp, "max_running_requests": 16}
    return Case(config(*pair, **mesh_settings, **settings), actions, plant=name, guilty=guilty, at_step=AT_STEP)


def check_all_ranks_blame_faulty_rank(ranks: RankProcesses, case: Case) -> None:
    """Run the case. Every rank must name the guilty rank, a step and a phase in time, and its process must go on."""
    answers = ranks.run(case, timeout_s=60)
    assert ranks.fault_time_and_step is not None, f"the fault {case.plant!r} never happened: {answers}"
    fault_time, fault_step = ranks.fault_time_and_step
    for rank, answer in enumerate(answers):
        assert isinstance(answer, RankFailure), f"rank {rank}: {answer}"
        assert answer.kind == ("PeerLostError" if " left: " in answer.error else "OutOfStepError"), answer
        assert answer.at - fault_time < MAX_NOTICE_S, f"rank {rank} noticed after {answer.at - fault_time:.2f} s"
        assert answer.rank == case.guilty and f"rank {case.guilty} " in answer.error, f"rank {rank}: {answer}"
        steps = range(fault_step - 1, fault_step + 2 + OVERLAP)
        assert answer.step in steps and answer.phase in PHASES, f"rank {rank}: {answer}"
        assert any(f"(step {n}, phase " in answer.error for n in steps), f"rank {rank}: {answer}"
    slowest = max(answer.at for answer in answers) - fault_time  # type: ignore[union-attr]
    print(f"{case.plant}: {slowest:.2f} s, {answers[case.guilty].error}")  # type: ignore[union-attr]


def plants_with_slow_marks(names: Iterable[str]) -> list[Any]:
    """Parameters for the plants. Three of four plants are marked slow, and so are the plants of experts that are not in
    `FAST_EXPERT_PLANTS`.
    """
    slow_names = EXPERT_PLANTS.keys() - FAST_EXPERT_PLANTS
    return [
        pytest.param(name, marks=pytest.mark.slow if position % 4 or name in slow_names else ())
        for position, name in enumerate(names)
    ]


@pytest.mark.parametrize(
    "name", plants_with_slow_marks(name for name in PLANTS if name not in ("wrong group", *SEPARATELY_TESTED_PLANTS))
)
def test_every_rank_names_the_diverging_rank_in_time(ranks: RanksFactory, name: str) -> None:
    check_all_ranks_blame_faulty_rank(
        ranks(2), planted_case(name, 2, 1 if name in SINGLE_GROUP_PLANTS else 2, guilty=1)
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dp", "guilty"), FOUR_RANK_CASES)
def test_diverging_rank_of_four_is_named_by_every_rank(ranks: RanksFactory, name: str, dp: int, guilty: int) -> None:
    check_all_ranks_blame_faulty_rank(ranks(4), planted_case(name, 4, dp, guilty))


def test_exception_message_of_one_rank_reaches_its_peers(ranks: RanksFactory) -> None:
    gang = ranks(2)
    peer, broken = gang.run(planted_case("breaks", 2, 2, guilty=1), timeout_s=60)  # the plant raises an error
    assert isinstance(peer, RankFailure) and isinstance(broken, RankFailure) and gang.fault_time_and_step is not None
    assert broken.kind == "ValueError"
    assert peer.kind == "PeerLostError" and "rank 1 left: ValueError: a bug of this rank alone" in peer.error
    assert (peer.rank, peer.step) == (1, gang.fault_time_and_step[1]) and peer.at - gang.fault_time_and_step[
        0
    ] < MAX_LOSS_NOTICE_S


@pytest.mark.parametrize(
    ("tp", "guilty"), [(2, 0), (2, 1), *(pytest.param(4, guilty, marks=pytest.mark.slow) for guilty in (0, 2))]
)
def test_peers_of_a_killed_rank_name_that_rank_within_a_second(ranks: RanksFactory, tp: int, guilty: int) -> None:
    gang, case = ranks(tp), planted_case("dies", tp, 2, guilty)
    answers = gang.run(case, timeout_s=60)
    assert answers[case.guilty] == ExitedProcess(-9) and gang.fault_time_and_step is not None
    fault_time, fault_step = gang.fault_time_and_step
    for answer in [a for rank, a in enumerate(answers) if rank != case.guilty]:
        assert isinstance(answer, RankFailure) and answer.kind == "PeerLostError", answer
        assert answer.rank == case.guilty and f"rank {case.guilty} is gone" in answer.error, answer
        assert (
            answer.step == fault_step
            and answer.phase in PHASES
            and f"step {fault_step}, phase {answer.phase}" in answer.error
        )
        assert answer.at - fault_time < MAX_LOSS_NOTICE_S, f"noticed after {answer.at - fault_time:.2f} s"
        print(f"killed rank {case.guilty}: {answer.at - fault_time:.2f} s, {answer.error}")


@pytest.mark.parametrize(
    ("name", "value", "reported_name"),
    [
        ("page_size", 8, "page_size"),
        ("speculative_num_steps", 2, "speculative_num_steps"),
        ("dp_padding", "padded", "dp_padding"),
        ("dtype", "float32", "dtype"),
        ("model_path", lambda: target_folder(vocab_size=VOCAB, kv_heads=4), "target"),
        ("speculative_draft_model_path", lambda: draft_folder(tiny_pair()[0], norm_output=True), "draft"),
    ],
)
def test_ranks_with_different_settings_or_models_refuse_to_start(
    ranks: RanksFactory, name: str, value: Any, reported_name: str
) -> None:
    config_dict = config(*tiny_pair(), tp_size=2, attn_dp_size=2)
    other_value = value() if callable(value) else value
    for answer in ranks(2).run(Case(config_dict, own={1: {name: other_value}})):
        assert isinstance(answer, RankFailure) and answer.kind == "ConfigError", answer
        assert answer.error.startswith(f"{reported_name} is ") and "rank 0" in answer.error and "rank 1" in answer.error


def test_rank_processes_run_a_normal_case_after_a_planted_failure(ranks: RanksFactory) -> None:
    """The processes that ran a planted fault run another case."""
    failed = ranks(2).run(planted_case("breaks", 2, 2, guilty=1), timeout_s=60)
    assert all(isinstance(answer, RankFailure) for answer in failed), failed
    answers = ranks(2).run(Case(planted_case("", 2, 2, 1).config, busy_actions(2)))
    assert all(isinstance(answer, RankReport) for answer in answers), answers


@pytest.mark.parametrize(("tp", "dp"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_idle_ranks_use_no_cpu_and_wake_together(ranks: RanksFactory, tp: int, dp: int) -> None:
    """Each rank, leader or follower, wakes the others once."""
    config_dict = config(*tiny_pair(), tp_size=tp, attn_dp_size=dp)
    reports = ranks(tp).run_without_failure(Case(config_dict, busy_actions(dp)[: 2 * dp], naps=tp))
    for ringer in range(tp):
        sleeps = [report.naps[ringer] for report in reports]
        rang_at = sleeps[ringer].rang
        for rank, sleep in enumerate(sleeps):
            assert sleep.seconds > 0.2 and sleep.cpu < 0.02 * NOTICE_SLACK, f"rank {rank} slept {sleep}"
            assert 0 <= sleep.woke - rang_at < 0.5 * NOTICE_SLACK, (
                f"rank {rank} woke {sleep.woke - rang_at:.3f} s after rank {ringer} rang"
            )


STARTUP_MODULES = tuple(
    f"cluster/{name}.py" for name in ("engine/calibrate", "engine/one_shot_setting", "engine/workspace", "kv/budget")
)
"""Modules that may call collectives while the ranks start: to agree on the measured times of steps, on how sums are
made, and on the memory for pages.
"""
MESH_MODULES = ("mesh.py", "process_group.py", "heartbeat.py")
"""Files that may import torch.distributed: they make the mesh, its collectives, and the heartbeats in its store."""


def test_only_the_lockstep_script_calls_collectives() -> None:
    """A collective that is not in the script cannot be compared with it."""
    names = {"reduce_scatter", "all_reduce", "all_to_all", "broadcast", "all_gather_row"}
    axes = ("world", "attn", "facts", "axis")  # `gather` of these is a collective; tensors have `gather` too
    violations, checked_nodes = [], 0
    for path in sorted((ROOT / "cluster").rglob("*.py")):
        relative_path = path.relative_to(ROOT)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = isinstance(node, ast.Attribute) and (
                node.attr in names or (node.attr == "gather" and ast.unparse(node.value).split(".")[-1] in axes)
            )
            imported = isinstance(node, ast.Import | ast.ImportFrom) and "torch.distributed" in ast.unparse(node)
            checked_nodes += called or imported
            if (
                called
                and str(relative_path) not in STARTUP_MODULES
                and relative_path.parts[1] in ("models", "sampling", "spec", "kv", "attention", "engine")
            ):
                violations.append(f"{relative_path}:{node.lineno} calls {node.attr}")  # type: ignore[attr-defined]
            if imported and path.name not in MESH_MODULES:
                violations.append(f"{relative_path}:{node.lineno} imports torch.distributed")  # type: ignore[attr-defined]
    assert checked_nodes and not violations, violations
