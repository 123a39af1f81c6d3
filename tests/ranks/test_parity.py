"""DP equals TP equals one rank: the same tokens and the same accept lengths, whatever the ranks are doing."""

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.parity.harness import VOCAB, tiny_pair
from tests.ranks.compare import Tally, check
from tests.ranks.gang import ROOT, Action, Case, Life, Ranks
from tests.ranks.workload import workload
from tests.tiny import draft_folder, target_folder

Gangs = Callable[[int], Ranks]
MESHES = ((2, 1), (2, 2), (4, 2), (4, 4))
AXES: dict[str, tuple[Any, ...]] = {
    "dp_padding": ("padded", "exact", "auto"),
    "vocab_parallel": ("attention", "world"),
    "speculative_draft_parallel": ("sharded", "replicated"),
    "tree": ((1, 3), (2, 3), (4, 2), (1, 1), (2, 4)),
    "page_size": (4, 1, 16),
    "chunks": ((5, None), (64, 3), (-1, None), (17, 17)),
    "debug_lockstep": (False, True),
    "speculative_batch_tiers": ({}, {}, {"1": 2}, {"2": 1, "4": 0}),
    "memory": ("ample", "scarce", "scarce"),
    "idle": (True, False),
}
FAST, FULL = 1, 6
REQUESTS = 25


def config(target: str, draft: str | None, topk: int = 2, num_steps: int = 3, **settings: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "model_path": target,
        "dtype": "float64",
        "device": "cpu",
        "num_threads": 1,
        "max_running_requests": 6,
        "max_total_tokens": 4096,
        "page_size": 4,
        "mixed_prefill_size": 24,
        "speculative_forced_rows": 512,
        "capture": "off",  # trees are compared, which replays do not show
    }
    if draft is not None:
        given |= {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": draft,
            "speculative_eagle_topk": topk,
            "speculative_num_steps": num_steps,
        }
    return given | settings


def crossed(turn: int, mesh: tuple[int, int]) -> dict[str, Any]:
    """The options of one case: every axis takes its values in turn, each mesh and round from another start."""
    starts = Random(f"{mesh} {turn // 12}")
    picked = {name: values[(turn + starts.randrange(len(values))) % len(values)] for name, values in AXES.items()}
    picked["tree"] = {"topk": picked["tree"][0], "num_steps": picked["tree"][1]}
    return picked


def option_case(turn: int, tp: int, dp: int) -> tuple[Case, bool]:
    """A case of the crossing, and whether its trees are those of one rank."""
    picked = crossed(turn, (tp, dp))
    chunk, mixed = picked.pop("chunks")
    tree, memory, idle = picked.pop("tree"), picked.pop("memory"), picked.pop("idle")
    chunks = {"chunked_prefill_size": chunk, "mixed_prefill_size": mixed}
    settings = picked | tree | chunks | {"tp_size": tp, "attn_dp_size": dp}
    if memory == "scarce":  # the longest request and its window fit, hardly more
        settings["max_total_tokens"] = 80
    actions = workload(
        100 * turn + 10 * tp + dp,
        dp,
        REQUESTS,
        vocab=VOCAB,
        horizon=12,
        idle=(dp - 1,) if idle and dp > 1 else (),
        aborts=0.12,
    )
    same_trees = len(picked["speculative_batch_tiers"]) < 2  # else the tier depends on who shares a rank with whom
    return Case(config(*tiny_pair(), **settings), actions), same_trees


def run_options(gangs: Gangs, tp: int, dp: int, turns: range) -> Tally:
    total = Tally()
    for turn in turns:
        case, same_trees = option_case(turn, tp, dp)
        tally = check(gangs(tp), case, same_trees)
        assert not tally.mismatches, (turn, case.config, tally.mismatches)
        total += tally
    print(f"tp{tp}/dp{dp}: {total}")
    return total


def test_option_cases_cover_every_value_on_each_mesh() -> None:
    for mesh in MESHES:
        met: dict[str, set[str]] = {name: set() for name in AXES}
        for turn in range(FULL):
            for name, value in crossed(turn, mesh).items():
                met[name].add(str(value))
        missed = {name for name, values in AXES.items() if len(met[name]) < len({str(v) for v in values})}
        assert not missed, f"{mesh} misses values of {missed}"


@pytest.mark.parametrize(
    ("tp", "dp"), [*MESHES[:2], *(pytest.param(*mesh, marks=pytest.mark.slow) for mesh in MESHES[2:])]
)
def test_several_ranks_match_one_rank(ranks: Gangs, tp: int, dp: int) -> None:
    total = run_options(ranks, tp, dp, range(FAST))
    assert total.compared > REQUESTS * FAST * 0.7
    assert dp == 1 or total.uneven > total.steps / 3


@pytest.mark.parametrize(("tiers", "same_trees"), [({1: 2}, True), ({2: 1, 4: 0}, False)])
def test_several_ranks_with_batch_tiers_match_one_rank(ranks: Gangs, tiers: dict[int, int], same_trees: bool) -> None:
    """With one limit for all the trees are those of one rank; else the tier depends on who decodes where."""
    actions = workload(4, 2, REQUESTS, vocab=VOCAB, horizon=12)
    case = Case(config(*tiny_pair(), tp_size=2, attn_dp_size=2, speculative_batch_tiers=tiers), actions)
    tally = check(ranks(2), case, same_trees)
    assert not tally.mismatches and tally.compared == REQUESTS, tally


def sharing(requests: int) -> list[Action]:
    """One prompt many times at once, and others that part from it within a page, some of them while it still runs."""
    random = Random(5)
    base = [random.randrange(2, VOCAB) for _ in range(50)]
    actions = []
    for number in range(requests):
        cut = 50 if number % 2 == 0 else random.randrange(18, 50)
        prompt = base[:cut] + [random.randrange(2, VOCAB) for _ in range(number % 2 * 7)]
        params = {"temperature": 0.8, "seed": number, "max_tokens": 12 + number % 5, "ignore_eos": True}
        fields = {"request_id": f"s{number}", "prompt_token_ids": prompt, "params": params}
        actions.append(Action(0 if number < requests // 2 else 3 + number % 3, 0, "submit", fields))
    return sorted(actions, key=lambda action: action.step)


@pytest.mark.parametrize("page_size", [4, 16])
def test_follower_ranks_share_prefix_pages_like_their_leader(ranks: Gangs, page_size: int) -> None:
    """Its table and its pools follow: pages of others, swapped ones, and cells that are copied."""
    settings = {"tp_size": 2, "page_size": page_size, "chunked_prefill_size": 40, "debug_lockstep": True}
    case = Case(config(*tiny_pair(), **settings), sharing(12))
    tally = check(ranks(2), case)
    assert not tally.mismatches and tally.counted == 12, tally
    rows = ranks(2).lives(case)[0].rows
    assert next(filter(None, rows)) == 40, "the others wait for the first one's pages"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("tp", "dp"), MESHES)
def test_several_ranks_match_one_rank_across_all_options(ranks: Gangs, tp: int, dp: int) -> None:
    total = run_options(ranks, tp, dp, range(FAST, FULL))
    assert total.compared > REQUESTS * (FULL - FAST) * 0.7 and total.counted > total.compared / 3
    assert total.aborted > 3 and total.retracted > 3
    assert sum(total.accepted[j] for j in total.accepted if j) > 15, total.accepted
    assert dp == 1 or (total.padded > 50 and total.uneven > total.steps / 3 and total.idle > 20)


@cache
def python_text() -> tuple[int, ...]:
    """What the demo pair continues: Python source."""
    tokenizer = Tokenizer.from_file(str(ROOT / "models/demo/target/tokenizer.json"))
    return tuple(tokenizer.encode(Path(textwrap.__file__).read_text(encoding="utf-8")).ids)


def demo_case(tp: int, dp: int, requests: int, **settings: Any) -> Case:
    pair = (str(ROOT / "models/demo/target"), str(ROOT / "models/demo/draft"))
    actions = workload(
        tp + dp, dp, requests, vocab=2048, horizon=10, text=python_text(), longest=60, most_tokens=24, aborts=0.1
    )
    mesh = {"tp_size": tp, "attn_dp_size": dp, "context_length": 256}
    return Case(config(*pair, **(mesh | settings)), actions)


def test_demo_pair_on_two_ranks_matches_one_rank(ranks: Gangs) -> None:
    tally = check(ranks(2), demo_case(2, 2, 10, topk=4, num_steps=4))
    assert not tally.mismatches, tally.mismatches
    assert tally.compared >= 8 and sum(tally.accepted[j] for j in (2, 3, 4)) > 12, tally


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("tp", "dp"), MESHES)
@pytest.mark.parametrize(
    "settings",
    [
        {"topk": 4, "num_steps": 3, "dp_padding": "padded"},
        {"topk": 1, "num_steps": 5, "vocab_parallel": "world", "speculative_draft_parallel": "replicated"},
    ],
    ids=["tree", "chain"],
)
def test_demo_pair_on_all_meshes_matches_one_rank(ranks: Gangs, tp: int, dp: int, settings: dict[str, Any]) -> None:
    tally = check(ranks(tp), demo_case(tp, dp, 20, **settings))
    print(f"tp{tp}/dp{dp}: {tally}")
    assert not tally.mismatches, tally.mismatches
    assert tally.compared >= 15 and sum(tally.accepted[j] for j in tally.accepted if j > 1) > 15, tally


@pytest.mark.slow
def test_weaker_draft_on_one_rank_is_detected_by_accept_lengths(ranks: Gangs) -> None:
    """Texts are right whatever the draft does; only accept lengths tell."""
    case = replace(demo_case(2, 2, 10, topk=4, num_steps=4), plant="weak draft", guilty=0, at_step=0)
    tally = check(ranks(2), case)
    assert len(tally.mismatches) > 3 and all("accept lengths" in line for line in tally.mismatches), tally


GEOMETRIES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "one kv head": ({"kv_heads": 1}, {}, {}),
    "as many kv heads as heads": ({"kv_heads": 4}, {}, {"vocab_parallel": "world"}),
    "odd vocabulary": ({"vocab_size": 29}, {}, {}),
    "odd vocabulary over the world": ({"vocab_size": 29}, {}, {"vocab_parallel": "world"}),
    "odd mlp": ({"intermediate": 51}, {"intermediate": 37}, {}),
    "biases": ({"biases": True}, {"biases": True}, {"vocab_parallel": "world"}),
    "tied head": ({"tied": True}, {}, {}),
    "shared head": ({}, {"own_head": False}, {"vocab_parallel": "world"}),
    "small draft vocabulary": ({}, {"draft_vocab": 17}, {"vocab_parallel": "world"}),
    "deep draft": ({}, {"layers": 3, "num_aux": 2}, {}),
    "wide draft": ({}, {"hidden": 48, "norm_output": True}, {"vocab_parallel": "world"}),
    "draft without aux": ({}, {"use_aux": False}, {"topk": 1}),
    "no draft": ({}, {}, {}),
    "caches in FP8": ({}, {}, {"kv_cache_dtype": "fp8_e4m3"}),
}


def geometry_case(name: str, tp: int, dp: int, **settings: Any) -> Case:
    target_options, draft_options, given = GEOMETRIES[name]
    target = target_folder(**({"vocab_size": VOCAB} | target_options))
    draft = None if name == "no draft" else draft_folder(target, **draft_options)
    mesh = {"tp_size": tp, "attn_dp_size": dp}
    vocab = target_options.get("vocab_size", VOCAB)
    actions = workload(len(name), dp, 12, vocab=vocab, horizon=10, most_tokens=10)
    return Case(config(target, draft, **(given | mesh | settings)), actions)


def geometries() -> Iterator[Any]:
    """Each on two groups of one rank and on one group of four; vocabularies over the world on two groups of two."""
    yield from ((name, 2, 1) for name in ("one kv head", "odd mlp", "biases", "caches in FP8"))
    yield "odd vocabulary over the world", 2, 2
    for name, (_, _, given) in GEOMETRIES.items():
        meshes = [(2, 2), (4, 1), *([(4, 2)] if "vocab_parallel" in given else [])]
        yield from (pytest.param(name, *mesh, marks=pytest.mark.slow) for mesh in meshes)


@pytest.mark.parametrize(("name", "tp", "dp"), geometries())
def test_each_model_geometry_on_several_ranks_matches_one_rank(ranks: Gangs, name: str, tp: int, dp: int) -> None:
    tally = check(ranks(tp), geometry_case(name, tp, dp))
    assert not tally.mismatches and tally.counted == 12, tally


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lower_precision_ranks_finish_all_requests_with_equal_logs(ranks: Gangs, dtype: str) -> None:
    case = geometry_case("odd vocabulary", 2, 2, dtype=dtype, dp_padding="padded", debug_lockstep=True)
    lives: list[Life] = ranks(2).lives(case)
    wanted = {a.request["request_id"] for a in case.actions}
    assert {name for life in lives for name in life.ended} == wanted
    assert lives[0].world_log == lives[1].world_log and sum(life.padded for life in lives) > 0
