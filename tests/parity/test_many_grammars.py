"""Two hundred JSON schemas, and fifty regular expressions and EBNF grammars, run through the engine.

The packages `jsonschema` and `re` check the outputs of plain decoding. Trees, chains, several ranks and resumed streams
must give the same tokens.
"""

import json
import re
from dataclasses import replace
from functools import cache

import pytest
from jsonschema import Draft202012Validator

from cluster.config import EngineConfig
from cluster.engine import build_engine
from cluster.grammar.vocabulary import Vocabulary
from cluster.request import LogitAdjustments, Request, RequestParams
from cluster.tokenizer.tokenizer import TextTokenizer
from tests.grammar.checks import FORMAT_CHECKER
from tests.grammar.walks import DEMO, Grammars, grammars_of
from tests.parity.harness import RunResult, config_of, run
from tests.parity.wild import GRAMMARS, SCHEMAS
from tests.support.tiny_checkpoints import draft_folder, target_folder

VOCAB = 2048
EOS = 1
MAX_TOKENS = 160
SHAPES = [(1, 3), (4, 4)]
TEMPERATURES = (0.0, 1.0)


@cache
def closing_adjustments() -> LogitAdjustments:
    """Return a bias and a penalty that make a random model end its strings, lists and numbers."""
    tokenizer = TextTokenizer.load(str(DEMO))
    closing = [
        token for token in range(VOCAB) if tokenizer.token_text(token)[0] in ('"', "}", "]", '"}', '"]', ",", " ")
    ]
    return LogitAdjustments(frequency_penalty=0.2, bias=tuple((token, 6.0) for token in (EOS, *closing)))


@cache
def grammars() -> Grammars:
    return grammars_of(Vocabulary.from_tokenizer(TextTokenizer.load(str(DEMO)), VOCAB, (EOS,)))


@cache
def grammar_requests(temperature: float) -> tuple[Request, ...]:
    """Return one request for every grammar. The request id is the name of the grammar."""
    requests = []
    for index, (name, grammar) in enumerate(GRAMMARS.items()):
        prompt = tuple(5 + (index * 37 + 11 * i) % (VOCAB - 5) for i in range(3 + index % 9))
        params = RequestParams(
            temperature=temperature,
            seed=90 + index,
            max_tokens=MAX_TOKENS,
            adjustments=closing_adjustments(),
            grammar=grammars()._compiled(grammar),
        )
        requests.append(Request(name, prompt, params))
    return tuple(requests)


def config(topk: int, num_steps: int, **settings: object) -> EngineConfig:
    target = target_folder(vocab_size=VOCAB)
    config_kwargs = {"tokenizer_path": str(DEMO), "max_running_requests": 24, "max_total_tokens": 8192}
    config_kwargs |= {"speculative_forced_rows": 96, **settings}
    if not topk:
        return config_of(target, **config_kwargs)
    nodes = {} if topk == 1 else {"speculative_num_draft_tokens": 3 * topk}
    return config_of(target, draft_folder(target), topk, num_steps, **nodes, **config_kwargs)


@cache
def plain(temperature: float) -> RunResult:
    return run(build_engine(config(0, 0)), grammar_requests(temperature), max_steps=20_000)


@cache
def text_of(temperature: float, name: str) -> str:
    return TextTokenizer.load(str(DEMO)).decode(plain(temperature).tokens[name])


def is_valid_output(name: str, text: str) -> bool:
    """Return whether a complete output follows its grammar. `jsonschema` checks schemas, and `re` checks regular
    expressions: they share no code with Aerie. EBNF grammars are checked by Aerie's own matcher.
    """
    if name in SCHEMAS:
        validator = Draft202012Validator(SCHEMAS[name], format_checker=FORMAT_CHECKER)
        return bool(validator.is_valid(json.loads(text)))
    if name.startswith("regex: "):
        return re.fullmatch(name.removeprefix("regex: "), text, re.ASCII) is not None
    return grammars().accepts(GRAMMARS[name], text)


def differing_streams(expected: RunResult, result: RunResult) -> dict[str, str]:
    """Return the last output of each request whose completion differs from the expected one."""
    return {
        name: repr(result.last[name])
        for name, completion in expected.completions.items()
        if result.completions[name] != completion
    }


@pytest.mark.slow
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_every_finished_constrained_output_is_valid(temperature: float) -> None:
    last_outputs = plain(temperature).last
    finished_names = [name for name, output in last_outputs.items() if output.finish_reason == "stop"]
    print(len(finished_names), "of", len(last_outputs))
    assert not [
        (name, text_of(temperature, name))
        for name in finished_names
        if not is_valid_output(name, text_of(temperature, name))
    ]
    assert {output.finish_reason for output in last_outputs.values()} <= {"stop", "length"}
    assert len(finished_names) > 0.9 * len(last_outputs)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(("topk", "num_steps"), SHAPES)
def test_constrained_speculative_streams_match_plain_decoding(topk: int, num_steps: int, temperature: float) -> None:
    result = run(build_engine(config(topk, num_steps)), grammar_requests(temperature), max_steps=20_000)
    print(result.accept_length)
    assert not differing_streams(plain(temperature), result) and result.accept_length > 1.2


@pytest.mark.slow
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_constrained_streams_resume_in_the_middle_of_their_grammars(temperature: float) -> None:
    expected_tokens, resumed = plain(temperature).tokens, []
    for index, request in enumerate(grammar_requests(temperature)):
        tokens = expected_tokens[request.request_id]
        if sent_count := index % max(1, len(tokens)):
            prompt = (*request.prompt_token_ids, *tokens[:sent_count])
            resumed.append(replace(request, prompt_token_ids=prompt, resumed_tokens=sent_count))
    result = run(build_engine(config(4, 4)), resumed, max_steps=20_000)
    assert len(resumed) > 230
    for request in resumed:
        assert result.tokens[request.request_id] == expected_tokens[request.request_id][request.resumed_tokens :], (
            request.request_id
        )
