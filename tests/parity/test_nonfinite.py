"""Non-finite numbers in the target end only the request that has them, at the same token as in plain decoding.
Non-finite numbers in the draft end no request.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from cluster.engine import Engine, StepResult, build_engine
from cluster.request import Request
from tests.parity.harness import (
    SAMPLING,
    VOCAB,
    RunResult,
    config_of,
    make_request,
    prompts,
    run,
    run_one_by_one,
    speculative_engine,
    texts_of,
)
from tests.support.families import FAMILIES, family_checkpoint
from tests.support.tiny_checkpoints import draft_folder, folder_of_session, target_folder
from tests.unit.models.checkpoints import Tensors, copy_of

BAD_TOKEN = 19
"""The token whose embedding is NaN, or infinite."""
EMBEDDING = "model.embed_tokens.weight"


def corrupted_copy(folder: str, name: str, value: float = math.nan, row: int = BAD_TOKEN) -> str:
    """Copy a checkpoint and fill one row of the tensor `name` with `value`; return the folder of the copy."""

    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[name].clone()
        tensors[name][row] = value

    copy_folder = folder_of_session() / f"{Path(folder).name}-{name}-{row}-{value}"
    return str(copy_folder) if copy_folder.exists() else copy_of(folder, copy_folder, change)


def requests() -> list[Request]:
    """Return requests. Some have the bad token in their prompt (`early`, `late`), some get it in their output, some do
    not have it at all.
    """
    clean_prompts = [tuple(token if token != BAD_TOKEN else 0 for token in prompt) for prompt in prompts()]
    common_params = {"max_tokens": 16, "ignore_eos": True}
    sampled_requests = [
        make_request(f"{kind}{i}", prompt, SAMPLING[kind], seed=70 + i, **common_params)
        for kind in SAMPLING
        for i, prompt in enumerate(clean_prompts)
    ]
    long_prompt = [*clean_prompts[0][:40], BAD_TOKEN, *clean_prompts[0][40:]]
    return [
        *sampled_requests,
        make_request("early", [BAD_TOKEN], SAMPLING["0.8"], seed=1, **common_params),
        make_request("late", long_prompt, SAMPLING["greedy"]),
    ]


def clean_run(target: str, requests: list[Request]) -> RunResult:
    return run_one_by_one(build_engine(config_of(target, disable_radix_cache=True)), requests)


@cache
def clean_result() -> RunResult:
    return clean_run(target_folder(vocab_size=VOCAB), requests())


def expected_result(request: Request, tokens: list[int]) -> tuple[list[int], str]:
    """Return the tokens and the finish reason that the corrupted target must give. `tokens` are those of the intact
    target. With the bad token in the prompt there is no output; otherwise the output ends with its first bad token.
    """
    if BAD_TOKEN in request.prompt_token_ids:
        return [], "error"
    if BAD_TOKEN in tokens[:-1]:
        return tokens[: tokens.index(BAD_TOKEN) + 1], "error"
    return tokens, "length"


def check(engine: Engine, requests: list[Request], plain_result: RunResult) -> RunResult:
    result = run(engine, requests)
    differences = {
        request.request_id: (result.tokens[request.request_id], result.last[request.request_id].finish_reason)
        for request in requests
        if (result.tokens[request.request_id], result.last[request.request_id].finish_reason)
        != expected_result(request, plain_result.tokens[request.request_id])
    }
    assert not differences
    return result


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("kind", "topk", "num_steps", "chunk", "page_size"),
    [("plain", 1, 0, 7, 4), ("model", 4, 3, 16, 1), ("corrected", 1, 4, 5, 4), ("oracle", 4, 4, -1, 16)],
)
def test_non_finite_request_ends_alone_at_the_same_token_as_plain_decoding(
    kind: str, topk: int, num_steps: int, chunk: int, page_size: int, value: float
) -> None:
    plain_result, target = clean_result(), target_folder(vocab_size=VOCAB)
    bad_target = corrupted_copy(target, EMBEDDING, value)
    settings: dict[str, object] = {"page_size": page_size, "chunked_prefill_size": chunk}
    texts = texts_of(requests(), plain_result)
    if kind == "plain":
        engine = build_engine(config_of(bad_target, **settings))
    else:
        engine = speculative_engine(
            config_of(bad_target, draft_folder(target), topk, num_steps, **settings), kind, texts, 0.7
        )
    error_count = 0
    for _ in range(2):  # in the second run the prompts are cached
        result = check(engine, requests(), plain_result)
        error_count += sum(output.finish_reason == "error" for output in result.last.values())
        for name, output in result.last.items():
            assert (output.error_code == "nonfinite_logits") is (output.finish_reason == "error")
            if output.error is not None:
                assert f"request {name} ended after" in output.error and "float64" in output.error
    assert 2 * 5 < error_count < 2 * len(requests()) - 10, "too few or too many requests ended with an error"
    assert nonfinite_counter(engine) == error_count


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_only_pages_before_the_non_finite_chunk_stay_cached(page_size: int) -> None:
    """The chunks before the one with the bad token are sound and stay cached. Nothing of that chunk stays cached."""
    settings = {"chunked_prefill_size": 8, "page_size": page_size}
    engine = build_engine(config_of(corrupted_copy(target_folder(vocab_size=VOCAB), EMBEDDING), **settings))
    sound_tokens = (
        requests()[-1].prompt_token_ids.index(BAD_TOKEN) // 8 * 8
    )  # tokens in whole chunks before the bad one's
    for turn in range(2):
        last_output = run(engine, [replace(requests()[-1], request_id=f"late{turn}")]).last[f"late{turn}"]
        assert last_output.finish_reason == "error"
        assert last_output.cached_tokens == (sound_tokens // page_size * page_size if turn else 0)
        assert engine._parts.cache.evictable_pages == sound_tokens // page_size


@pytest.mark.parametrize("with_other_request", [False, True])
def test_non_finite_chunk_without_output_ends_a_request_with_logprobs(with_other_request: bool) -> None:
    """The bad chunk is not the last of the prompt, so no token is sampled from it and its step returns no
    log-probabilities. The request must end in that step all the same.
    """
    late_request = requests()[-1]
    late_request = replace(late_request, params=replace(late_request.params, logprobs=2))
    engine = build_engine(config_of(corrupted_copy(target_folder(vocab_size=VOCAB), EMBEDDING), chunked_prefill_size=7))
    result = check(engine, [*requests()[:1], late_request] if with_other_request else [late_request], clean_result())
    assert result.last["late"].error_code == "nonfinite_logits" and result.last["late"].logprobs == ()


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "mistral", "mixtral"])
def test_non_finite_draft_nodes_do_not_affect_any_attention_family(family: str) -> None:
    """The families have sliding windows, sinks and latents. The draft often proposes nodes with the bad token; such
    nodes must not change any output.
    """
    case = next(iter(FAMILIES[family].cases))
    target = family_checkpoint(family, case).folder
    requests = [
        make_request("a", [3, 5, 7, 11, 2], SAMPLING["greedy"], max_tokens=20, ignore_eos=True),
        make_request("b", list(range(2, 18)), SAMPLING["0.8"], seed=4, max_tokens=20, ignore_eos=True),
        make_request("c", [4, BAD_TOKEN, 6], SAMPLING["greedy"], max_tokens=20, ignore_eos=True),
    ]
    plain_result = clean_run(target, requests)
    config = config_of(corrupted_copy(target, EMBEDDING), draft_folder(target), 4, 3, chunked_prefill_size=6)
    result = check(speculative_engine(config, "oracle", texts_of(requests, plain_result), 0.6), requests, plain_result)
    assert result.last["c"].finish_reason == "error"


def nonfinite_counter(engine: Engine) -> float:
    """Return the value of the metric `aerie_nonfinite_requests_total`."""
    families = engine.metrics.registry.collect()
    return sum(s.value for family in families for s in family.samples if s.name == "aerie_nonfinite_requests_total")


def finite_hidden_recorder(finite_flags: list[bool]) -> Callable[[Engine, StepResult], None]:
    """Return a callback for after each step. It records whether the hidden states in the draft input of each decoding
    request are finite.
    """

    def record(engine: Engine, _: StepResult) -> None:
        rows = [sequence.row for sequence in engine._parts.scheduler.running if not sequence.prefilling]
        finite_flags.extend(engine._parts.lockstep.step.draft_inputs.hidden[rows].isfinite().all(-1).tolist())

    return record


@pytest.mark.parametrize(("topk", "num_steps"), [(1, 4), (4, 3)])
@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight", "fc.weight"])
def test_non_finite_draft_changes_no_token_and_recovers(name: str, topk: int, num_steps: int) -> None:
    """NaN is in the draft's embedding of one token, in its head for one token, or in one row of its fc. The last two
    give NaN at every step.
    """
    target = target_folder(vocab_size=VOCAB)
    draft = corrupted_copy(draft_folder(target, hidden=48), name)
    plain_result = clean_result()
    submitted = [request for request in requests() if "late" not in request.request_id]
    result = run(build_engine(config_of(target, draft, topk, num_steps, chunked_prefill_size=16)), submitted)
    assert {n: (result.tokens[n], o.finish_reason) for n, o in result.last.items()} == {
        request.request_id: (plain_result.tokens[request.request_id], "length") for request in submitted
    }
    if name == "embed_tokens.weight":
        finite_flags: list[bool] = []
        engine = build_engine(config_of(target, draft, topk, num_steps))
        request = next(request for request in submitted if BAD_TOKEN in plain_result.tokens[request.request_id][1:10])
        run(engine, [request], finite_hidden_recorder(finite_flags))
        assert not all(finite_flags) and finite_flags[-1], "some draft inputs must be non-finite, but not the last one"


def test_nan_in_lm_head_ends_every_request() -> None:
    """NaN in the head's row of one token is in the logits of every request."""
    bad_target = corrupted_copy(target_folder(vocab_size=VOCAB), "lm_head.weight")
    result = run(build_engine(config_of(bad_target)), requests()[:4])
    assert {output.finish_reason for output in result.last.values()} == {"error"}
    assert not any(result.tokens.values())


@pytest.mark.parametrize("max_tokens", [0, 4])
@pytest.mark.parametrize("chunk", [7, -1])
def test_non_finite_prompt_logprobs_end_the_request_with_an_error(chunk: int, max_tokens: int) -> None:
    """With `max_tokens` 0 too, a request with a bad prompt must end with an error, not as if its prompt was scored."""
    engine = build_engine(
        config_of(corrupted_copy(target_folder(vocab_size=VOCAB), EMBEDDING), chunked_prefill_size=chunk)
    )
    bad_request = requests()[-1]
    clean_prompt = tuple(token for token in bad_request.prompt_token_ids if token != BAD_TOKEN)
    params = replace(bad_request.params, max_tokens=max_tokens, prompt_logprobs=1)
    submitted = [
        replace(bad_request, params=params),
        replace(bad_request, request_id="clean", prompt_token_ids=clean_prompt, params=params),
    ]
    result = run(engine, submitted)
    assert result.last["late"].error_code == "nonfinite_logits" and result.tokens["late"] == []
    assert result.last["clean"].finish_reason == "length" or result.tokens["clean"][-1] == BAD_TOKEN
    assert len(result.outputs["clean"][0].prompt_logprobs) == len(clean_prompt) - 1
