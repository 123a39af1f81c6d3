"""A gang with data or tensor parallelism gives the tokens and accept lengths of a single rank, with all options."""

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import Tokenizer

from cluster.config import EngineConfig
from cluster.config.resolved import ResolvedSettings
from tests.distributed.compare import Tally, check
from tests.distributed.gang import ROOT, Action, Case, RankProcesses, RankReport
from tests.distributed.workload import workload
from tests.parity.harness import VOCAB, tiny_pair
from tests.support.tiny_checkpoints import draft_folder, target_folder

RanksFactory = Callable[[int], RankProcesses]
MESHES = ((2, 1), (2, 2), (4, 2), (4, 4))
OPTION_VALUES: dict[str, tuple[Any, ...]] = {
    "dp_padding": ("padded", "exact", "auto"),
    "vocab_parallel": ("attention", "world"),
    "speculative_draft_parallel": ("sharded", "replicated"),
    "tree": ((1, 3), (2, 3), (4, 2), (1, 1), (2, 4)),
    "page_size": (4, 1, 16),
    "chunks": ((5, None), (64, 3), (-1, None), (17, 17)),
    "debug_lockstep": (False, True),
    "speculative_batch_tiers": ({}, {}, {"1": 2}, {"2": 1, "4": 0}),
    "speculative_mode": ("fixed", "fixed", "adaptive"),  # only the trees of cases with fixed trees are compared
    "memory": ("ample", "scarce", "scarce"),
    "idle": (True, False),
}
FAST_TURNS, ALL_TURNS = (
    1,
    6,
)  # how many option cases of each mesh run in the fast test, and in the fast and slow tests together
REQUESTS = 25


def config(target: str, draft: str | None, topk: int = 2, num_steps: int = 3, **settings: Any) -> dict[str, Any]:
    config_dict: dict[str, Any] = {
        "model_path": target,
        "dtype": "float64",
        "device": "cpu",
        "num_threads": 1,
        "max_running_requests": 6,
        "max_total_tokens": 4096,
        "page_size": 4,
        "mixed_prefill_size": 24,
        "speculative_forced_rows": 512,
        "capture": "off",  # the tests compare trees, which replays do not report
        "speculative_mode": "fixed",  # with adaptive trees, trees depend on measured costs
    }
    if draft is not None:
        config_dict |= {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": draft,
            "speculative_eagle_topk": topk,
            "speculative_num_steps": num_steps,
        }
    return config_dict | settings


def options_of_turn(turn: int, mesh: tuple[int, int]) -> dict[str, Any]:
    """The options of case number `turn`. Each option takes its values in turn; the first value depends on the mesh, and
    changes every twelve turns.
    """
    starts = Random(f"{mesh} {turn // 12}")
    options = {
        name: values[(turn + starts.randrange(len(values))) % len(values)] for name, values in OPTION_VALUES.items()
    }
    options["tree"] = {"topk": options["tree"][0], "num_steps": options["tree"][1]}
    return options


def scarce_tokens(config_dict: dict[str, Any], actions: list[Action]) -> int:
    """Return a size of the KV cache in which one page more fits than the longest request and its window need."""
    settings, page_size = EngineConfig.model_validate(config_dict), config_dict["page_size"]
    submits = [action.request for action in actions if action.kind == "submit"]
    longest = max(len(fields["prompt_token_ids"]) + fields["params"]["max_tokens"] for fields in submits)
    pages = -(-(longest + ResolvedSettings.from_settings(settings).shape.window) // page_size) + 1
    return pages * page_size


def option_case(turn: int, tp: int, dp: int) -> tuple[Case, bool]:
    """Option case number `turn` of a mesh, and whether the gang's trees must equal those of a single rank."""
    options = options_of_turn(turn, (tp, dp))
    chunk, mixed = options.pop("chunks")
    tree, memory, idle = options.pop("tree"), options.pop("memory"), options.pop("idle")
    chunks = {"chunked_prefill_size": chunk, "mixed_prefill_size": mixed}
    settings = options | tree | chunks | {"tp_size": tp, "attn_dp_size": dp}
    actions = workload(
        100 * turn + 10 * tp + dp,
        dp,
        REQUESTS,
        vocab=VOCAB,
        horizon=12,
        idle_ranks=(dp - 1,) if idle and dp > 1 else (),
        abort_share=0.12,
    )
    if memory == "scarce":
        settings["max_total_tokens"] = scarce_tokens(config(*tiny_pair(), **settings), actions)
    # Otherwise the tier depends on which requests share a rank, or on measured costs.
    same_trees = len(options["speculative_batch_tiers"]) < 2 and options["speculative_mode"] == "fixed"
    return Case(config(*tiny_pair(), **settings), actions), same_trees


def run_options(ranks: RanksFactory, tp: int, dp: int, turns: range) -> Tally:
    """Compare the option cases `turns` of a mesh with a single rank; return the sum of their tallies."""
    total = Tally()
    for turn in turns:
        case, same_trees = option_case(turn, tp, dp)
        tally = check(ranks(tp), case, same_trees)
        assert not tally.mismatches, (turn, case.config, tally.mismatches)
        total += tally
    print(f"tp{tp}/dp{dp}: {total}")
    return total


def test_option_cases_cover_every_value_on_each_mesh() -> None:
    for mesh in MESHES:
        covered_values: dict[str, set[str]] = {name: set() for name in OPTION_VALUES}
        for turn in range(ALL_TURNS):
            for name, value in options_of_turn(turn, mesh).items():
                covered_values[name].add(str(value))
        incomplete_options = {
            name for name, values in OPTION_VALUES.items() if len(covered_values[name]) < len({str(v) for v in values})
        }
        assert not incomplete_options, f"no case of mesh {mesh} has some values of {incomplete_options}"


@pytest.mark.parametrize(
    ("tp", "dp"), [*MESHES[:2], *(pytest.param(*mesh, marks=pytest.mark.slow) for mesh in MESHES[2:])]
)
def test_several_ranks_match_one_rank(ranks: RanksFactory, tp: int, dp: int) -> None:
    total = run_options(ranks, tp, dp, range(FAST_TURNS))
    assert total.compared_requests > REQUESTS * FAST_TURNS * 0.7
    assert dp == 1 or total.uneven_steps > total.steps / 3


@pytest.mark.parametrize(("tiers", "same_trees"), [({1: 2}, True), ({2: 1, 4: 0}, False)])
def test_several_ranks_with_batch_tiers_match_one_rank(
    ranks: RanksFactory, tiers: dict[int, int], same_trees: bool
) -> None:
    """With one limit for any number of requests the trees equal those of a single rank. With several limits the tier
    depends on how many requests decode on each rank.
    """
    actions = workload(4, 2, REQUESTS, vocab=VOCAB, horizon=12)
    case = Case(config(*tiny_pair(), tp_size=2, attn_dp_size=2, speculative_batch_tiers=tiers), actions)
    tally = check(ranks(2), case, same_trees)
    assert not tally.mismatches and tally.compared_requests == REQUESTS, tally


def shared_prefix_actions(request_count: int) -> list[Action]:
    """Submits of requests that share a prefix. Half of them have the same prompt of 50 tokens. The others share its
    first 18 to 49 tokens and then differ. One half of all requests comes before step 0, the other before steps 3 to 5.
    """
    random = Random(5)
    base = [random.randrange(2, VOCAB) for _ in range(50)]
    actions = []
    for request_number in range(request_count):
        shared_length = 50 if request_number % 2 == 0 else random.randrange(18, 50)
        prompt = base[:shared_length] + [random.randrange(2, VOCAB) for _ in range(request_number % 2 * 7)]
        params = {"temperature": 0.8, "seed": request_number, "max_tokens": 12 + request_number % 5, "ignore_eos": True}
        fields = {"request_id": f"s{request_number}", "prompt_token_ids": prompt, "params": params}
        actions.append(
            Action(0 if request_number < request_count // 2 else 3 + request_number % 3, 0, "submit", fields)
        )
    return sorted(actions, key=lambda action: action.step)


@pytest.mark.parametrize("page_size", [4, 16])
def test_follower_ranks_share_prefix_pages_like_their_leader(ranks: RanksFactory, page_size: int) -> None:
    """The page table and the pools of the follower change like those of the leader: with pages of other requests,
    swapped pages, and copied cells.
    """
    settings = {"tp_size": 2, "page_size": page_size, "chunked_prefill_size": 40, "debug_lockstep": True}
    case = Case(config(*tiny_pair(), **settings), shared_prefix_actions(12))
    tally = check(ranks(2), case)
    assert not tally.mismatches and tally.compared_trees == 12, tally
    rows = ranks(2).run_without_failure(case)[0].rows
    assert next(filter(None, rows)) == 40, "the other requests must wait for the pages of the first request"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("tp", "dp"), MESHES)
def test_several_ranks_match_one_rank_across_all_options(ranks: RanksFactory, tp: int, dp: int) -> None:
    total = run_options(ranks, tp, dp, range(FAST_TURNS, ALL_TURNS))
    assert (
        total.compared_requests > REQUESTS * (ALL_TURNS - FAST_TURNS) * 0.7
        and total.compared_trees > total.compared_requests / 3
    )
    assert total.aborted_requests > 3 and total.retractions > 3
    assert sum(total.trees_by_accept_length[j] for j in total.trees_by_accept_length if j) > 15, (
        total.trees_by_accept_length
    )
    assert dp == 1 or (total.padding_rows > 50 and total.uneven_steps > total.steps / 3 and total.idle_rank_steps > 20)


@cache
def python_text() -> tuple[int, ...]:
    """The token ids of Python source code, which the demo pair was made to continue."""
    tokenizer = Tokenizer.from_file(str(ROOT / "models/demo/target/tokenizer.json"))
    return tuple(tokenizer.encode(Path(textwrap.__file__).read_text(encoding="utf-8")).ids)


def demo_case(tp: int, dp: int, request_count: int, **settings: Any) -> Case:
    pair = (str(ROOT / "models/demo/target"), str(ROOT / "models/demo/draft"))
    actions = workload(
        tp + dp,
        dp,
        request_count,
        vocab=2048,
        horizon=10,
        source_tokens=python_text(),
        max_prompt_tokens=60,
        max_new_tokens=24,
        abort_share=0.1,
    )
    mesh = {"tp_size": tp, "attn_dp_size": dp, "context_length": 256}
    return Case(config(*pair, **(mesh | settings)), actions)


def test_demo_pair_on_two_ranks_matches_one_rank(ranks: RanksFactory) -> None:
    tally = check(ranks(2), demo_case(2, 2, 10, topk=4, num_steps=4))
    assert not tally.mismatches, tally.mismatches
    assert tally.compared_requests >= 8 and sum(tally.trees_by_accept_length[j] for j in (2, 3, 4)) > 12, tally


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
def test_demo_pair_on_all_meshes_matches_one_rank(
    ranks: RanksFactory, tp: int, dp: int, settings: dict[str, Any]
) -> None:
    tally = check(ranks(tp), demo_case(tp, dp, 20, **settings))
    print(f"tp{tp}/dp{dp}: {tally}")
    assert not tally.mismatches, tally.mismatches
    assert (
        tally.compared_requests >= 15
        and sum(tally.trees_by_accept_length[j] for j in tally.trees_by_accept_length if j > 1) > 15
    ), tally


@pytest.mark.slow
def test_weaker_draft_on_one_rank_is_detected_by_accept_lengths(ranks: RanksFactory) -> None:
    """The tokens are right whatever the draft proposes. Only accept lengths show that the draft is weaker."""
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
"""By name: options of the target, options of the draft, and settings of the engine."""


def geometry_case(name: str, tp: int, dp: int, **settings: Any) -> Case:
    target_options, draft_options, geometry_settings = GEOMETRIES[name]
    target = target_folder(**({"vocab_size": VOCAB} | target_options))
    draft = None if name == "no draft" else draft_folder(target, **draft_options)
    mesh_settings = {"tp_size": tp, "attn_dp_size": dp}
    vocab = target_options.get("vocab_size", VOCAB)
    actions = workload(len(name), dp, 12, vocab=vocab, horizon=10, max_new_tokens=10)
    return Case(config(target, draft, **(geometry_settings | mesh_settings | settings)), actions)


def geometries() -> Iterator[Any]:
    """Parameters (name, tp, dp). The slow cases run each geometry on two attention groups of one rank and on one group
    of four. A geometry with a setting `vocab_parallel` also runs on two groups of two.
    """
    yield from ((name, 2, 1) for name in ("one kv head", "odd mlp", "biases", "caches in FP8"))
    yield "odd vocabulary over the world", 2, 2
    for name, (_, _, geometry_settings) in GEOMETRIES.items():
        meshes = [(2, 2), (4, 1), *([(4, 2)] if "vocab_parallel" in geometry_settings else [])]
        yield from (pytest.param(name, *mesh, marks=pytest.mark.slow) for mesh in meshes)


@pytest.mark.parametrize(("name", "tp", "dp"), geometries())
def test_each_model_geometry_on_several_ranks_matches_one_rank(
    ranks: RanksFactory, name: str, tp: int, dp: int
) -> None:
    tally = check(ranks(tp), geometry_case(name, tp, dp))
    assert not tally.mismatches and tally.compared_trees == 12, tally


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lower_precision_ranks_finish_all_requests_with_equal_logs(ranks: RanksFactory, dtype: str) -> None:
    case = geometry_case("odd vocabulary", 2, 2, dtype=dtype, dp_padding="padded", debug_lockstep=True)
    reports: list[RankReport] = ranks(2).run_without_failure(case)
    expected_ids = {a.request["request_id"] for a in case.actions}
    assert {name for report in reports for name in report.ended} == expected_ids
    assert reports[0].world_log == reports[1].world_log and sum(report.padding_rows for report in reports) > 0
