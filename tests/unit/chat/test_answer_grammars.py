"""The answer grammars of model families. Random outputs that a grammar allows must be read as calls that follow their
schemas.
"""

import json
from typing import Any

import jsonschema
import numpy as np
import pytest

from cluster.chat.events import Event
from cluster.chat.formats.choose import FORMATS, THINKING_MARKS, ChosenFormat, canonical_parser_names, choose
from cluster.chat.formats.plan import ChatFormat, PromptContext, with_token_ids
from cluster.grammar.asked import Grammar, GrammarError
from cluster.grammar.matching import Matchers, TextMatcher
from cluster.grammar.vocabulary import SPECIAL_TOKEN_PREFIX, Vocabulary
from cluster.grammar.worker import Worker
from tests.unit.chat.transcripts import OSLO, TOOLS, TRANSCRIPTS, merge_events

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 4},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
        "at": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["city", "days"],
}
NOW: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
NOTE: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 3}}
SCHEMAS = {"weather": WEATHER, "now": NOW, "note": NOTE}
STOP = 256
NAMES = sorted({name for format in FORMATS.values() for name in format.special_tokens if not name.startswith("<think")})
NAMES = [name for name in NAMES if name not in ("</think>", "<tool_call>", "</tool_call>") and "arg_" not in name]
TOKENS = {name: STOP + 1 + at for at, name in enumerate(NAMES)}
VOCABULARY = Vocabulary(
    (*(bytes([i]) for i in range(256)), b"", *(SPECIAL_TOKEN_PREFIX + name.encode() for name in NAMES)), (STOP,)
)


@pytest.fixture(scope="module")
def worker() -> Worker:
    return Worker(VOCABULARY)


MATCHERS = Matchers(VOCABULARY)


def compile_form(worker: Worker, form: Any) -> str:
    return worker.compile(
        Grammar("chat", json.dumps({"type": "structural_tag", "format": with_token_ids(form, TOKENS)}))
    )


def matcher_of(worker: Worker, form: Any) -> TextMatcher:
    return MATCHERS.matcher(compile_form(worker, form))


def ids_of(text: str) -> list[int]:
    """The token ids of a text: its special tokens, and single bytes for the rest."""
    token_ids: list[int] = []
    while text:
        name = next((name for name in NAMES if text.startswith(name)), "")
        token_ids += [TOKENS[name]] if name else text[0].encode()
        text = text[len(name) or 1 :]
    return token_ids


def text_of(ids: list[int]) -> str:
    raw = b"".join(NAMES[i - STOP - 1].encode() if i > STOP else bytes([i]) for i in ids)
    return raw.decode()


def walk(matcher: TextMatcher, seed: int, most: int = 4000) -> list[int]:
    """Draw random tokens that the matcher allows, mostly printable bytes and special tokens, until the end of text is
    allowed and drawn.
    """
    random = np.random.default_rng(seed)
    bitmask = np.zeros(VOCABULARY.bitmask_words, np.int32)
    drawn_tokens: list[int] = []
    while len(drawn_tokens) < most:
        matcher.fill((), bitmask)
        allowed = np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little"))
        assert len(allowed)
        if STOP in allowed and (len(allowed) == 1 or random.random() < 0.5):
            return drawn_tokens
        text_tokens = [token for token in allowed.tolist() if token != STOP]
        preferred_tokens = [token for token in text_tokens if (token >= 0x20 and token < 0x7F) or token > STOP]
        drawn_tokens.append(
            int(random.choice(preferred_tokens if preferred_tokens and random.random() < 0.8 else text_tokens))
        )
        matcher.accept(drawn_tokens[-1:])
    raise AssertionError("no end was drawn")


def read_events(format: ChatFormat, text: str, prompt: str = "") -> list[tuple[str, ...]]:
    reader = format.reader(SCHEMAS, True, PromptContext(prompt))
    events: list[Event] = [*reader.push(text), *reader.finish()]
    return merge_events(events)


@pytest.mark.parametrize(("name", "parallel_calls"), [*((name, True) for name in FORMATS), ("hermes", False)])
def test_required_calls_follow_their_tool_schemas(worker: Worker, name: str, parallel_calls: bool) -> None:
    format = FORMATS[name]
    grammar = compile_form(worker, format.calls_form(SCHEMAS, parallel_calls))  # no reasoning, as it ends by chance
    max_calls = 0
    for seed in range(5):
        events = read_events(format, text_of(walk(MATCHERS.matcher(grammar), seed)))
        calls = [event for event in events if event[0] == "call"]
        assert events == calls and calls, events
        max_calls = max(max_calls, len(calls))
        for _, tool, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[tool])
    assert max_calls > 1 if parallel_calls and name != "gpt-oss" else max_calls == 1


NOT_IN_ANSWER_GRAMMAR = {  # spaced otherwise than the grammar allows, or with marks in places where it allows none
    "hermes, marks inside a string",
    "hermes, a mark mentioned in the text",
    "hermes, a mark far from any call",
    "qwen3_coder, without the opening mark",
    "qwen3_coder, a mark mentioned in the text",
    "hermes, arguments as text",
    "hermes, a call after a malformed call",
    "hermes, cut in the closing mark",
    "hermes, reasoning and two calls",
    "llama3, two calls after a tag",
    "mistral, with a call id and reasoning",
    "gpt-oss",
    "gpt-oss, recipient first",
    "glm45",
    "glm45, an end mark inside a value",
}
ANSWERS_WITH_CALLS = [
    name
    for name, transcript in TRANSCRIPTS.items()
    if name not in NOT_IN_ANSWER_GRAMMAR and any(event[0] == "call" for event in transcript.events)
]
"""The transcripts with calls that the grammar of an answer accepts."""


def free_answer_grammar_accepts(worker: Worker, name: str) -> bool:
    """Return whether the grammar of a free answer accepts a transcript up to its end."""
    transcript = TRANSCRIPTS[name]
    format = FORMATS[transcript.format]
    free_schemas = {tool: {"type": "object", "additionalProperties": True} for tool in TOOLS}
    form = format.answer_form("free", format.calls_form(free_schemas, True), PromptContext(transcript.prompt))
    matcher = matcher_of(worker, form)
    try:
        matcher.accept(ids_of(transcript.text.removesuffix("<|call|>")))
    except GrammarError:
        return False
    return matcher.finished


@pytest.mark.parametrize("name", ANSWERS_WITH_CALLS)
def test_answer_grammar_accepts_calls_as_each_model_family_writes_them(worker: Worker, name: str) -> None:
    """The transcripts are spaced as each family spaces its calls."""
    assert free_answer_grammar_accepts(worker, name)


@pytest.mark.parametrize("name", sorted(NOT_IN_ANSWER_GRAMMAR))
def test_answer_grammar_refuses_the_transcripts_that_are_listed_as_refused(worker: Worker, name: str) -> None:
    assert not free_answer_grammar_accepts(worker, name)


@pytest.mark.parametrize("name", ["glm45", "qwen3_coder"])
def test_xml_call_arguments_follow_the_tool_schema(worker: Worker, name: str) -> None:
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    counts = {"type": "object", "additionalProperties": {"type": "integer"}}

    def accepts(schema: dict[str, Any], *members: tuple[str, str]) -> bool:
        form = FORMATS[name].calls_form({"f": schema}, False)
        arguments_text = {
            "glm45": "".join(f"<arg_key>{a}</arg_key>\n<arg_value>{b}</arg_value>\n" for a, b in members),
            "qwen3_coder": "".join(f"<parameter={a}>\n{b}\n</parameter>\n" for a, b in members),
        }[name]
        call_text = {
            "glm45": f"<tool_call>f\n{arguments_text}</tool_call>",
            "qwen3_coder": f"<tool_call>\n<function=f>\n{arguments_text}</function>\n</tool_call>",
        }[name]
        matcher = matcher_of(worker, form)
        try:
            matcher.accept(ids_of(call_text))
        except GrammarError:
            return False
        return matcher.finished

    assert accepts(city, ("city", "Oslo")) and not accepts(city, ("city", "Oslo"), ("days", "3"))
    assert accepts({**city, "additionalProperties": True}, ("city", "Oslo"), ("days", "3"), ("a b", "{}"))
    assert accepts(counts) and accepts(counts, ("a", "1"), ("b", "-2")) and not accepts(counts, ("a", "x"))
    with_declared = {"type": "object", "properties": {"n": {"type": "integer"}, "no": {}}, "additionalProperties": True}
    assert accepts(with_declared, ("n", "1"), ("m", "a"), ("nx", "b"), ("nob", "c"))
    assert not accepts(with_declared, ("m", "a"), ("n", "hello")), "a declared property is not an additional property"
    min_length = {"type": "object", "properties": {"text": {"type": "string", "minLength": 3}}, "required": ["text"]}
    assert accepts(min_length, ("text", "a<b && <i>c</i>")) and not accepts(min_length, ("text", "ab"))
    with pytest.raises(GrammarError, match="#"):
        accepts({"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#"}}}})
    assert accepts({"type": "object"}, ("a", "x y")) and accepts({"type": "object"})
    assert accepts({"type": "object", "properties": {}}) and not accepts(
        {"type": "object", "properties": {}}, ("a", "1")
    )
    with pytest.raises(GrammarError, match="required must be a list of names"):
        accepts({**city, "required": [["city"]]})


def test_reasoning_may_precede_a_constrained_answer(worker: Worker) -> None:
    answer = {"type": "json_schema", "json_schema": WEATHER}
    for name, thinking in (("hermes", THINKING_MARKS["think"]), ("mistral", THINKING_MARKS["mistral"])):
        assert thinking is not None
        format = FORMATS[name]
        form = format.answer_form(answer, None, PromptContext())
        for text in (OSLO, f"{thinking.begin}any <b> [text] {{{thinking.end}{OSLO}"):
            matcher = matcher_of(worker, form)
            matcher.accept(ids_of(text))
            assert matcher.finished, text
        opened_matcher = matcher_of(worker, format.answer_form(answer, None, PromptContext(f"x{thinking.begin}\n")))
        opened_matcher.accept(ids_of(f"hm{thinking.end}\n\n"))
        assert not opened_matcher.finished
        opened_matcher.accept(ids_of(OSLO))
        assert opened_matcher.finished
    closed_matcher = matcher_of(
        worker, FORMATS["hermes"].answer_form(answer, None, PromptContext("<think>\n\n</think>\n\n"))
    )
    assert np.flatnonzero(np.unpackbits(fill_bitmask(closed_matcher).view(np.uint8), bitorder="little")).tolist() == [
        ord("{")
    ]
    harmony_matcher = matcher_of(
        worker, FORMATS["gpt-oss"].answer_form(answer, None, PromptContext("<|start|>assistant"))
    )
    harmony_matcher.accept(
        ids_of("<|channel|>analysis<|message|>{<|end|><|start|>assistant<|channel|>final<|message|>" + OSLO)
    )
    assert harmony_matcher.finished


def fill_bitmask(matcher: TextMatcher) -> Any:
    bitmask = np.zeros(VOCABULARY.bitmask_words, np.int32)
    matcher.fill((), bitmask)
    return bitmask


def test_call_grammar_allows_special_tokens_only_at_their_positions(worker: Worker) -> None:
    format = FORMATS["mistral"]
    matcher = matcher_of(worker, format.calls_form(SCHEMAS, True))
    special_tokens = {TOKENS[name] for name in NAMES}

    def allowed() -> set[int]:
        return {*np.flatnonzero(np.unpackbits(fill_bitmask(matcher).view(np.uint8), bitorder="little")).tolist()}

    assert allowed() == {TOKENS["[TOOL_CALLS]"]}
    matcher.accept(ids_of("[TOOL_CALLS]weather"))
    assert allowed() == {TOKENS["[ARGS]"]}
    matcher.accept(ids_of('[ARGS]{"city": "'))
    assert not allowed() & special_tokens, "a string contains no special token"
    matcher.accept(ids_of('a", "days": 1}'))
    assert allowed() & special_tokens == {TOKENS["[TOOL_CALLS]"]}
    free_matcher = matcher_of(
        worker, format.answer_form("free", format.calls_form(SCHEMAS, True), PromptContext("[THINK]a[/THINK]"))
    )
    matcher = free_matcher
    assert allowed() & special_tokens == {TOKENS["[TOOL_CALLS]"]}, "free text allows only the mark that begins a call"


TEMPLATES: dict[str, tuple[str, set[str], str, ChosenFormat]] = {
    "qwen3": (
        "{% if tools %}<tool_call>{% endif %}<think>",
        {"<tool_call>"},
        "qwen3",
        ChosenFormat(None, "hermes", "think"),
    ),
    "qwen2.5": ("{% if tools %}<tool_call>{% endif %}", set(), "qwen2", ChosenFormat(None, "hermes", "none")),
    "coder": ("<tool_call><function=x><parameter=y>", set(), "", ChosenFormat(None, "qwen3_coder", "none")),
    "llama": ("parameters", {"<|python_tag|>"}, "llama", ChosenFormat(None, "llama3_json", "none")),
    "old mistral": ("x", {"[TOOL_CALLS]"}, "", ChosenFormat(None, "mistral_list", "none")),
    "magistral": ("x", {"[TOOL_CALLS]", "[ARGS]", "[THINK]"}, "", ChosenFormat(None, "mistral", "mistral")),
    "r1": ("```json", {"<｜tool▁sep｜>", "<think>"}, "deepseek_v3", ChosenFormat(None, "deepseek_v3", "think")),
    "v3.1": ("x</think>", {"<｜tool▁sep｜>"}, "deepseek_v3", ChosenFormat(None, "deepseek_v31", "think")),
    "glm": ("<tool_call><arg_key><think>", set(), "glm4_moe", ChosenFormat(None, "glm45", "think")),
    "gpt-oss": ("<|channel|>", {"<|channel|>"}, "gpt_oss", ChosenFormat(None, "gpt-oss", "gpt-oss")),
    "plain": ("{{ messages }}", set(), "llama", ChosenFormat(None, "none", "none")),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_choose_selects_formats_from_template_and_special_tokens(name: str) -> None:
    template, tokens, kind, expected = TEMPLATES[name]
    found = choose(template, tokens, kind, (None, None))
    assert (found.call_format, found.reasoning_format) == (expected.call_format, expected.reasoning_format)
    forced = choose(template, tokens, kind, canonical_parser_names("glm", "qwen3"))
    assert (forced.call_format, forced.reasoning_format) == ("glm45", "think")
    assert choose(template, tokens, kind, canonical_parser_names("none", "none")).format is None


def test_compact_answer_refuses_spaces_and_may_follow_reasoning(worker: Worker) -> None:
    answer = {"type": "json_schema", "json_schema": WEATHER, "compact": True}
    form = FORMATS["hermes"].answer_form(answer, None, PromptContext())
    for text, allowed in (('{"city":"a","days":1}', True), ('{"city": "a"', False)):
        matcher = matcher_of(worker, form)
        if allowed:
            matcher.accept(ids_of(f"<think>x</think>\n\n{text}"))
            assert matcher.finished
        else:
            with pytest.raises(GrammarError):
                matcher.accept(ids_of(text))
