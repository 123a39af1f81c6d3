"""Which requests the engine refuses, what it reports, and where it cuts generated tokens."""

import json

import pytest

from cluster.engine import Engine, build_engine
from cluster.engine.finish import Cut, FinishCheck
from cluster.request import LogitAdjustments, Request, RequestParams
from cluster.tokenizer.tokenizer import TextTokenizer
from tests.parity.harness import GREEDY, config_of, grid_requests, make_request, run, scarce_config, tiny_pair
from tests.support.tiny_checkpoints import draft_folder, letters_folder, target_folder


@pytest.fixture
def engine() -> Engine:
    return build_engine(config_of(target_folder(), context_length=60, max_total_tokens=40))


@pytest.mark.parametrize(
    ("unservable", "message"),
    [
        (make_request("r", [], GREEDY), "prompt must hold at least one token"),
        (Request("r", (5, 6), GREEDY, resumed_tokens=2), "prompt must hold at least one token"),
        (make_request("r", [5, 64], GREEDY), "token id 64, outside the vocabulary of 64"),
        (make_request("r", [-1], GREEDY), "token id -1"),
        (make_request("r", [5] * 50, GREEDY, max_tokens=11), "context length of 60"),
        (make_request("r", [5] * 30, GREEDY, max_tokens=11), "KV cache of 40 tokens; lower max_tokens or give"),
        (make_request("r", [5], GREEDY, stop=("x",)), "stop needs a tokenizer"),
    ],
)
def test_engine_refuses_unservable_requests_with_a_message(unservable: Request, message: str, engine: Engine) -> None:
    for submit_or_check in (engine.check, engine.submit):
        with pytest.raises(ValueError, match=message):
            submit_or_check(unservable)
    assert not engine.has_work


def test_engine_admits_requests_up_to_the_reported_max_request_tokens(engine: Engine) -> None:
    max_request_tokens = engine.info().max_request_tokens
    assert max_request_tokens == 40 - 1, "all KV tokens except the window"
    engine.check(make_request("r", [5] * 20, GREEDY, max_tokens=max_request_tokens - 20))
    with pytest.raises(ValueError, match="KV cache of 40 tokens"):
        engine.check(make_request("r", [5] * 20, GREEDY, max_tokens=max_request_tokens - 19))
    target = target_folder()
    large_engine = build_engine(config_of(target, draft_folder(target), 4, 3, context_length=60))
    assert large_engine.info().max_request_tokens == 60
    assert large_engine.info().kv_sized_by == "max_total_tokens"


def test_engine_refuses_a_request_id_that_is_in_use(engine: Engine) -> None:
    repeated_request = make_request("r", [5], GREEDY, max_tokens=2)
    engine.submit(repeated_request)
    with pytest.raises(ValueError, match="'r' is in use"):
        engine.submit(repeated_request)
    while engine.has_work:
        engine.step()
    assert len(run(engine, [repeated_request]).tokens["r"]) == 2


def test_single_rank_engine_is_idle_once_it_has_no_work(engine: Engine) -> None:
    assert engine.is_idle
    for ended in (False, True):
        engine.submit(make_request("r", [5], GREEDY, max_tokens=4))
        assert not engine.is_idle
        engine.step()
        assert not engine.is_idle
        while ended and engine.has_work:
            engine.step()
        engine.abort("r")
        assert engine.is_idle, "no further step is taken, so the loop must sleep now"


def test_abort_is_idempotent_and_removes_waiting_requests(engine: Engine) -> None:
    for name in "abc":
        engine.submit(make_request(name, [5] * 20, GREEDY, max_tokens=10))
    engine.step()
    assert engine.status().waiting == 2
    for name in ("c", "a", "a", "nobody"):
        engine.abort(name)
        engine.check_pages()
    assert engine.status().running == 0
    remaining_ids = [output.request_id for _ in range(12) for output in engine.step().outputs]
    assert set(remaining_ids) == {"b"}
    assert not engine.has_work


def test_status_and_step_statistics_report_the_load(engine: Engine) -> None:
    engine.submit(make_request("a", [5] * 9, GREEDY, max_tokens=4, ignore_eos=True))
    assert (engine.status().waiting, engine.status().queued_tokens) == (1, 9)
    step = engine.step()
    assert (step.stats.prompt_rows, step.stats.prompt_tokens, step.stats.committed_tokens) == (9, 9, 1)
    assert step.stats.target_rows == 9
    status = engine.status()
    assert (status.running, status.waiting, status.queued_tokens) == (1, 0, 0)
    assert status.pages_free + status.pages_used + status.pages_cached == 10
    step = engine.step()
    assert (step.stats.decode_requests, step.stats.target_rows, step.stats.drafts) == (1, 1, 0)
    assert status.accept_length == 0.0
    assert step.stats.forward_seconds > 0
    assert set(step.stats.phase_seconds) >= {"draft", "target", "extend", "schedule", "commit"}


def test_retracted_prompt_tokens_are_counted_once() -> None:
    requests = grid_requests("0.8", 8)
    engine = build_engine(scarce_config(config_of(*tiny_pair(), page_size=4), requests))
    token_counts: list[tuple[int, int]] = []
    result = run(
        engine, requests, lambda _, step: token_counts.append((step.stats.prompt_tokens, step.stats.cached_tokens))
    )
    assert result.retracted > 0
    assert sum(prompt for prompt, _ in token_counts) == sum(
        len(grid_request.prompt_token_ids) for grid_request in requests
    )
    assert sum(cached for _, cached in token_counts) == sum(output.cached_tokens for output in result.last.values())


def test_step_statistics_count_accepted_depths_and_verified_nodes() -> None:
    target = target_folder()
    engine = build_engine(config_of(target, draft_folder(target), 4, 3))
    engine.submit(make_request("a", [5] * 9, GREEDY, max_tokens=30, ignore_eos=True))
    engine.step()
    stats = engine.step().stats
    (accepted,) = stats.accept_lens
    assert stats.accepted_by_depth == [int(accepted > d) for d in (1, 2, 3)]
    assert (stats.drafts, stats.verified_nodes, stats.target_rows) == (1, 11, 12)
    assert stats.committed_tokens == accepted == engine.status().accept_length


def test_engine_info_reports_the_resolved_settings(engine: Engine) -> None:
    info = engine.info()
    assert json.loads(json.dumps(info.as_dict()))["config"]["model_path"] == info.config.model_path
    assert info.dtype == "float64"
    assert info.kv_pages == 10
    assert info.speculative_num_draft_tokens == 1
    target = target_folder()
    info_with_draft = build_engine(config_of(target, draft_folder(target, num_aux=5), 2, 4)).info()
    draft_info = info_with_draft.draft
    assert draft_info is not None
    assert (draft_info.kind, draft_info.aux_boundaries, draft_info.num_aux) == ("eagle3", (0, 1, 2, 3, 4), 5)
    assert draft_info.choices["aux_numbering"].value == "boundaries"
    assert (info_with_draft.speculative_num_steps, info_with_draft.speculative_eagle_topk) == (4, 2)


CUT_CASES = [
    ([4, 5, 6], 9, Cut(3)),
    ([4, 5, 6], 3, Cut(3, "length")),
    ([4, 5, 6], 2, Cut(2, "length")),
    ([4, 1, 6], 9, Cut(2, "stop", 1)),
    ([4, 1, 6], 2, Cut(2, "stop", 1)),
    ([8, 1], 9, Cut(1, "stop", 8)),
    ([1], 1, Cut(1, "stop", 1)),
]


@pytest.mark.parametrize(("tokens", "remaining_tokens", "expected"), CUT_CASES)
def test_finish_check_cuts_tokens_at_the_first_stop_or_length_limit(
    tokens: list[int], remaining_tokens: int, expected: Cut
) -> None:
    check = FinishCheck(RequestParams(stop_token_ids=(8,)), (1,), 64, None, [3])
    assert check.cut(tokens, remaining_tokens) == expected


def test_ignore_eos_ignores_eos_but_not_stop_tokens() -> None:
    check = FinishCheck(RequestParams(ignore_eos=True, stop_token_ids=(8,)), (1,), 64, None, [3])
    assert check.cut([1, 1, 8, 4], 9) == Cut(3, "stop", 8)


def test_stop_strings_match_across_steps_but_not_into_the_prompt() -> None:
    tokenizer = TextTokenizer.load(letters_folder())
    check = FinishCheck(RequestParams(stop=("bc", "xyz")), (1,), 64, tokenizer, [0, 1])
    assert check.cut([2, 0, 23], 9) == Cut(3), "the prompt's last letter does not count"
    assert check.cut([24], 9) == Cut(1)
    assert check.cut([25, 0, 1], 9) == Cut(1, "stop", "xyz")


def test_stop_strings_match_only_after_min_tokens() -> None:
    tokenizer = TextTokenizer.load(letters_folder())
    params = RequestParams(stop=("b",), max_tokens=9, adjustments=LogitAdjustments(min_tokens=3))
    check = FinishCheck(params, (), 64, tokenizer, [0])
    assert check.cut([2, 1], 9) == Cut(2)
    assert check.cut([1, 1, 1], 7) == Cut(2, "stop", "b"), "the third token is the last that may not end the text"


@pytest.mark.parametrize("temperature", [1e-39, 1e-6])
def test_tiny_temperature_samples_greedily(temperature: float) -> None:
    engine = build_engine(config_of(*tiny_pair(), 2, 3, dtype="float32"))
    cold = RequestParams(temperature=temperature, top_p=0.9, max_tokens=6, seed=1)
    warm = RequestParams(temperature=0.8, max_tokens=6, seed=1)
    tokens = run(engine, [make_request("cold", [5, 6], cold), make_request("warm", [5, 6], warm)]).tokens
    assert tokens["cold"] == run(engine, [make_request("greedy", [5, 6], GREEDY, max_tokens=6)]).tokens["greedy"]
    assert cold.greedy and not warm.greedy
