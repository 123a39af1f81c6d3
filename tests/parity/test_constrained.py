"""Constrained requests with tree decoding: outputs follow the grammar, and equal those of plain decoding with the same
masks.
"""

import json
import time
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from cluster.batch import SamplingMode
from cluster.config import EngineConfig
from cluster.engine import build_engine
from cluster.engine.programs import Programs
from cluster.grammar.asked import GrammarError
from cluster.request import LogitAdjustments, Request
from tests.parity.automata import EOS, AutomatonMatcher, automaton, follows_automaton, with_automata
from tests.parity.harness import (
    OVERLAP,
    SAMPLING,
    RunResult,
    config_of,
    make_request,
    prompts,
    run,
    run_one_by_one,
    scarce_config,
    speculative_engine,
    texts_of,
    tiny_pair,
)
from tests.support.pairwise import covering

SHAPES = [(1, 3), (1, 5), (3, 3), (4, 5), (8, 3)]
"""(topk, num_steps). The last shape drafts more nodes than its tree and the forced nodes have together; it keeps the
best of them.
"""
MATCHER_METHODS = ("__init__", "accept", "fill", "forced")
BAD_WORDS = ((5,), (7, 3))
ADJUSTMENTS = LogitAdjustments(
    repetition_penalty=1.3, bias=((4, -100.0), (9, 3.0)), bad_words_token_ids=BAD_WORDS, min_tokens=4
)


def asked(sampling: str) -> list[Request]:
    """Return ten requests. Requests 2 and 7 have no grammar; the odd ones also have penalties, biases and bad words."""
    requests = []
    for i in range(10):
        grammar = None if i in (2, 7) else automaton(i)
        adjustments = ADJUSTMENTS if i % 2 else None
        params = {"seed": 40 + i, "max_tokens": 20, "grammar": grammar, "adjustments": adjustments}
        requests.append(make_request(f"{i}", prompts()[i % 8], SAMPLING[sampling], **params))
    return requests


def config(topk: int, num_steps: int, **settings: object) -> EngineConfig:
    target, draft = tiny_pair()
    return config_of(target, draft, topk, num_steps, **settings) if topk else config_of(target, **settings)


@cache
def plain(sampling: str) -> RunResult:
    """The oracle: plain decoding of the requests, one by one, without prefix reuse."""
    return run_one_by_one(with_automata(build_engine(config(0, 0, disable_radix_cache=True))), asked(sampling))


@pytest.mark.parametrize("sampling", SAMPLING)
def test_every_constrained_output_follows_its_grammar(sampling: str) -> None:
    unconstrained_requests = [
        replace(request, params=replace(request.params, grammar=None)) for request in asked(sampling)
    ]
    unconstrained_result = run(build_engine(config(0, 0)), unconstrained_requests)
    violations = 0
    for request in asked(sampling):
        if request.params.grammar is not None:
            assert follows_automaton(request.params.grammar, plain(sampling).tokens[request.request_id])
            violations += not follows_automaton(request.params.grammar, unconstrained_result.tokens[request.request_id])
    assert violations > 5, "without grammars most outputs must not follow them, or this test proves nothing"
    assert {"stop", "length"} == {last_output.finish_reason for last_output in plain(sampling).last.values()}


@pytest.mark.parametrize(("shape", "sampling", "kind"), covering([SHAPES, list(SAMPLING), ["model", "corrected"]]))
def test_constrained_tree_decoding_matches_plain_decoding(shape: tuple[int, int], sampling: str, kind: str) -> None:
    engine = with_automata(speculative_engine(config(*shape), kind, texts_of(asked(sampling), plain(sampling))))
    result = run(engine, asked(sampling))
    assert result.completions == plain(sampling).completions
    assert result.accept_length > 1.3


@pytest.mark.parametrize("sampling", ["greedy", "0.8"])
@pytest.mark.parametrize(("topk", "num_steps"), [(0, 0), (1, 3), (3, 3)])
def test_captured_constrained_steps_match_plain_decoding(topk: int, num_steps: int, sampling: str) -> None:
    """Each replay must match the grammars again. Some requests have penalties, some have no grammar."""
    penalties = replace(ADJUSTMENTS, bad_words_token_ids=())
    requests = [
        replace(request, params=replace(request.params, adjustments=request.params.adjustments and penalties))
        for request in asked(sampling)
    ]
    expected = run_one_by_one(with_automata(build_engine(config(0, 0, disable_radix_cache=True))), requests).completions
    engine = with_automata(build_engine(config(topk, num_steps, capture="on")))
    for _ in range(2):
        assert run(engine, requests).completions == expected
    programs = engine._parts.lockstep.programs
    if isinstance(programs, Programs):  # the late device of `tests/support/late_device.py` replays nothing
        assert any(SamplingMode.CONSTRAINED in SamplingMode(key.mode) for key in programs.captured), (
            "no constrained step was captured"
        )


@pytest.mark.parametrize(("topk", "num_steps"), [(0, 0), (1, 3), (3, 3)])
def test_constrained_outputs_survive_retraction(topk: int, num_steps: int) -> None:
    small_config = scarce_config(config(topk, num_steps, chunked_prefill_size=7), asked("0.8"), extra_pages=3)
    result = run(with_automata(build_engine(small_config)), asked("0.8"))
    assert result.retracted > 0
    assert result.completions == plain("0.8").completions


@pytest.mark.parametrize(("topk", "num_steps"), [(1, 3), (3, 3)])
def test_drafted_count_equals_the_nodes_of_the_returned_trees(topk: int, num_steps: int) -> None:
    """In steps with a grammar, trees have room for forced nodes. Most of it stays empty, and in the trees of requests
    without a grammar all of it; empty nodes must not be counted.
    """
    engine = with_automata(build_engine(config(topk, num_steps)))
    nodes_per_tree = engine._parts.resolved.shape.num_draft_tokens - 1
    verified: list[int] = []
    requests = [replace(request, params=replace(request.params, return_tree=True)) for request in asked("0.8")]
    result = run(engine, requests, lambda _, step: verified.append(step.stats.verified_nodes))
    speculation_counts = {
        name: last_output.speculation
        for name, last_output in result.last.items()
        if last_output.speculation is not None
    }
    for name, counts in speculation_counts.items():
        returned_nodes = sum(
            len(output.tree.token_ids) - 1 for output in result.outputs[name] if output.tree is not None
        )
        assert counts.drafted == returned_nodes, name
        assert name not in ("2", "7") or counts.drafted == counts.steps * nodes_per_tree, "2 and 7 have no grammar"
    assert sum(verified) == sum(counts.drafted for counts in speculation_counts.values())


@pytest.mark.parametrize("settings", [{"page_size": 1, "context_length": 60}, {"max_total_tokens": 60}])
@pytest.mark.parametrize(("topk", "num_steps"), [(0, 0), *SHAPES])
def test_constrained_output_may_fill_the_maximum_request_length(
    topk: int, num_steps: int, settings: dict[str, int]
) -> None:
    """A request may have exactly `max_request_tokens` tokens, whether the context or the KV cache sets this limit. It
    does not disturb a request beside it.
    """
    engine, endless_grammar = (
        with_automata(build_engine(config(topk, num_steps, **settings))),
        json.dumps([{"5": 0, "6": 0}]),
    )
    prompt, max_length = prompts()[4], engine.info().max_request_tokens
    longest_params = {"max_tokens": max_length - len(prompt), "ignore_eos": True}
    constrained_request = make_request(
        "bound", prompt, SAMPLING["0.8"], seed=1, grammar=endless_grammar, **longest_params
    )
    result = run(engine, [constrained_request, make_request("free", prompt, SAMPLING["0.8"], seed=2, **longest_params)])
    assert {name: len(tokens) for name, tokens in result.tokens.items()} == dict.fromkeys(
        ("bound", "free"), max_length - len(prompt)
    )
    with pytest.raises(ValueError, match="lower max_tokens"):
        engine.submit(
            replace(
                constrained_request, params=replace(constrained_request.params, max_tokens=max_length - len(prompt) + 1)
            )
        )


@pytest.mark.parametrize(("topk", "num_steps"), [(0, 0), (3, 3)])
def test_constrained_stream_resumes_in_the_middle_of_its_grammar(topk: int, num_steps: int) -> None:
    engine = with_automata(build_engine(config(topk, num_steps)))
    resumed = []
    for request in asked("0.8"):
        tokens = plain("0.8").tokens[request.request_id]
        for sent_count in range(1, len(tokens), 3):
            prompt = (*request.prompt_token_ids, *tokens[:sent_count])
            name = f"{request.request_id}/{sent_count}"
            resumed.append(replace(request, request_id=name, prompt_token_ids=prompt, resumed_tokens=sent_count))
    result = run(engine, resumed)
    for request in resumed:
        name = request.request_id.split("/")[0]
        assert result.tokens[request.request_id] == plain("0.8").tokens[name][request.resumed_tokens :]


def test_reused_row_drops_the_grammar_of_the_last_request() -> None:
    engine = with_automata(build_engine(config(0, 0, max_running_requests=1)))
    assert run(engine, asked("greedy")).completions == plain("greedy").completions


@pytest.mark.parametrize(("topk", "num_steps"), SHAPES)
def test_forced_tokens_extend_accepted_paths_beyond_the_draft_depth(topk: int, num_steps: int) -> None:
    """The grammar forces all tokens but every tenth one, where it allows two. With the forced nodes, accepted paths are
    longer than `num_steps`.
    """
    transitions = [{str(2 + i % 20): i + 1} if i % 10 else {"5": i + 1, "6": i + 1} for i in range(40)]
    grammar = json.dumps([*transitions, {str(EOS): -1}])
    forced_request = make_request("forced", prompts()[3], SAMPLING["0.8"], seed=8, max_tokens=36, grammar=grammar)
    free_request = make_request("free", prompts()[3], SAMPLING["0.8"], seed=8, max_tokens=36, ignore_eos=True)
    plain_result = run(with_automata(build_engine(config(0, 0))), [forced_request, free_request])
    result = run(with_automata(build_engine(config(topk, num_steps))), [forced_request, free_request])
    assert result.completions == plain_result.completions
    counts = {name: last_output.speculation for name, last_output in result.last.items()}
    assert counts["forced"] is not None and counts["free"] is not None
    assert counts["forced"].accept_length > 5
    assert max(j for j, count in enumerate(counts["forced"].accepted) if count) > num_steps
    assert not any(counts["free"].accepted[num_steps + 1 :])


@pytest.mark.parametrize(
    ("topk", "method", "kind"), covering([(0, 3), MATCHER_METHODS, (GrammarError, UnicodeDecodeError)])
)
def test_failing_grammar_ends_only_its_own_request(
    topk: int, method: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matcher of request 3 fails after four calls that worked (or when it is made). The other requests get the same
    tokens as without this failure.
    """
    calls, original_method = 0, getattr(AutomatonMatcher, method)

    def failing(self: AutomatonMatcher, argument: Any, *rest: Any) -> Any:
        nonlocal calls
        if automaton(3) in (argument, getattr(self, "text", "")):
            calls += 1
            if calls > 4 or method == "__init__":
                raise GrammarError("it fails") if kind is GrammarError else UnicodeDecodeError("x", b"", 0, 1, "y")
        return original_method(self, argument, *rest)

    expected = plain("0.8").completions
    monkeypatch.setattr(AutomatonMatcher, method, failing)
    result = run(with_automata(build_engine(config(topk, topk))), asked("0.8"))
    if topk or method != "forced":
        last_output = result.last["3"]
        assert (last_output.finish_reason, last_output.error_code) == ("error", "nonfinite_logits")
        assert last_output.error is not None and "its grammar cannot be matched" in last_output.error
        expected = expected | {"3": result.completions["3"]}
    assert result.completions == expected


@pytest.mark.parametrize(("topk", "num_steps"), [(0, 0), (3, 3)])
def test_slow_grammar_ends_only_its_own_request(topk: int, num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    original_fill, slow_calls = AutomatonMatcher.fill, 0

    def slow(self: AutomatonMatcher, path: list[int], out: Any) -> None:
        nonlocal slow_calls
        if self.text == automaton(3):
            slow_calls += 1
            deadline = time.thread_time() + 0.02
            while time.thread_time() < deadline:
                pass
        original_fill(self, path, out)

    monkeypatch.setattr(AutomatonMatcher, "fill", slow)
    expected = plain("0.8").completions
    result = run(with_automata(build_engine(config(topk, num_steps))), asked("0.8"))
    last_output = result.last["3"]
    assert (last_output.finish_reason, last_output.error_code) == ("error", "slow_grammar")
    assert last_output.error is not None and "make it simpler" in last_output.error
    assert slow_calls < 20 * (2 + OVERLAP), "the request ran for more steps than can begin before the second is read"
    partial_tokens = result.tokens["3"]
    assert partial_tokens == expected["3"][0][: len(partial_tokens)]
    assert result.completions == expected | {"3": result.completions["3"]}


@pytest.mark.parametrize(("topk", "num_steps"), [(0, 0), (3, 3)])
def test_single_long_pause_is_not_reported_as_a_slow_grammar(
    topk: int, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A garbage collection, or a host that takes the processor away, adds its time to the grammar that runs at that
    moment. One such pause must not end the request.
    """
    original_fill, calls = AutomatonMatcher.fill, 0

    def paused(self: AutomatonMatcher, path: list[int], out: Any) -> None:
        nonlocal calls
        calls += 1
        deadline = time.thread_time() + (0.3 if calls == 30 else 0.0)
        while time.thread_time() < deadline:
            pass
        original_fill(self, path, out)

    monkeypatch.setattr(AutomatonMatcher, "fill", paused)
    expected = plain("0.8").completions
    calls = 0
    assert (
        run(with_automata(build_engine(config(topk, num_steps))), asked("0.8")).completions == expected and calls > 30
    )
