"""A request whose numbers are not finite ends alone, where plain decoding would end it; a draft's end nobody."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from cluster.engine import Engine, StepResult, build_engine
from cluster.request import Request
from tests.families import FAMILIES, made
from tests.parity.harness import (
    SAMPLING,
    VOCAB,
    Run,
    config_of,
    prompts,
    request,
    run,
    run_alone,
    speculative,
    texts_of,
)
from tests.tiny import draft_folder, folder_of_session, target_folder
from tests.unit.models.checkpoints import Tensors, copy_of

BAD = 19
"""The token whose embedding is NaN, or infinite."""
EMBEDDING = "model.embed_tokens.weight"


def spoiled(folder: str, name: str, value: float = math.nan, row: int = BAD) -> str:
    """A copy of a checkpoint in which one row of a tensor holds `value`."""

    def change(held: Tensors) -> None:
        held[name] = held[name].clone()
        held[name][row] = value

    to = folder_of_session() / f"{Path(folder).name}-{name}-{row}-{value}"
    return str(to) if to.exists() else copy_of(folder, to, change)


def requests() -> list[Request]:
    """Some come upon the bad token, in their prompt or in their text, some do not."""
    clean = [tuple(token if token != BAD else 0 for token in prompt) for prompt in prompts()]
    common = {"max_tokens": 16, "ignore_eos": True}
    asked = [
        request(f"{kind}{i}", prompt, SAMPLING[kind], seed=70 + i, **common)
        for kind in SAMPLING
        for i, prompt in enumerate(clean)
    ]
    long = [*clean[0][:40], BAD, *clean[0][40:]]
    return [
        *asked,
        request("early", [BAD], SAMPLING["0.8"], seed=1, **common),
        request("late", long, SAMPLING["greedy"]),
    ]


def clean_run(target: str, asked: list[Request]) -> Run:
    return run_alone(build_engine(config_of(target, disable_radix_cache=True)), asked)


@cache
def clean() -> Run:
    return clean_run(target_folder(vocab_size=VOCAB), requests())


def expected(one: Request, tokens: list[int]) -> tuple[list[int], str]:
    """What the spoiled target gives: nothing after a bad prompt, all up to the bad token of a text."""
    if BAD in one.prompt_token_ids:
        return [], "error"
    if BAD in tokens[:-1]:
        return tokens[: tokens.index(BAD) + 1], "error"
    return tokens, "length"


def check(engine: Engine, asked: list[Request], whole: Run) -> Run:
    got = run(engine, asked)
    wrong = {
        one.request_id: (got.tokens[one.request_id], got.last[one.request_id].finish_reason)
        for one in asked
        if (got.tokens[one.request_id], got.last[one.request_id].finish_reason)
        != expected(one, whole.tokens[one.request_id])
    }
    assert not wrong
    return got


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("kind", "topk", "num_steps", "chunk", "page_size"),
    [("plain", 1, 0, 7, 4), ("model", 4, 3, 16, 1), ("corrected", 1, 4, 5, 4), ("oracle", 4, 4, -1, 16)],
)
def test_non_finite_request_ends_alone_at_the_same_token_as_plain_decoding(
    kind: str, topk: int, num_steps: int, chunk: int, page_size: int, value: float
) -> None:
    whole, target = clean(), target_folder(vocab_size=VOCAB)
    bad = spoiled(target, EMBEDDING, value)
    settings: dict[str, object] = {"page_size": page_size, "chunked_prefill_size": chunk}
    texts = texts_of(requests(), whole)
    if kind == "plain":
        engine = build_engine(config_of(bad, **settings))
    else:
        engine = speculative(config_of(bad, draft_folder(target), topk, num_steps, **settings), kind, texts, 0.7)
    ended = 0
    for _ in range(2):  # the second time from cached pages
        result = check(engine, requests(), whole)
        ended += sum(output.finish_reason == "error" for output in result.last.values())
        for name, output in result.last.items():
            assert (output.error_code == "nonfinite_logits") is (output.finish_reason == "error")
            if output.error is not None:
                assert f"request {name} ended after" in output.error and "float64" in output.error
    assert 2 * 5 < ended < 2 * len(requests()) - 10, "some end, some go on"
    assert counted(engine) == ended


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_only_pages_before_the_non_finite_chunk_stay_cached(page_size: int) -> None:
    """Chunks that ended before it are sound, and stay for others; nothing of the chunk that holds it does."""
    settings = {"chunked_prefill_size": 8, "page_size": page_size}
    engine = build_engine(config_of(spoiled(target_folder(vocab_size=VOCAB), EMBEDDING), **settings))
    sound = requests()[-1].prompt_token_ids.index(BAD) // 8 * 8  # tokens in whole chunks before the bad one's
    for turn in range(2):
        late = run(engine, [replace(requests()[-1], request_id=f"late{turn}")]).last[f"late{turn}"]
        assert late.finish_reason == "error"
        assert late.cached_tokens == (sound // page_size * page_size if turn else 0)
        assert engine._parts.cache.evictable_pages == sound // page_size


@pytest.mark.parametrize("beside", [False, True])
def test_non_finite_chunk_without_output_ends_a_request_with_logprobs(beside: bool) -> None:
    """In its step nobody asks for any, as none of its tokens come of that chunk."""
    late = requests()[-1]
    late = replace(late, params=replace(late.params, logprobs=2))
    engine = build_engine(config_of(spoiled(target_folder(vocab_size=VOCAB), EMBEDDING), chunked_prefill_size=7))
    got = check(engine, [*requests()[:1], late] if beside else [late], clean())
    assert got.last["late"].error_code == "nonfinite_logits" and got.last["late"].logprobs == ()


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "mistral", "mixtral"])
def test_non_finite_draft_nodes_do_not_affect_any_attention_family(family: str) -> None:
    """Windows, sinks and latents: nodes of the bad token are proposed all the time, and no text notices."""
    case = next(iter(FAMILIES[family].cases))
    target = made(family, case).folder
    asked = [
        request("a", [3, 5, 7, 11, 2], SAMPLING["greedy"], max_tokens=20, ignore_eos=True),
        request("b", list(range(2, 18)), SAMPLING["0.8"], seed=4, max_tokens=20, ignore_eos=True),
        request("c", [4, BAD, 6], SAMPLING["greedy"], max_tokens=20, ignore_eos=True),
    ]
    whole = clean_run(target, asked)
    config = config_of(spoiled(target, EMBEDDING), draft_folder(target), 4, 3, chunked_prefill_size=6)
    result = check(speculative(config, "oracle", texts_of(asked, whole), 0.6), asked, whole)
    assert result.last["c"].finish_reason == "error"


def counted(engine: Engine) -> float:
    """What the metric says."""
    families = engine.metrics.registry.collect()
    return sum(s.value for family in families for s in family.samples if s.name == "aerie_nonfinite_requests_total")


def carriers(seen: list[bool]) -> Callable[[Engine, StepResult], None]:
    """Notes after each step whether the only running request's carriers are finite."""

    def look(engine: Engine, _: StepResult) -> None:
        rows = [sequence.row for sequence in engine._parts.scheduler.running if not sequence.prefilling]
        seen.extend(engine._parts.lockstep.step.draft_inputs.hidden[rows].isfinite().all(-1).tolist())

    return look


@pytest.mark.parametrize(("topk", "num_steps"), [(1, 4), (4, 3)])
@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight", "fc.weight"])
def test_non_finite_draft_changes_no_token_and_recovers(name: str, topk: int, num_steps: int) -> None:
    """Its embedding of one token, one column of its head, one row of its fc: the last two at every step."""
    target = target_folder(vocab_size=VOCAB)
    draft = spoiled(draft_folder(target, hidden=48), name)
    whole = clean()
    asked = [one for one in requests() if "late" not in one.request_id]
    got = run(build_engine(config_of(target, draft, topk, num_steps, chunked_prefill_size=16)), asked)
    assert {n: (got.tokens[n], o.finish_reason) for n, o in got.last.items()} == {
        one.request_id: (whole.tokens[one.request_id], "length") for one in asked
    }
    if name == "embed_tokens.weight":
        seen: list[bool] = []
        engine = build_engine(config_of(target, draft, topk, num_steps))
        one = next(one for one in asked if BAD in whole.tokens[one.request_id][1:10])
        run(engine, [one], carriers(seen))
        assert not all(seen) and seen[-1], "once the bad token has passed, the draft is well again"


def test_nan_in_lm_head_ends_every_request() -> None:
    """One column of NaN is in everybody's logits."""
    bad = spoiled(target_folder(vocab_size=VOCAB), "lm_head.weight")
    result = run(build_engine(config_of(bad)), requests()[:4])
    assert {output.finish_reason for output in result.last.values()} == {"error"}
    assert not any(result.tokens.values())


@pytest.mark.parametrize("max_tokens", [0, 4])
@pytest.mark.parametrize("chunk", [7, -1])
def test_non_finite_prompt_logprobs_end_the_request_with_an_error(chunk: int, max_tokens: int) -> None:
    """Also where nothing is to be generated: a bad prompt does not end as if it had been scored."""
    engine = build_engine(config_of(spoiled(target_folder(vocab_size=VOCAB), EMBEDDING), chunked_prefill_size=chunk))
    bad = requests()[-1]
    clean = tuple(token for token in bad.prompt_token_ids if token != BAD)
    params = replace(bad.params, max_tokens=max_tokens, prompt_logprobs=1)
    asked = [replace(bad, params=params), replace(bad, request_id="clean", prompt_token_ids=clean, params=params)]
    result = run(engine, asked)
    assert result.last["late"].error_code == "nonfinite_logits" and result.tokens["late"] == []
    assert result.last["clean"].finish_reason == "length" or result.tokens["clean"][-1] == BAD
    assert len(result.outputs["clean"][0].prompt_logprobs) == len(clean) - 1
