"""Penalties, biases, bad words and `min_tokens`: plain decoding equals the logits processors of transformers, and tree
decoding equals plain decoding.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from cluster.config import EngineConfig
from cluster.engine import Engine, StepResult, build_engine
from cluster.request import LogitAdjustments, Request
from tests.parity.drafts import Texts
from tests.parity.harness import (
    GREEDY,
    SAMPLING,
    VOCAB,
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
from tests.parity.test_transformers import oracle
from tests.support.pairwise import covering

EOS = 1
KINDS: dict[str, LogitAdjustments] = {
    "presence": LogitAdjustments(presence_penalty=1.5),
    "frequency": LogitAdjustments(frequency_penalty=0.7),
    "repetition": LogitAdjustments(repetition_penalty=1.4),
    "rewards": LogitAdjustments(presence_penalty=-0.5, frequency_penalty=-0.2, repetition_penalty=0.8),
    "bias": LogitAdjustments(bias=((3, 4.0), (7, -100.0), (11, 2.5))),
    "allowed": LogitAdjustments(allowed_token_ids=(2, 5, 9, 13, 17)),
    "bad_words": LogitAdjustments(bad_words_token_ids=((4,), (6, 8), (9, 9, 9), (10, 3), (3, 10), (12, 12))),
    "min_tokens": LogitAdjustments(min_tokens=9),
    "all": LogitAdjustments(0.4, 0.3, 1.2, ((3, 1.0), (1, 2.0)), tuple(range(1, 20)), ((5, 6), (2,)), 6),
}
SHAPES = [(1, 3), (1, 5), (3, 3), (4, 5)]


def adjusted_requests(sampling: str) -> list[Request]:
    """Return a request of each kind, with a request without adjustments before and after them."""
    common = {"max_tokens": 20, "stop_token_ids": (14,)}
    kinds: dict[str, LogitAdjustments | None] = {"none": None, **KINDS, "neither": None}
    return [
        make_request(name, prompts()[i % 8], SAMPLING[sampling], seed=70 + i, adjustments=adjustments, **common)
        for i, (name, adjustments) in enumerate(kinds.items())
    ]


def config(topk: int, num_steps: int, **settings: object) -> EngineConfig:
    """Return the config of an engine that decodes with trees, with chains (topk 1), or plainly (topk 0)."""
    target, draft = tiny_pair()
    return config_of(target, draft, topk, num_steps, **settings) if topk else config_of(target, **settings)


@cache
def plain(sampling: str) -> RunResult:
    """The oracle: plain decoding of the requests, one by one, without prefix reuse."""
    return run_one_by_one(build_engine(config(0, 0, disable_radix_cache=True)), adjusted_requests(sampling))


def plain_texts(sampling: str) -> Texts:
    return texts_of(adjusted_requests(sampling), plain(sampling))


class OutputCountPenalties(LogitsProcessor):
    """Presence and frequency penalties as OpenAI documents them: they count output tokens. Transformers has none."""

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self._prompt_length, self._presence, self._frequency = prompt_length, presence, frequency

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        count = torch.bincount(input_ids[0, self._prompt_length :], minlength=scores.shape[1])
        return scores - self._frequency * count - self._presence * (count > 0)  # type: ignore[return-value]


def processors(adjustments: LogitAdjustments, prompt_length: int, stop_ids: list[int]) -> LogitsProcessorList:
    settings, processor_list = adjustments, LogitsProcessorList()
    if settings.bias:
        processor_list.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in settings.bias}))
    if settings.repetition_penalty != 1.0:
        processor_list.append(RepetitionPenaltyLogitsProcessor(settings.repetition_penalty))
    processor_list.append(OutputCountPenalties(prompt_length, settings.presence_penalty, settings.frequency_penalty))
    if settings.allowed_token_ids is not None:
        processor_list.append(
            SuppressTokensLogitsProcessor([i for i in range(VOCAB) if i not in settings.allowed_token_ids])
        )
    if settings.bad_words_token_ids:
        processor_list.append(NoBadWordsLogitsProcessor([list(word) for word in settings.bad_words_token_ids]))
    if settings.min_tokens:
        processor_list.append(MinNewTokensLengthLogitsProcessor(prompt_length, settings.min_tokens, stop_ids))
    return processor_list


@pytest.mark.parametrize("kind", KINDS)
def test_plain_decoding_with_penalties_matches_transformers_processors(kind: str) -> None:
    folder, any_difference = tiny_pair()[0], False
    engine = build_engine(config_of(folder))
    for i, prompt in enumerate(prompts()):
        penalised_request = make_request(
            f"{i}", prompt, GREEDY, max_tokens=24, adjustments=KINDS[kind], stop_token_ids=(14,)
        )
        stop_ids = [14, *engine._parts.resolved.target.eos_token_ids]
        tokens, processor_list = list(prompt), processors(KINDS[kind], len(prompt), stop_ids)
        while len(tokens) < len(prompt) + 24 and not (len(tokens) > len(prompt) and tokens[-1] in stop_ids):
            ids = torch.tensor([tokens])
            with torch.inference_mode():
                scores = processor_list(ids, oracle(folder)(ids).logits[:, -1].double())
            tokens.append(int(scores.argmax()))
        assert run(engine, [penalised_request]).tokens[f"{i}"] == tokens[len(prompt) :]
        unpenalised_tokens = run(
            engine, [replace(penalised_request, params=replace(penalised_request.params, adjustments=None))]
        ).tokens[f"{i}"]
        any_difference |= unpenalised_tokens != tokens[len(prompt) :]
    assert any_difference, "the adjustments change no output of this test"


@pytest.mark.parametrize(("shape", "sampling", "kind"), covering([SHAPES, list(SAMPLING), ["model", "corrected"]]))
def test_tree_decoding_with_penalties_matches_plain_decoding(shape: tuple[int, int], sampling: str, kind: str) -> None:
    engine = speculative_engine(config_of(*tiny_pair(), *shape), kind, plain_texts(sampling))
    result = run(engine, adjusted_requests(sampling))
    assert result.completions == plain(sampling).completions
    assert result.accept_length > (1.0 if kind == "model" else 1.4)


@pytest.mark.parametrize(("topk", "num_steps"), [(0, 0), (1, 3), (3, 3)])
def test_penalised_outputs_survive_retraction_and_chunked_prefill(topk: int, num_steps: int) -> None:
    small_config = scarce_config(config(topk, num_steps, chunked_prefill_size=7), adjusted_requests("0.8"))
    result = run(build_engine(small_config), adjusted_requests("0.8"))
    assert result.retracted > 0
    assert result.completions == plain("0.8").completions


@pytest.mark.parametrize("kind", ["rewards", "allowed", "min_tokens", "all"])
def test_first_penalised_prompt_may_be_chunked(kind: str) -> None:
    """The engine sends a request's adjustments to the device at its admission, which may be some steps before the first
    step that samples a token for it.
    """
    request = next(request for request in adjusted_requests("greedy") if request.request_id == kind)
    request = replace(request, prompt_token_ids=prompts()[2])
    unchunked_result = run(build_engine(config(0, 0)), [request])
    assert (
        run(build_engine(config(0, 0, chunked_prefill_size=5)), [request]).completions == unchunked_result.completions
    )
    unpenalised_result = run(
        build_engine(config(0, 0)), [replace(request, params=replace(request.params, adjustments=None))]
    )
    assert unpenalised_result.completions != unchunked_result.completions, (
        "the adjustments change no output of this test"
    )


@pytest.mark.parametrize(("topk", "num_steps"), [(0, 0), (3, 3)])
@pytest.mark.parametrize("sampling", ["greedy", "filtered"])
def test_penalised_stream_resumes_after_any_token_with_the_same_rest(topk: int, num_steps: int, sampling: str) -> None:
    engine = build_engine(config(topk, num_steps))
    resumed = []
    for request in adjusted_requests(sampling):
        tokens = plain(sampling).tokens[request.request_id]
        for sent_count in range(1, len(tokens), 3):
            prompt = (*request.prompt_token_ids, *tokens[:sent_count])
            name = f"{request.request_id}/{sent_count}"
            resumed.append(replace(request, request_id=name, prompt_token_ids=prompt, resumed_tokens=sent_count))
    result = run(engine, resumed)
    for request in resumed:
        name = request.request_id.split("/")[0]
        assert result.tokens[request.request_id] == plain(sampling).tokens[name][request.resumed_tokens :]


def test_reused_row_drops_the_penalties_of_the_last_request() -> None:
    """The engine has one row. Each request must find it without the adjustments of the request before."""
    engine = build_engine(config_of(tiny_pair()[0], max_running_requests=1))
    result = run(engine, adjusted_requests("greedy"))
    assert result.completions == plain("greedy").completions


@pytest.mark.parametrize("at", [2, 5])
def test_aborts_and_late_requests_do_not_change_penalised_outputs(at: int) -> None:
    engine, aborted_names = build_engine(config_of(*tiny_pair(), 3, 3)), []
    requests = adjusted_requests("0.8")

    def abort_and_submit(engine: Engine, step: StepResult) -> None:
        if engine._loop.steps == at:
            aborted_names.extend(list(engine._sequences)[:3])
            for name in aborted_names:
                engine.abort(name)
        if engine._loop.steps == at + 2:
            for request in requests[6:]:
                engine.submit(request)

    result = run(engine, requests[:6], abort_and_submit, later_requests=requests[6:])
    expected_completions = {
        name: completion for name, completion in plain("0.8").completions.items() if name not in aborted_names
    }
    assert {name: result.completions[name] for name in expected_completions} == expected_completions
