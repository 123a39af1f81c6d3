"""Answers as each model family writes them, from model cards and chat templates, and the events that they stand for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.chat.events import CallArguments, CallStarted, Event, ReasoningPiece, TextPiece
from cluster.chat.formats.choose import FORMATS
from cluster.chat.formats.plan import PromptContext
from cluster.chat.reading import AnswerReader

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
EMPTY: dict[str, Any] = {"type": "object", "properties": {}}
KINDS_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "zip": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "code": {"type": ["string", "null"]},
        "level": {"$ref": "#/$defs/Level"},
        "deep": {"type": "boolean"},
        "count": {"type": ["integer", "null"]},
        "any": {},
        "size": {"type": "number"},
        "all": {"allOf": [{"$ref": "#/$defs/Level"}], "description": "x"},
        "loop": {"$ref": "#/properties/loop"},
    },
    "additionalProperties": {"type": "string"},
    "$defs": {"Level": {"enum": ["1", "2"]}},
}
TOOLS: Mapping[str, Mapping[str, Any]] = {"weather": CITY, "now": EMPTY, "kinds": KINDS_SCHEMA}
OSLO = '{"city": "Oslo", "days": 2}'
EventTuple = tuple[str, ...]


@dataclass(frozen=True)
class Transcript:
    """The name of a format, the text that a model wrote after a prompt that ends with `prompt`, and its events."""

    format: str
    text: str
    events: Sequence[EventTuple]
    prompt: str = ""


def text_event(text: str) -> EventTuple:
    return ("text", text)


def reasoning_event(text: str) -> EventTuple:
    return ("reasoning", text)


def call_event(name: str, arguments: str) -> EventTuple:
    return ("call", name, arguments)


# DeepSeek's marks: between the parts of a call, before and after one call, before and after all calls.
SEP, ONE, ONE_END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
ALL, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
TRICKY = '{"city": "a}\\"{ </tool_call> [TOOL_CALLS] \\\\"}'
TRANSCRIPTS: dict[str, Transcript] = {
    "hermes": Transcript(
        "hermes",
        f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>',
        [call_event("weather", OSLO)],
    ),
    "hermes, reasoning and two calls": Transcript(
        "hermes",
        f'<think>\nLet me look.\n\nYes.\n</think>\n\nI look.\n<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n'
        '</tool_call>\n<tool_call>\n{"arguments": {}, "name": "now"}\n</tool_call>',
        [
            reasoning_event("Let me look.\n\nYes."),
            text_event("I look."),
            call_event("weather", OSLO),
            call_event("now", "{}"),
        ],
    ),
    "hermes, marks inside a string": Transcript(
        "hermes",
        f'<tool_call>{{"name": "weather", "arguments": {TRICKY}}}</tool_call> done ',
        [call_event("weather", TRICKY), text_event("done ")],
    ),
    "hermes, arguments as text": Transcript(
        "hermes",
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}</tool_call>',
        [call_event("weather", '{"city": "Oslo"}')],
    ),
    "hermes, no JSON": Transcript(
        "hermes",
        "I do:\n<tool_call>\n{'name': 'weather'}\n</tool_call>\nbye",
        [text_event("I do:\n<tool_call>\n{'name': 'weather'}\n</tool_call>\nbye")],
    ),
    "hermes, a call after a malformed call": Transcript(
        "hermes",
        '<tool_call>{"nome": 1}</tool_call>\n<tool_call>{"name": "now"}</tool_call>',
        [text_event('<tool_call>{"nome": 1}</tool_call>'), call_event("now", "{}")],
    ),
    "hermes, a mark mentioned in the text": Transcript(
        "hermes",
        'I use <tool_call> tags.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        [text_event("I use <tool_call> tags."), call_event("now", "{}")],
    ),
    "hermes, a mark far from any call": Transcript(
        "hermes",
        f'<tool_call>{"x" * 600}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>',
        [text_event(f"<tool_call>{'x' * 600}"), call_event("now", "{}")],
    ),
    "hermes, never closed": Transcript(
        "hermes",
        'so <tool_call>{"name": "weather", "arguments": {"city": "Os',
        [text_event('so <tool_call>{"name": "weather", "arguments": {"city": "Os')],
    ),
    "hermes, cut in the closing mark": Transcript(
        "hermes", '<tool_call>{"name": "now", "arguments": {}}\n</tool_c', [call_event("now", "{}")]
    ),
    "text that looks like marks": Transcript(
        "hermes", " a <b> and <tool and </think> \n", [text_event(" a <b> and <tool and </think> \n")]
    ),
    "hermes, reasoning opened by the prompt": Transcript(
        "hermes", "hm\n</think>\n\nyes", [reasoning_event("hm"), text_event("yes")], "<|im_start|>assistant\n<think>\n"
    ),
    "hermes, reasoning ended by the prompt": Transcript(
        "hermes", "<think> is a tag", [text_event("<think> is a tag")], "assistant\n<think>\n\n</think>\n\n"
    ),
    "hermes, reasoning cut off": Transcript("hermes", "<think>\nwell, </thi", [reasoning_event("well, </thi")]),
    "qwen3_coder": Transcript(
        "qwen3_coder",
        "Sure.\n<tool_call>\n<function=weather>\n<parameter=city>\nNew\n\nYork\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>",
        [text_event("Sure."), call_event("weather", '{"city": "New\\n\\nYork", "days": 2}')],
    ),
    "qwen3_coder, no arguments": Transcript(
        "qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", [call_event("now", "{}")]
    ),
    "qwen3_coder, without the opening mark": Transcript(
        "qwen3_coder",
        "Reading.\n\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>\nDone.",
        [text_event("Reading."), call_event("weather", '{"city": "Oslo"}'), text_event("Done.")],
    ),
    "qwen3_coder, a function that is not a tool": Transcript(
        "qwen3_coder", "so <function=other>\n</function> it is", [text_event("so <function=other>\n</function> it is")]
    ),
    "qwen3_coder, a mark mentioned in the text": Transcript(
        "qwen3_coder",
        "I use <tool_call> tags:\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        [text_event("I use <tool_call> tags:"), call_event("now", "{}")],
    ),
    "qwen3_coder, a mark inside a value": Transcript(
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nuse <parameter=x> here\n</parameter>\n</function>\n"
        "</tool_call>",
        [call_event("weather", '{"city": "use <parameter=x> here"}')],
    ),
    "qwen3_coder, values by their schema": Transcript(
        "qwen3_coder",
        "<tool_call>\n<function=kinds>\n"
        + "".join(
            f"<parameter={name}>\n{value}\n</parameter>\n"
            for name, value in {
                "zip": "02139",
                "code": "12345",
                "level": "1",
                "deep": "True",
                "count": "None",
                "any": "3",
                "size": "2",
                "all": "2",
                "loop": "[1]",
                "more": "7",
            }.items()
        )
        + "</function>\n</tool_call>",
        [
            call_event(
                "kinds",
                '{"zip": "02139", "code": "12345", "level": "1", "deep": true, "count": null, "any": 3, "size": 2, '
                '"all": "2", "loop": [1], "more": "7"}',
            )
        ],
    ),
    "llama3": Transcript("llama3_json", f'{{"name": "weather", "parameters": {OSLO}}}', [call_event("weather", OSLO)]),
    "llama3, two calls after a tag": Transcript(
        "llama3_json",
        f'<|python_tag|>{{"name": "weather", "parameters": {OSLO}}}; {{"name": "now", "parameters": {{}}}}',
        [call_event("weather", OSLO), call_event("now", "{}")],
    ),
    "llama3, an answer in JSON": Transcript(
        "llama3_json", '{"name": "Ann", "age": 3}', [text_event('{"name": "Ann", "age": 3}')]
    ),
    "llama3, a call in a sentence": Transcript(
        "llama3_json", 'say {"name": "now", "parameters": {}}', [text_event('say {"name": "now", "parameters": {}}')]
    ),
    "mistral": Transcript(
        "mistral",
        f"[TOOL_CALLS]weather[ARGS]{OSLO}[TOOL_CALLS]now[ARGS]{{}}",
        [call_event("weather", OSLO), call_event("now", "{}")],
    ),
    "mistral, with a call id and reasoning": Transcript(
        "mistral",
        f"[THINK]hm[/THINK]ok[TOOL_CALLS]weather[CALL_ID]abcdef123[ARGS]{OSLO}",
        [reasoning_event("hm"), text_event("ok"), call_event("weather", OSLO)],
    ),
    "mistral, a list": Transcript(
        "mistral_list",
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {OSLO}}}, {{"name": "now", "arguments": {{}}}}]',
        [call_event("weather", OSLO), call_event("now", "{}")],
    ),
    "mistral, an invalid list": Transcript(
        "mistral_list", '[TOOL_CALLS] [{"name": 1}] x', [text_event('[TOOL_CALLS] [{"name": 1}] x')]
    ),
    "deepseek_v3": Transcript(
        "deepseek_v3",
        f"I call.{ALL}{ONE}function{SEP}weather\n```json\n{OSLO}\n```{ONE_END}\n{ONE}function{SEP}now\n```json\n{{}}\n"
        f"```{ONE_END}{ALL_END}",
        [text_event("I call."), call_event("weather", OSLO), call_event("now", "{}")],
    ),
    "deepseek_r1, reasoning": Transcript(
        "deepseek_v3",
        f"so\n</think>\n\n{ALL}{ONE}function{SEP}now\n```json\n{{}}\n```{ONE_END}{ALL_END}",
        [reasoning_event("so"), call_event("now", "{}")],
        "<｜Assistant｜><think>\n",
    ),
    "deepseek_v31": Transcript(
        "deepseek_v31",
        f"{ALL}{ONE}weather{SEP}{OSLO}{ONE_END}{ONE}now{SEP}{{}}{ONE_END}{ALL_END}",
        [call_event("weather", OSLO), call_event("now", "{}")],
        "<｜Assistant｜></think>",
    ),
    "glm45": Transcript(
        "glm45",
        "\n<think>look</think>\nI will.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        [
            reasoning_event("look"),
            text_event("I will."),
            call_event("weather", '{"city": "12", "days": 2}'),
            call_event("now", "{}"),
        ],
    ),
    "glm45, an end mark inside a value": Transcript(
        "glm45",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>a</tool_call>b</arg_value></tool_call>",
        [call_event("weather", '{"city": "a</tool_call>b"}')],
    ),
    "glm45, a mark inside a value": Transcript(
        "glm45",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>write <arg_value> here</arg_value>\n</tool_call>",
        [call_event("weather", '{"city": "write <arg_value> here"}')],
    ),
    "glm45, malformed": Transcript(
        "glm45", "<tool_call>weather city=Oslo</tool_call>.", [text_event("<tool_call>weather city=Oslo</tool_call>.")]
    ),
    "gpt-oss": Transcript(
        "gpt-oss",
        "<|channel|>analysis<|message|>We should\ncall.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
        "<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        f"{OSLO}<|call|>",
        [reasoning_event("We should\ncall."), text_event("I look."), call_event("weather", OSLO)],
    ),
    "gpt-oss, recipient first": Transcript(
        "gpt-oss",
        f" to=functions.weather<|channel|>commentary json<|message|>{OSLO}",
        [call_event("weather", OSLO)],
    ),
    "gpt-oss, an answer": Transcript(
        "gpt-oss",
        "<|channel|>analysis<|message|>a < b<|end|><|start|>assistant<|channel|>final<|message|>Yes: a < b.<|return|>",
        [reasoning_event("a < b"), text_event("Yes: a < b.")],
    ),
    "gpt-oss, plain text": Transcript("gpt-oss", "all said", [text_event("all said")]),
    "gpt-oss, no JSON": Transcript(
        "gpt-oss",
        "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{oops<|call|>",
        [text_event("<|channel|>commentary to=functions.now <|constrain|>json<|message|>{oops")],
    ),
    "gpt-oss, continued": Transcript(
        "gpt-oss", "on", [text_event("on")], "<|start|>assistant<|channel|>final<|message|>Go "
    ),
}


def reader_of(transcript: Transcript, calls: bool = True, split: bool = True) -> AnswerReader:
    return FORMATS[transcript.format].reader(TOOLS if calls else None, split, PromptContext(transcript.prompt))


def merge_events(events: Sequence[Event]) -> list[EventTuple]:
    """Join neighbouring pieces of one kind into one event, and each call with its arguments."""
    joined_events: list[EventTuple] = []
    for event in events:
        match event:
            case TextPiece(text) | ReasoningPiece(text):
                kind = "text" if isinstance(event, TextPiece) else "reasoning"
                if joined_events and joined_events[-1][0] == kind:
                    joined_events[-1] = (kind, joined_events[-1][1] + text)
                else:
                    joined_events.append((kind, text))
            case CallStarted(_, _, name):
                joined_events.append(("call", name, ""))
            case CallArguments(_, text):
                _, name, earlier_arguments = joined_events[-1]
                joined_events[-1] = ("call", name, earlier_arguments + text)
    return joined_events
