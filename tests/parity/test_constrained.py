"""Constrained requests over trees: always in the grammar, and what plain decoding gives under the same masks."""

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
from tests.pairwise import covering
from tests.parity.automata import EOS, Walker, automaton, follows, walked
from tests.parity.harness import (
    OVERLAP,
    SAMPLING,
    Run,
    config_of,
    prompts,
    request,
    run,
    run_alone,
    scarce,
    speculative,
    texts_of,
    tiny_pair,
)

SHAPES = [(1, 3), (1, 5), (3, 3), (4, 5), (8, 3)]
"""The last drafts more nodes, of which it keeps some, than what it keeps and what grammars force take together."""
METHODS = ("__init__", "accept", "fill", "forced")
WORDS = ((5,), (7, 3))
BANS = LogitAdjustments(repetition_penalty=1.3, bias=((4, -100.0), (9, 3.0)), bad_words_token_ids=WORDS, min_tokens=4)


def asked(sampling: str) -> list[Request]:
    """Eight constrained ones, every other one adjusted besides, and two that are free."""
    made = []
    for i in range(10):
        grammar = None if i in (2, 7) else automaton(i)
        adjustments = BANS if i % 2 else None
        params = {"seed": 40 + i, "max_tokens": 20, "grammar": grammar, "adjustments": adjustments}
        made.append(request(f"{i}", prompts()[i % 8], SAMPLING[sampling], **params))
    return made


def config(topk: int, num_steps: int, **settings: object) -> EngineConfig:
    target, draft = tiny_pair()
    return config_of(target, draft, topk, num_steps, **settings) if topk else config_of(target, **settings)


@cache
def plain(sampling: str) -> Run:
    """Each request alone, without prefix reuse."""
    return run_alone(walked(build_engine(config(0, 0, disable_radix_cache=True))), asked(sampling))


@pytest.mark.parametrize("sampling", SAMPLING)
def test_every_constrained_output_follows_its_grammar(sampling: str) -> None:
    unbound = [replace(one, params=replace(one.params, grammar=None)) for one in asked(sampling)]
    free = run(build_engine(config(0, 0)), unbound)
    broken = 0
    for one in asked(sampling):
        if one.params.grammar is not None:
            assert follows(one.params.grammar, plain(sampling).tokens[one.request_id])
            broken += not follows(one.params.grammar, free.tokens[one.request_id])
    assert broken > 5, "without their grammars they would not"
    assert {"stop", "length"} == {last.finish_reason for last in plain(sampling).last.values()}


@pytest.mark.parametrize(("shape", "sampling", "kind"), covering([SHAPES, list(SAMPLING), ["model", "corrected"]]))
def test_constrained_tree_decoding_matches_plain_decoding(shape: tuple[int, int], sampling: str, kind: str) -> None:
    engine = walked(speculative(config(*shape), kind, texts_of(asked(sampling), plain(sampling))))
    result = run(engine, asked(sampling))
    assert result.ended == plain(sampling).ended
    assert result.accept_length > 1.3


@pytest.mark.parametrize("sampling", ["greedy", "0.8"])
@pytest.mark.parametrize(("topk", "num_steps"), [(0, 0), (1, 3), (3, 3)])
def test_captured_constrained_steps_match_plain_decoding(topk: int, num_steps: int, sampling: str) -> None:
    """Grammars are matched anew in each replay, beside penalties and free requests."""
    penalties = replace(BANS, bad_words_token_ids=())
    requests = [
        replace(one, params=replace(one.params, adjustments=one.params.adjustments and penalties))
        for one in asked(sampling)
    ]
    alone = run_alone(walked(build_engine(config(0, 0, disable_radix_cache=True))), requests).ended
    engine = walked(build_engine(config(topk, num_steps, capture="on")))
    for _ in range(2):
        assert run(engine, requests).ended == alone
    programs = engine._parts.lockstep.programs
    if isinstance(programs, Programs):  # a device that runs late replays nothing
        assert any(SamplingMode.CONSTRAINED in SamplingMode(key.mode) for key in programs.captured), (
            "some steps were replayed"
        )


@pytest.mark.parametrize(("topk", "num_steps"), [(0, 0), (1, 3), (3, 3)])
def test_constrained_outputs_survive_retraction(topk: int, num_steps: int) -> None:
    scanty = scarce(config(topk, num_steps, chunked_prefill_size=7), asked("0.8"), more=3)
    result = run(walked(build_engine(scanty)), asked("0.8"))
    assert result.retracted > 0
    assert result.ended == plain("0.8").ended


@pytest.mark.parametrize(("topk", "num_steps"), [(1, 3), (3, 3)])
def test_drafted_count_equals_the_nodes_of_the_returned_trees(topk: int, num_steps: int) -> None:
    """Trees that a grammar may add to have room that nothing fills as a rule, those of free requests always."""
    engine = walked(build_engine(config(topk, num_steps)))
    drafted = engine._parts.resolved.shape.num_draft_tokens - 1
    verified: list[int] = []
    requests = [replace(one, params=replace(one.params, return_tree=True)) for one in asked("0.8")]
    result = run(engine, requests, lambda _, step: verified.append(step.stats.verified_nodes))
    counted = {name: last.speculation for name, last in result.last.items() if last.speculation is not None}
    for name, counts in counted.items():
        shown = sum(len(output.tree.token_ids) - 1 for output in result.outputs[name] if output.tree is not None)
        assert counts.drafted == shown, name
        assert name not in ("2", "7") or counts.drafted == counts.steps * drafted, "these are free"
    assert sum(verified) == sum(counts.drafted for counts in counted.values())


@pytest.mark.parametrize("settings", [{"page_size": 1, "context_length": 60}, {"max_total_tokens": 60}])
@pytest.mark.parametrize(("topk", "num_steps"), [(0, 0), *SHAPES])
def test_constrained_output_may_fill_the_maximum_request_length(
    topk: int, num_steps: int, settings: dict[str, int]
) -> None:
    """To the last token that the engine says it takes, be it the context or the KV cache that ends; others go on."""
    engine, endless = walked(build_engine(config(topk, num_steps, **settings))), json.dumps([{"5": 0, "6": 0}])
    prompt, room = prompts()[4], engine.info().max_request_tokens
    longest = {"max_tokens": room - len(prompt), "ignore_eos": True}
    bound = request("bound", prompt, SAMPLING["0.8"], seed=1, grammar=endless, **longest)
    result = run(engine, [bound, request("free", prompt, SAMPLING["0.8"], seed=2, **longest)])
    assert {name: len(tokens) for name, tokens in result.tokens.items()} == dict.fromkeys(
        ("bound", "free"), room - len(prompt)
    )
    with pytest.raises(ValueError, match="lower max_tokens"):
        engine.submit(replace(bound, params=replace(bound.params, max_tokens=room - len(prompt) + 1)))


@pytest.mark.parametrize(("topk", "num_steps"), [(0, 0), (3, 3)])
def test_constrained_stream_resumes_in_the_middle_of_its_grammar(topk: int, num_steps: int) -> None:
    engine = walked(build_engine(config(topk, num_steps)))
    resumed = []
    for one in asked("0.8"):
        tokens = plain("0.8").tokens[one.request_id]
        for sent in range(1, len(tokens), 3):
            prompt = (*one.prompt_token_ids, *tokens[:sent])
            name = f"{one.request_id}/{sent}"
            resumed.append(replace(one, request_id=name, prompt_token_ids=prompt, resumed_tokens=sent))
    result = run(engine, resumed)
    for one in resumed:
        name = one.request_id.split("/")[0]
        assert result.tokens[one.request_id] == plain("0.8").tokens[name][one.resumed_tokens :]


def test_reused_row_drops_the_grammar_of_the_last_request() -> None:
    engine = walked(build_engine(config(0, 0, max_running_requests=1)))
    assert run(engine, asked("greedy")).ended == plain("greedy").ended


@pytest.mark.parametrize(("topk", "num_steps"), SHAPES)
def test_forced_tokens_extend_accepted_paths_beyond_the_draft_depth(topk: int, num_steps: int) -> None:
    """A text of 30 forced tokens with a choice after every tenth: each step commits as many as a tree has levels."""
    lines = [{str(2 + i % 20): i + 1} if i % 10 else {"5": i + 1, "6": i + 1} for i in range(40)]
    grammar = json.dumps([*lines, {str(EOS): -1}])
    forced = request("forced", prompts()[3], SAMPLING["0.8"], seed=8, max_tokens=36, grammar=grammar)
    free = request("free", prompts()[3], SAMPLING["0.8"], seed=8, max_tokens=36, ignore_eos=True)
    alone = run(walked(build_engine(config(0, 0))), [forced, free])
    result = run(walked(build_engine(config(topk, num_steps))), [forced, free])
    assert result.ended == alone.ended
    counts = {name: last.speculation for name, last in result.last.items()}
    assert counts["forced"] is not None and counts["free"] is not None
    assert counts["forced"].accept_length > 5
    assert max(j for j, count in enumerate(counts["forced"].accepted) if count) > num_steps
    assert not any(counts["free"].accepted[num_steps + 1 :])


@pytest.mark.parametrize(("topk", "method", "kind"), covering([(0, 3), METHODS, (GrammarError, UnicodeDecodeError)]))
def test_failing_grammar_ends_only_its_own_request(
    topk: int, method: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some calls that worked. Those beside it get the tokens that they get without it."""
    calls, true = 0, getattr(Walker, method)

    def failing(self: Walker, given: Any, *rest: Any) -> Any:
        nonlocal calls
        if automaton(3) in (given, getattr(self, "text", "")):
            calls += 1
            if calls > 4 or method == "__init__":
                raise GrammarError("it fails") if kind is GrammarError else UnicodeDecodeError("x", b"", 0, 1, "y")
        return true(self, given, *rest)

    expected = plain("0.8").ended
    monkeypatch.setattr(Walker, method, failing)
    result = run(walked(build_engine(config(topk, topk))), asked("0.8"))
    if topk or method != "forced":
        last = result.last["3"]
        assert (last.finish_reason, last.error_code) == ("error", "nonfinite_logits")
        assert last.error is not None and "its grammar cannot be matched" in last.error
        expected = expected | {"3": result.ended["3"]}
    assert result.ended == expected


@pytest.mark.parametrize(("topk", "num_steps"), [(0, 0), (3, 3)])
def test_slow_grammar_ends_only_its_own_request(topk: int, num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    true, burnt = Walker.fill, 0

    def slow(self: Walker, path: list[int], out: Any) -> None:
        nonlocal burnt
        if self.text == automaton(3):
            burnt += 1
            until = time.thread_time() + 0.02
            while time.thread_time() < until:
                pass
        true(self, path, out)

    monkeypatch.setattr(Walker, "fill", slow)
    expected = plain("0.8").ended
    result = run(walked(build_engine(config(topk, num_steps))), asked("0.8"))
    last = result.last["3"]
    assert (last.finish_reason, last.error_code) == ("error", "slow_grammar")
    assert last.error is not None and "make it simpler" in last.error
    assert burnt < 20 * (2 + OVERLAP), "more steps than can have begun before the second was read"
    kept = result.tokens["3"]
    assert kept == expected["3"][0][: len(kept)]
    assert result.ended == expected | {"3": result.ended["3"]}


@pytest.mark.parametrize(("topk", "num_steps"), [(0, 0), (3, 3)])
def test_single_long_pause_is_not_reported_as_a_slow_grammar(
    topk: int, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collection of garbage, or a host that takes the processor away, is charged to whoever runs."""
    true, calls = Walker.fill, 0

    def paused(self: Walker, path: list[int], out: Any) -> None:
        nonlocal calls
        calls += 1
        until = time.thread_time() + (0.3 if calls == 30 else 0.0)
        while time.thread_time() < until:
            pass
        true(self, path, out)

    monkeypatch.setattr(Walker, "fill", paused)
    expected = plain("0.8").ended
    calls = 0
    assert run(walked(build_engine(config(topk, num_steps))), asked("0.8")).ended == expected and calls > 30
