"""Two hundred schemas and fifty expressions and grammars through the engine: outputs are valid, trees change nothing.

`jsonschema` and `re` judge what plain decoding gives; trees, chains, several ranks and resumed streams must give the
same tokens.
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
from tests.grammar.checks import CHECKS
from tests.grammar.walks import DEMO, Grammars, grammars_of
from tests.parity.harness import Run, config_of, run
from tests.parity.wild import GRAMMARS, SCHEMAS
from tests.tiny import draft_folder, target_folder

VOCAB = 2048
EOS = 1
MOST = 160
SHAPES = [(1, 3), (4, 4)]
TEMPERATURES = (0.0, 1.0)


@cache
def towards_the_end() -> LogitAdjustments:
    """What has a random model end its strings, lists and numbers: a bias, and penalties for what it repeats."""
    tokenizer = TextTokenizer.load(str(DEMO))
    closing = [
        token for token in range(VOCAB) if tokenizer.token_text(token)[0] in ('"', "}", "]", '"}', '"]', ",", " ")
    ]
    return LogitAdjustments(frequency_penalty=0.2, bias=tuple((token, 6.0) for token in (EOS, *closing)))


@cache
def grammars() -> Grammars:
    return grammars_of(Vocabulary.from_tokenizer(TextTokenizer.load(str(DEMO)), VOCAB, (EOS,)))


@cache
def asked(temperature: float) -> tuple[Request, ...]:
    """A request for every grammar."""
    made = []
    for at, (name, grammar) in enumerate(GRAMMARS.items()):
        prompt = tuple(5 + (at * 37 + 11 * i) % (VOCAB - 5) for i in range(3 + at % 9))
        params = RequestParams(
            temperature=temperature,
            seed=90 + at,
            max_tokens=MOST,
            adjustments=towards_the_end(),
            grammar=grammars()._compiled(grammar),
        )
        made.append(Request(name, prompt, params))
    return tuple(made)


def config(topk: int, num_steps: int, **settings: object) -> EngineConfig:
    target = target_folder(vocab_size=VOCAB)
    given = {"tokenizer_path": str(DEMO), "max_running_requests": 24, "max_total_tokens": 8192}
    given |= {"speculative_forced_rows": 96, **settings}
    if not topk:
        return config_of(target, **given)
    nodes = {} if topk == 1 else {"speculative_num_draft_tokens": 3 * topk}
    return config_of(target, draft_folder(target), topk, num_steps, **nodes, **given)


@cache
def plain(temperature: float) -> Run:
    return run(build_engine(config(0, 0)), asked(temperature), limit=20_000)


@cache
def text_of(temperature: float, name: str) -> str:
    return TextTokenizer.load(str(DEMO)).decode(plain(temperature).tokens[name])


def valid(name: str, text: str) -> bool:
    """Whether a whole output is what was asked for, by somebody else's judgement."""
    if name in SCHEMAS:
        judge = Draft202012Validator(SCHEMAS[name], format_checker=CHECKS)
        return bool(judge.is_valid(json.loads(text)))
    if name.startswith("regex: "):
        return re.fullmatch(name.removeprefix("regex: "), text, re.ASCII) is not None
    return grammars().accepts(GRAMMARS[name], text)


def differing(said: Run, result: Run) -> dict[str, str]:
    """Streams that are not the same, with how they ended."""
    return {name: repr(result.last[name]) for name, end in said.ended.items() if result.ended[name] != end}


@pytest.mark.slow
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_every_finished_constrained_output_is_valid(temperature: float) -> None:
    last = plain(temperature).last
    ended = [name for name, output in last.items() if output.finish_reason == "stop"]
    print(len(ended), "of", len(last))
    assert not [(name, text_of(temperature, name)) for name in ended if not valid(name, text_of(temperature, name))]
    assert {output.finish_reason for output in last.values()} <= {"stop", "length"}
    assert len(ended) > 0.9 * len(last)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(("topk", "num_steps"), SHAPES)
def test_constrained_speculative_streams_match_plain_decoding(topk: int, num_steps: int, temperature: float) -> None:
    result = run(build_engine(config(topk, num_steps)), asked(temperature), limit=20_000)
    print(result.accept_length)
    assert not differing(plain(temperature), result) and result.accept_length > 1.2


@pytest.mark.slow
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_constrained_streams_resume_in_the_middle_of_their_grammars(temperature: float) -> None:
    said, resumed = plain(temperature).tokens, []
    for at, one in enumerate(asked(temperature)):
        tokens = said[one.request_id]
        if sent := at % max(1, len(tokens)):
            prompt = (*one.prompt_token_ids, *tokens[:sent])
            resumed.append(replace(one, prompt_token_ids=prompt, resumed_tokens=sent))
    result = run(build_engine(config(4, 4)), resumed, limit=20_000)
    assert len(resumed) > 230
    for one in resumed:
        assert result.tokens[one.request_id] == said[one.request_id][one.resumed_tokens :], one.request_id
