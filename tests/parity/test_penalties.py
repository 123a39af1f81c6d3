"""Penalties, biases, bans, a least length: plain decoding equals transformers' processors, and trees equal it."""

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
from tests.pairwise import covering
from tests.parity.drafts import Texts
from tests.parity.harness import (
    GREEDY,
    SAMPLING,
    VOCAB,
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
from tests.parity.test_transformers import oracle

EOS = 1
KINDS: dict[str, LogitAdjustments] = {
    "presence": LogitAdjustments(presence_penalty=1.5),
    "frequency": LogitAdjustments(frequency_penalty=0.7),
    "repetition": LogitAdjustments(repetition_penalty=1.4),
    "rewards": LogitAdjustments(presence_penalty=-0.5, frequency_penalty=-0.2, repetition_penalty=0.8),
    "bias": LogitAdjustments(bias=((3, 4.0), (7, -100.0), (11, 2.5))),
    "allowed": LogitAdjustments(allowed_token_ids=(2, 5, 9, 13, 17)),
    "words": LogitAdjustments(bad_words_token_ids=((4,), (6, 8), (9, 9, 9), (10, 3), (3, 10), (12, 12))),
    "least": LogitAdjustments(min_tokens=9),
    "all": LogitAdjustments(0.4, 0.3, 1.2, ((3, 1.0), (1, 2.0)), tuple(range(1, 20)), ((5, 6), (2,)), 6),
}
SHAPES = [(1, 3), (1, 5), (3, 3), (4, 5)]


def asked(sampling: str) -> list[Request]:
    """A request of each kind, and two without adjustments between them."""
    common = {"max_tokens": 20, "stop_token_ids": (14,)}
    kinds: dict[str, LogitAdjustments | None] = {"none": None, **KINDS, "neither": None}
    return [
        request(name, prompts()[i % 8], SAMPLING[sampling], seed=70 + i, adjustments=adjustments, **common)
        for i, (name, adjustments) in enumerate(kinds.items())
    ]


def config(topk: int, num_steps: int, **settings: object) -> EngineConfig:
    """That of a tree, of a chain, or with topk 0 of plain decoding."""
    target, draft = tiny_pair()
    return config_of(target, draft, topk, num_steps, **settings) if topk else config_of(target, **settings)


@cache
def plain(sampling: str) -> Run:
    """Each request alone, without prefix reuse."""
    return run_alone(build_engine(config(0, 0, disable_radix_cache=True)), asked(sampling))


def truth(sampling: str) -> Texts:
    return texts_of(asked(sampling), plain(sampling))


class Counted(LogitsProcessor):
    """Presence and frequency penalties as OpenAI documents them, over the output; transformers has none."""

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self._prompt, self._presence, self._frequency = prompt, presence, frequency

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        count = torch.bincount(input_ids[0, self._prompt :], minlength=scores.shape[1])
        return scores - self._frequency * count - self._presence * (count > 0)  # type: ignore[return-value]


def processors(adjustments: LogitAdjustments, prompt: int, ends: list[int]) -> LogitsProcessorList:
    a, made = adjustments, LogitsProcessorList()
    if a.bias:
        made.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in a.bias}))
    if a.repetition_penalty != 1.0:
        made.append(RepetitionPenaltyLogitsProcessor(a.repetition_penalty))
    made.append(Counted(prompt, a.presence_penalty, a.frequency_penalty))
    if a.allowed_token_ids is not None:
        made.append(SuppressTokensLogitsProcessor([i for i in range(VOCAB) if i not in a.allowed_token_ids]))
    if a.bad_words_token_ids:
        made.append(NoBadWordsLogitsProcessor([list(word) for word in a.bad_words_token_ids]))
    if a.min_tokens:
        made.append(MinNewTokensLengthLogitsProcessor(prompt, a.min_tokens, ends))
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_plain_decoding_with_penalties_matches_transformers_processors(kind: str) -> None:
    folder, differ = tiny_pair()[0], False
    engine = build_engine(config_of(folder))
    for i, prompt in enumerate(prompts()):
        one = request(f"{i}", prompt, GREEDY, max_tokens=24, adjustments=KINDS[kind], stop_token_ids=(14,))
        ends = [14, *engine._parts.resolved.target.eos_token_ids]
        text, made = list(prompt), processors(KINDS[kind], len(prompt), ends)
        while len(text) < len(prompt) + 24 and not (len(text) > len(prompt) and text[-1] in ends):
            ids = torch.tensor([text])
            with torch.inference_mode():
                scores = made(ids, oracle(folder)(ids).logits[:, -1].double())
            text.append(int(scores.argmax()))
        assert run(engine, [one]).tokens[f"{i}"] == text[len(prompt) :]
        bare = run(engine, [replace(one, params=replace(one.params, adjustments=None))]).tokens[f"{i}"]
        differ |= bare != text[len(prompt) :]
    assert differ, "the adjustments change nothing here"


@pytest.mark.parametrize(("shape", "sampling", "kind"), covering([SHAPES, list(SAMPLING), ["model", "corrected"]]))
def test_tree_decoding_with_penalties_matches_plain_decoding(shape: tuple[int, int], sampling: str, kind: str) -> None:
    engine = speculative(config_of(*tiny_pair(), *shape), kind, truth(sampling))
    result = run(engine, asked(sampling))
    assert result.ended == plain(sampling).ended
    assert result.accept_length > (1.0 if kind == "model" else 1.4)


@pytest.mark.parametrize(("topk", "num_steps"), [(0, 0), (1, 3), (3, 3)])
def test_penalised_outputs_survive_retraction_and_chunked_prefill(topk: int, num_steps: int) -> None:
    scanty = scarce(config(topk, num_steps, chunked_prefill_size=7), asked("0.8"))
    result = run(build_engine(scanty), asked("0.8"))
    assert result.retracted > 0
    assert result.ended == plain("0.8").ended


@pytest.mark.parametrize("kind", ["rewards", "allowed", "least", "all"])
def test_first_penalised_prompt_may_be_chunked(kind: str) -> None:
    """What a request changes is sent when it is admitted, before a step that draws in its name."""
    one = next(one for one in asked("greedy") if one.request_id == kind)
    one = replace(one, prompt_token_ids=prompts()[2])
    whole = run(build_engine(config(0, 0)), [one])
    assert run(build_engine(config(0, 0, chunked_prefill_size=5)), [one]).ended == whole.ended
    bare = run(build_engine(config(0, 0)), [replace(one, params=replace(one.params, adjustments=None))])
    assert bare.ended != whole.ended, "the adjustments change nothing here"


@pytest.mark.parametrize(("topk", "num_steps"), [(0, 0), (3, 3)])
@pytest.mark.parametrize("sampling", ["greedy", "filtered"])
def test_penalised_stream_resumes_after_any_token_with_the_same_rest(topk: int, num_steps: int, sampling: str) -> None:
    engine = build_engine(config(topk, num_steps))
    resumed = []
    for one in asked(sampling):
        tokens = plain(sampling).tokens[one.request_id]
        for sent in range(1, len(tokens), 3):
            prompt = (*one.prompt_token_ids, *tokens[:sent])
            name = f"{one.request_id}/{sent}"
            resumed.append(replace(one, request_id=name, prompt_token_ids=prompt, resumed_tokens=sent))
    result = run(engine, resumed)
    for one in resumed:
        name = one.request_id.split("/")[0]
        assert result.tokens[one.request_id] == plain(sampling).tokens[name][one.resumed_tokens :]


def test_reused_row_drops_the_penalties_of_the_last_request() -> None:
    """One row is used by turns: whatever the last request was adjusted by is gone."""
    engine = build_engine(config_of(tiny_pair()[0], max_running_requests=1))
    result = run(engine, asked("greedy"))
    assert result.ended == plain("greedy").ended


@pytest.mark.parametrize("at", [2, 5])
def test_aborts_and_late_requests_do_not_change_penalised_outputs(at: int) -> None:
    engine, gone = build_engine(config_of(*tiny_pair(), 3, 3)), []
    whole = asked("0.8")

    def after(engine: Engine, step: StepResult) -> None:
        if engine._loop.steps == at:
            gone.extend(list(engine._sequences)[:3])
            for name in gone:
                engine.abort(name)
        if engine._loop.steps == at + 2:
            for one in whole[6:]:
                engine.submit(one)

    result = run(engine, whole[:6], after, later=whole[6:])
    kept = {name: ended for name, ended in plain("0.8").ended.items() if name not in gone}
    assert {name: result.ended[name] for name in kept} == kept
