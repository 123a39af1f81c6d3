"""A rank that falls out of step is named by every rank within two seconds, and no process ends of it."""

import ast
import os
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import pytest

from tests.families import made
from tests.parity.harness import VOCAB, tiny_pair
from tests.parity.pairs import draft_of
from tests.ranks.gang import ROOT, Action, Case, Dead, Life, Lost, Ranks
from tests.ranks.of_experts import OF_EXPERTS, QUICK
from tests.ranks.plants import OF_CAPTURES, OF_SHARDS, PLANTS
from tests.ranks.test_experts import UNEVEN
from tests.ranks.test_parity import config
from tests.tiny import draft_folder, target_folder

Gangs = Callable[[int], Ranks]
NOTICED_S = 2.0
LOST_S = 1.0
AT_STEP = 6
OVERLAP = int(os.environ.get("OVERLAP", "0"))  # results are read, and so compared, a step later
PHASES = {"agree", "order", "draft", "target", "extend", "after extend", "replay"}
IN_A_GROUP = {name for name in PLANTS if "reduce," in name or "follower" in name or "in a group" in name} | {
    "wrong width of a sum",
    "one reduce more",
    "other results",
}
OF_FOUR = (
    ("wrong group", 2, 2),
    ("skips gather, draft", 2, 2),
    ("skips reduce, target", 2, 3),
    ("skips head, extend", 2, 1),
    ("reduce_scatter not entered", 4, 3),
    ("other tier", 4, 2),
    ("other last plan", 4, 3),
    ("follower turns the requests", 2, 3),
    ("skips dispatch, target", 4, 2),
    ("tells other counts", 2, 3),
    ("tells of more rows than there are", 4, 1),
    ("all-to-all not entered", 2, 2),
)
# The plan comes from equal facts by a pure function. Where it is the function that fails, only one more all-gather
# tells in time.
NEEDS_DEBUG = ("other plan, padding", "other plan, tier", "other plan, mode", "other plan, key", "other plan, counts")
OTHER = ("breaks", "dies", "weak draft")
PADDED = ("no idle rows", "stale plan")
FILTERED = {"top_k": 12, "top_p": 0.9, "logprobs": 2}


def busy(dp: int, **more: Any) -> list[Action]:
    """Long requests on every rank, unevenly many, and two more with other lengths every other step."""
    random, actions = Random(5), []
    for number in range(12 * dp):
        rank = number % dp
        step = 0 if number < 2 * dp else 2 + number // (2 * dp) * 2
        if number >= 2 * dp and rank == dp - 1 and dp > 1 and number % 3:
            continue
        params = {"temperature": 0.8, "seed": number, "max_tokens": 60, "ignore_eos": True} | more
        prompt = [random.randrange(VOCAB) for _ in range(random.randint(5, 20))]
        request = {"request_id": f"r{number}", "prompt_token_ids": prompt, "params": params}
        actions.append(Action(step, rank, "submit", request))
    return sorted(actions, key=lambda action: action.step)


def planted_case(name: str, tp: int, dp: int, guilty: int) -> Case:
    settings: dict[str, Any] = {"debug_lockstep": name in NEEDS_DEBUG}
    if name in PADDED:
        settings["dp_padding"] = "padded"
    if name in OF_SHARDS and dp > 1:
        settings["vocab_parallel"] = "world"
    if name in OF_CAPTURES:
        settings |= {"capture": "on", "capture_sizes": [1, 2, 4, 8, 16, 32], "dp_padding": "padded"}
    pair = tiny_pair()
    if name in OF_EXPERTS:
        settings |= {"ep_size": tp, "dp_padding": "exact", "speculative_algorithm": "NEXTN"}
        pair = made(*UNEVEN).folder, draft_of("nextn-sparse")
    actions = busy(dp, **(FILTERED if name in OF_SHARDS else {}))
    mesh = {"tp_size": tp, "attn_dp_size": dp, "max_running_requests": 16}
    return Case(config(*pair, **mesh, **settings), actions, plant=name, guilty=guilty, at_step=AT_STEP)


def check_named(ranks: Ranks, case: Case) -> None:
    """Every rank must name the guilty one, a step and a phase, in time, and live on."""
    answers = ranks.run(case, timeout_s=60)
    assert ranks.struck is not None, f"{case.plant} was never planted: {answers}"
    struck, step = ranks.struck
    for rank, answer in enumerate(answers):
        assert isinstance(answer, Lost), f"rank {rank}: {answer}"
        assert answer.kind == ("PeerLostError" if " left: " in answer.error else "OutOfStepError"), answer
        assert answer.at - struck < NOTICED_S, f"rank {rank} noticed after {answer.at - struck:.2f} s"
        assert answer.rank == case.guilty and f"rank {case.guilty} " in answer.error, f"rank {rank}: {answer}"
        steps = range(step - 1, step + 2 + OVERLAP)
        assert answer.step in steps and answer.phase in PHASES, f"rank {rank}: {answer}"
        assert any(f"(step {n}, phase " in answer.error for n in steps), f"rank {rank}: {answer}"
    slowest = max(answer.at for answer in answers) - struck  # type: ignore[union-attr]
    print(f"{case.plant}: {slowest:.2f} s, {answers[case.guilty].error}")  # type: ignore[union-attr]


def marked(names: Iterable[str]) -> list[Any]:
    """Every other one is among the slow ones, and those of experts that `QUICK` does not name."""
    slow = OF_EXPERTS.keys() - QUICK
    return [
        pytest.param(name, marks=pytest.mark.slow if at % 2 or name in slow else ()) for at, name in enumerate(names)
    ]


@pytest.mark.parametrize("name", marked(name for name in PLANTS if name not in ("wrong group", *OTHER)))
def test_every_rank_names_the_diverging_rank_in_time(ranks: Gangs, name: str) -> None:
    check_named(ranks(2), planted_case(name, 2, 1 if name in IN_A_GROUP else 2, guilty=1))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dp", "guilty"), OF_FOUR)
def test_diverging_rank_of_four_is_named_by_every_rank(ranks: Gangs, name: str, dp: int, guilty: int) -> None:
    check_named(ranks(4), planted_case(name, 4, dp, guilty))


def test_exception_message_of_one_rank_reaches_its_peers(ranks: Gangs) -> None:
    gang = ranks(2)
    peer, broken = gang.run(planted_case("breaks", 2, 2, guilty=1), timeout_s=60)
    assert isinstance(peer, Lost) and isinstance(broken, Lost) and gang.struck is not None
    assert broken.kind == "ValueError"
    assert peer.kind == "PeerLostError" and "rank 1 left: ValueError: a bug of this rank alone" in peer.error
    assert (peer.rank, peer.step) == (1, gang.struck[1]) and peer.at - gang.struck[0] < LOST_S


@pytest.mark.parametrize(
    ("tp", "guilty"), [(2, 0), (2, 1), *(pytest.param(4, guilty, marks=pytest.mark.slow) for guilty in (0, 2))]
)
def test_peers_of_a_killed_rank_name_that_rank_within_a_second(ranks: Gangs, tp: int, guilty: int) -> None:
    gang, case = ranks(tp), planted_case("dies", tp, 2, guilty)
    answers = gang.run(case, timeout_s=60)
    assert answers[case.guilty] == Dead(-9) and gang.struck is not None
    struck, step = gang.struck
    for answer in [a for rank, a in enumerate(answers) if rank != case.guilty]:
        assert isinstance(answer, Lost) and answer.kind == "PeerLostError", answer
        assert answer.rank == case.guilty and f"rank {case.guilty} is gone" in answer.error, answer
        assert answer.step == step and answer.phase in PHASES and f"step {step}, phase {answer.phase}" in answer.error
        assert answer.at - struck < LOST_S, f"noticed after {answer.at - struck:.2f} s"
        print(f"killed rank {case.guilty}: {answer.at - struck:.2f} s, {answer.error}")


@pytest.mark.parametrize(
    ("name", "value", "said"),
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
    ranks: Gangs, name: str, value: Any, said: str
) -> None:
    given = config(*tiny_pair(), tp_size=2, attn_dp_size=2)
    other = value() if callable(value) else value
    for answer in ranks(2).run(Case(given, own={1: {name: other}}), timeout_s=10):
        assert isinstance(answer, Lost) and answer.kind == "ConfigError", answer
        assert answer.error.startswith(f"{said} is ") and "rank 0" in answer.error and "rank 1" in answer.error


def test_rank_processes_run_a_normal_case_after_planted_failures(ranks: Gangs) -> None:
    """The same processes, with a new life."""
    assert all(isinstance(answer, Life) for answer in ranks(2).run(Case(planted_case("", 2, 2, 1).config, busy(2))))


@pytest.mark.parametrize(("tp", "dp"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_idle_ranks_use_no_cpu_and_wake_together(ranks: Gangs, tp: int, dp: int) -> None:
    """Every rank rings once, leader or follower."""
    given = config(*tiny_pair(), tp_size=tp, attn_dp_size=dp)
    lives = ranks(tp).lives(Case(given, busy(dp)[: 2 * dp], naps=tp))
    for ringer in range(tp):
        naps = [life.naps[ringer] for life in lives]
        rang = naps[ringer].rang
        for rank, nap in enumerate(naps):
            assert nap.seconds > 0.2 and nap.cpu < 0.02, f"rank {rank} slept {nap}"
            assert 0 <= nap.woke - rang < 0.5, f"rank {rank} woke {nap.woke - rang:.3f} s after rank {ringer} rang"


BEFORE_THE_FIRST_STEP = tuple(
    f"cluster/{name}.py" for name in ("engine/calibrate", "engine/one_shot_setting", "engine/workspace", "kv/budget")
)
"""What asks all ranks while they start: the pace of steps, how sums are made, and the room for pages."""
MAKING = ("mesh.py", "process_group.py", "heartbeat.py")
"""What knows torch.distributed: who makes the mesh, its collectives, and the signs of life in its store."""


def test_only_the_lockstep_script_calls_collectives() -> None:
    """What the script does not know cannot be held to it."""
    names = {"reduce_scatter", "all_reduce", "all_to_all", "broadcast", "all_gather_row"}
    axes = ("world", "attn", "facts", "axis")  # tensors gather too
    wrong, seen = [], 0
    for path in sorted((ROOT / "cluster").rglob("*.py")):
        where = path.relative_to(ROOT)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = isinstance(node, ast.Attribute) and (
                node.attr in names or (node.attr == "gather" and ast.unparse(node.value).split(".")[-1] in axes)
            )
            imported = isinstance(node, ast.Import | ast.ImportFrom) and "torch.distributed" in ast.unparse(node)
            seen += called or imported
            if (
                called
                and str(where) not in BEFORE_THE_FIRST_STEP
                and where.parts[1] in ("models", "sampling", "spec", "kv", "attention", "engine")
            ):
                wrong.append(f"{where}:{node.lineno} calls {node.attr}")  # type: ignore[attr-defined]
            if imported and path.name not in MAKING:
                wrong.append(f"{where}:{node.lineno} imports torch.distributed")  # type: ignore[attr-defined]
    assert seen and not wrong, wrong
