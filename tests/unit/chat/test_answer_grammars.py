"""What holds a family's answers, walked through at random: what comes out is read as calls by their schemas."""

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
from tests.unit.chat.transcripts import OSLO, TOOLS, TRANSCRIPTS, merged

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


def compiled(worker: Worker, form: Any) -> str:
    return worker.compile(
        Grammar("chat", json.dumps({"type": "structural_tag", "format": with_token_ids(form, TOKENS)}))
    )


def matcher_of(worker: Worker, form: Any) -> TextMatcher:
    return MATCHERS.matcher(compiled(worker, form))


def ids_of(text: str) -> list[int]:
    """A text as bytes and special tokens."""
    found: list[int] = []
    while text:
        name = next((name for name in NAMES if text.startswith(name)), "")
        found += [TOKENS[name]] if name else text[0].encode()
        text = text[len(name) or 1 :]
    return found


def text_of(ids: list[int]) -> str:
    raw = b"".join(NAMES[i - STOP - 1].encode() if i > STOP else bytes([i]) for i in ids)
    return raw.decode()


def walk(matcher: TextMatcher, seed: int, most: int = 4000) -> list[int]:
    """Tokens that are drawn from what is allowed, letters least, until the end is allowed and drawn."""
    random = np.random.default_rng(seed)
    row = np.zeros(VOCABULARY.bitmask_words, np.int32)
    taken: list[int] = []
    while len(taken) < most:
        matcher.fill((), row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        assert len(allowed)
        if STOP in allowed and (len(allowed) == 1 or random.random() < 0.5):
            return taken
        texts = [token for token in allowed.tolist() if token != STOP]
        plain = [token for token in texts if (token >= 0x20 and token < 0x7F) or token > STOP]
        taken.append(int(random.choice(plain if plain and random.random() < 0.8 else texts)))
        matcher.accept(taken[-1:])
    raise AssertionError("no end was drawn")


def read(format: ChatFormat, text: str, prompt: str = "") -> list[tuple[str, ...]]:
    reader = format.reader(SCHEMAS, True, PromptContext(prompt))
    told: list[Event] = [*reader.push(text), *reader.finish()]
    return merged(told)


@pytest.mark.parametrize(("name", "several"), [*((name, True) for name in FORMATS), ("hermes", False)])
def test_required_calls_follow_their_tool_schemas(worker: Worker, name: str, several: bool) -> None:
    format = FORMATS[name]
    held = compiled(worker, format.calls_form(SCHEMAS, several))  # without the thought, which ends by chance
    most = 0
    for seed in range(5):
        told = read(format, text_of(walk(MATCHERS.matcher(held), seed)))
        calls = [event for event in told if event[0] == "call"]
        assert told == calls and calls, told
        most = max(most, len(calls))
        for _, tool, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[tool])
    assert most > 1 if several and name != "gpt-oss" else most == 1


@pytest.mark.parametrize("name", [name for name in TRANSCRIPTS if "thought" not in name or "opened" not in name])
def test_answer_grammar_accepts_calls_as_each_model_family_writes_them(worker: Worker, name: str) -> None:
    """Their calls, as they space them, are in the form of an answer that may have any."""
    transcript = TRANSCRIPTS[name]
    calls = [event for event in transcript.events if event[0] == "call"]
    if not calls or name in OTHERWISE_SPACED:
        return
    format = FORMATS[transcript.format]
    free = {tool: {"type": "object", "additionalProperties": True} for tool in TOOLS}
    form = format.answer_form("free", format.calls_form(free, True), PromptContext(transcript.prompt))
    matcher = matcher_of(worker, form)
    matcher.accept(ids_of(transcript.text.removesuffix("<|call|>")))
    assert matcher.finished


OTHERWISE_SPACED = {  # or written with marks as the form of an answer would not have them
    "hermes, marks inside of a string",
    "hermes, a mark that is spoken of",
    "hermes, a mark far from any call",
    "qwen3_coder, without what opens it",
    "qwen3_coder, a mark that is spoken of",
    "hermes, arguments as text",
    "hermes, a call after a broken one",
    "hermes, cut in the closing mark",
    "hermes, thought and two calls",
    "llama3, two with a tag",
    "mistral, with an id and thought",
    "gpt-oss",
    "gpt-oss, recipient first",
    "glm45",
    "glm45, an end inside of a value",
}


@pytest.mark.parametrize("name", ["glm45", "qwen3_coder"])
def test_xml_call_arguments_follow_the_tool_schema(worker: Worker, name: str) -> None:
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    counts = {"type": "object", "additionalProperties": {"type": "integer"}}

    def taken(schema: dict[str, Any], *members: tuple[str, str]) -> bool:
        form = FORMATS[name].calls_form({"f": schema}, False)
        inside = {
            "glm45": "".join(f"<arg_key>{a}</arg_key>\n<arg_value>{b}</arg_value>\n" for a, b in members),
            "qwen3_coder": "".join(f"<parameter={a}>\n{b}\n</parameter>\n" for a, b in members),
        }[name]
        around = {
            "glm45": f"<tool_call>f\n{inside}</tool_call>",
            "qwen3_coder": f"<tool_call>\n<function=f>\n{inside}</function>\n</tool_call>",
        }[name]
        matcher = matcher_of(worker, form)
        try:
            matcher.accept(ids_of(around))
        except GrammarError:
            return False
        return matcher.finished

    assert taken(city, ("city", "Oslo")) and not taken(city, ("city", "Oslo"), ("days", "3"))
    assert taken({**city, "additionalProperties": True}, ("city", "Oslo"), ("days", "3"), ("a b", "{}"))
    assert taken(counts) and taken(counts, ("a", "1"), ("b", "-2")) and not taken(counts, ("a", "x"))
    named = {"type": "object", "properties": {"n": {"type": "integer"}, "no": {}}, "additionalProperties": True}
    assert taken(named, ("n", "1"), ("m", "a"), ("nx", "b"), ("nob", "c"))
    assert not taken(named, ("m", "a"), ("n", "hello")), "one that is declared is no other"
    least = {"type": "object", "properties": {"text": {"type": "string", "minLength": 3}}, "required": ["text"]}
    assert taken(least, ("text", "a<b && <i>c</i>")) and not taken(least, ("text", "ab"))
    with pytest.raises(GrammarError, match="#"):
        taken({"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#"}}}})
    assert taken({"type": "object"}, ("a", "x y")) and taken({"type": "object"})
    assert taken({"type": "object", "properties": {}}) and not taken({"type": "object", "properties": {}}, ("a", "1"))
    with pytest.raises(GrammarError, match="required must be a list of names"):
        taken({**city, "required": [["city"]]})


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
        opened = matcher_of(worker, format.answer_form(answer, None, PromptContext(f"x{thinking.begin}\n")))
        opened.accept(ids_of(f"hm{thinking.end}\n\n"))
        assert not opened.finished
        opened.accept(ids_of(OSLO))
        assert opened.finished
    closed = matcher_of(worker, FORMATS["hermes"].answer_form(answer, None, PromptContext("<think>\n\n</think>\n\n")))
    assert np.flatnonzero(np.unpackbits(filled(closed).view(np.uint8), bitorder="little")).tolist() == [ord("{")]
    harmony = matcher_of(worker, FORMATS["gpt-oss"].answer_form(answer, None, PromptContext("<|start|>assistant")))
    harmony.accept(ids_of("<|channel|>analysis<|message|>{<|end|><|start|>assistant<|channel|>final<|message|>" + OSLO))
    assert harmony.finished


def filled(matcher: TextMatcher) -> Any:
    row = np.zeros(VOCABULARY.bitmask_words, np.int32)
    matcher.fill((), row)
    return row


def test_call_grammar_allows_special_tokens_only_at_their_positions(worker: Worker) -> None:
    format = FORMATS["mistral"]
    matcher = matcher_of(worker, format.calls_form(SCHEMAS, True))
    special = {TOKENS[name] for name in NAMES}

    def allowed() -> set[int]:
        return {*np.flatnonzero(np.unpackbits(filled(matcher).view(np.uint8), bitorder="little")).tolist()}

    assert allowed() == {TOKENS["[TOOL_CALLS]"]}
    matcher.accept(ids_of("[TOOL_CALLS]weather"))
    assert allowed() == {TOKENS["[ARGS]"]}
    matcher.accept(ids_of('[ARGS]{"city": "'))
    assert not allowed() & special, "inside of a string"
    matcher.accept(ids_of('a", "days": 1}'))
    assert allowed() & special == {TOKENS["[TOOL_CALLS]"]}
    free = matcher_of(
        worker, format.answer_form("free", format.calls_form(SCHEMAS, True), PromptContext("[THINK]a[/THINK]"))
    )
    matcher = free
    assert allowed() & special == {TOKENS["[TOOL_CALLS]"]}, "in free text a call may begin, and no other mark comes"


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
