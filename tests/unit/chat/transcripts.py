"""What families write, as their model cards and templates have it, and the events that it stands for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.chat.events import CallArguments, CallStarted, Event, ReasoningPiece, TextPiece
from cluster.chat.formats.choose import FORMATS
from cluster.chat.formats.plan import PromptContext
from cluster.chat.reading import AnswerReader

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
EMPTY: dict[str, Any] = {"type": "object", "properties": {}}
KINDS: dict[str, Any] = {
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
TOOLS: Mapping[str, Mapping[str, Any]] = {"weather": CITY, "now": EMPTY, "kinds": KINDS}
OSLO = '{"city": "Oslo", "days": 2}'
Event3 = tuple[str, ...]


@dataclass(frozen=True)
class Transcript:
    """A format's name, what the model wrote after a prompt that ended with `prompt`, and what that is."""

    format: str
    text: str
    events: Sequence[Event3]
    prompt: str = ""


def said(text: str) -> Event3:
    return ("said", text)


def thought(text: str) -> Event3:
    return ("thought", text)


def call(name: str, arguments: str) -> Event3:
    return ("call", name, arguments)


SEP, ONE, ONE_END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
ALL, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
TRICKY = '{"city": "a}\\"{ </tool_call> [TOOL_CALLS] \\\\"}'
TRANSCRIPTS: dict[str, Transcript] = {
    "hermes": Transcript(
        "hermes",
        f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>',
        [call("weather", OSLO)],
    ),
    "hermes, thought and two calls": Transcript(
        "hermes",
        f'<think>\nLet me look.\n\nYes.\n</think>\n\nI look.\n<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n'
        '</tool_call>\n<tool_call>\n{"arguments": {}, "name": "now"}\n</tool_call>',
        [thought("Let me look.\n\nYes."), said("I look."), call("weather", OSLO), call("now", "{}")],
    ),
    "hermes, marks inside of a string": Transcript(
        "hermes",
        f'<tool_call>{{"name": "weather", "arguments": {TRICKY}}}</tool_call> done ',
        [call("weather", TRICKY), said("done ")],
    ),
    "hermes, arguments as text": Transcript(
        "hermes",
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}</tool_call>',
        [call("weather", '{"city": "Oslo"}')],
    ),
    "hermes, no JSON": Transcript(
        "hermes",
        "I do:\n<tool_call>\n{'name': 'weather'}\n</tool_call>\nbye",
        [said("I do:\n<tool_call>\n{'name': 'weather'}\n</tool_call>\nbye")],
    ),
    "hermes, a call after a broken one": Transcript(
        "hermes",
        '<tool_call>{"nome": 1}</tool_call>\n<tool_call>{"name": "now"}</tool_call>',
        [said('<tool_call>{"nome": 1}</tool_call>'), call("now", "{}")],
    ),
    "hermes, a mark that is spoken of": Transcript(
        "hermes",
        'I use <tool_call> tags.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        [said("I use <tool_call> tags."), call("now", "{}")],
    ),
    "hermes, a mark far from any call": Transcript(
        "hermes",
        f'<tool_call>{"x" * 600}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>',
        [said(f"<tool_call>{'x' * 600}"), call("now", "{}")],
    ),
    "hermes, never closed": Transcript(
        "hermes",
        'so <tool_call>{"name": "weather", "arguments": {"city": "Os',
        [said('so <tool_call>{"name": "weather", "arguments": {"city": "Os')],
    ),
    "hermes, cut in the closing mark": Transcript(
        "hermes", '<tool_call>{"name": "now", "arguments": {}}\n</tool_c', [call("now", "{}")]
    ),
    "text that looks like marks": Transcript(
        "hermes", " a <b> and <tool and </think> \n", [said(" a <b> and <tool and </think> \n")]
    ),
    "hermes, thought opened by the prompt": Transcript(
        "hermes", "hm\n</think>\n\nyes", [thought("hm"), said("yes")], "<|im_start|>assistant\n<think>\n"
    ),
    "hermes, thought ended by the prompt": Transcript(
        "hermes", "<think> is a tag", [said("<think> is a tag")], "assistant\n<think>\n\n</think>\n\n"
    ),
    "hermes, thought cut off": Transcript("hermes", "<think>\nwell, </thi", [thought("well, </thi")]),
    "qwen3_coder": Transcript(
        "qwen3_coder",
        "Sure.\n<tool_call>\n<function=weather>\n<parameter=city>\nNew\n\nYork\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>",
        [said("Sure."), call("weather", '{"city": "New\\n\\nYork", "days": 2}')],
    ),
    "qwen3_coder, no arguments": Transcript(
        "qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", [call("now", "{}")]
    ),
    "qwen3_coder, without what opens it": Transcript(
        "qwen3_coder",
        "Reading.\n\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>\nDone.",
        [said("Reading."), call("weather", '{"city": "Oslo"}'), said("Done.")],
    ),
    "qwen3_coder, a function that is no tool": Transcript(
        "qwen3_coder", "so <function=other>\n</function> it is", [said("so <function=other>\n</function> it is")]
    ),
    "qwen3_coder, a mark that is spoken of": Transcript(
        "qwen3_coder",
        "I use <tool_call> tags:\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        [said("I use <tool_call> tags:"), call("now", "{}")],
    ),
    "qwen3_coder, a mark inside of a value": Transcript(
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nuse <parameter=x> here\n</parameter>\n</function>\n"
        "</tool_call>",
        [call("weather", '{"city": "use <parameter=x> here"}')],
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
            call(
                "kinds",
                '{"zip": "02139", "code": "12345", "level": "1", "deep": true, "count": null, "any": 3, "size": 2, '
                '"all": "2", "loop": [1], "more": "7"}',
            )
        ],
    ),
    "llama3": Transcript("llama3_json", f'{{"name": "weather", "parameters": {OSLO}}}', [call("weather", OSLO)]),
    "llama3, two with a tag": Transcript(
        "llama3_json",
        f'<|python_tag|>{{"name": "weather", "parameters": {OSLO}}}; {{"name": "now", "parameters": {{}}}}',
        [call("weather", OSLO), call("now", "{}")],
    ),
    "llama3, an answer in JSON": Transcript(
        "llama3_json", '{"name": "Ann", "age": 3}', [said('{"name": "Ann", "age": 3}')]
    ),
    "llama3, a call in a sentence": Transcript(
        "llama3_json", 'say {"name": "now", "parameters": {}}', [said('say {"name": "now", "parameters": {}}')]
    ),
    "mistral": Transcript(
        "mistral",
        f"[TOOL_CALLS]weather[ARGS]{OSLO}[TOOL_CALLS]now[ARGS]{{}}",
        [call("weather", OSLO), call("now", "{}")],
    ),
    "mistral, with an id and thought": Transcript(
        "mistral",
        f"[THINK]hm[/THINK]ok[TOOL_CALLS]weather[CALL_ID]abcdef123[ARGS]{OSLO}",
        [thought("hm"), said("ok"), call("weather", OSLO)],
    ),
    "mistral, a list": Transcript(
        "mistral_list",
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {OSLO}}}, {{"name": "now", "arguments": {{}}}}]',
        [call("weather", OSLO), call("now", "{}")],
    ),
    "mistral, a list that is none": Transcript(
        "mistral_list", '[TOOL_CALLS] [{"name": 1}] x', [said('[TOOL_CALLS] [{"name": 1}] x')]
    ),
    "deepseek_v3": Transcript(
        "deepseek_v3",
        f"I call.{ALL}{ONE}function{SEP}weather\n```json\n{OSLO}\n```{ONE_END}\n{ONE}function{SEP}now\n```json\n{{}}\n"
        f"```{ONE_END}{ALL_END}",
        [said("I call."), call("weather", OSLO), call("now", "{}")],
    ),
    "deepseek_r1, thought": Transcript(
        "deepseek_v3",
        f"so\n</think>\n\n{ALL}{ONE}function{SEP}now\n```json\n{{}}\n```{ONE_END}{ALL_END}",
        [thought("so"), call("now", "{}")],
        "<｜Assistant｜><think>\n",
    ),
    "deepseek_v31": Transcript(
        "deepseek_v31",
        f"{ALL}{ONE}weather{SEP}{OSLO}{ONE_END}{ONE}now{SEP}{{}}{ONE_END}{ALL_END}",
        [call("weather", OSLO), call("now", "{}")],
        "<｜Assistant｜></think>",
    ),
    "glm45": Transcript(
        "glm45",
        "\n<think>look</think>\nI will.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        [
            thought("look"),
            said("I will."),
            call("weather", '{"city": "12", "days": 2}'),
            call("now", "{}"),
        ],
    ),
    "glm45, an end inside of a value": Transcript(
        "glm45",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>a</tool_call>b</arg_value></tool_call>",
        [call("weather", '{"city": "a</tool_call>b"}')],
    ),
    "glm45, a mark inside of a value": Transcript(
        "glm45",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>write <arg_value> here</arg_value>\n</tool_call>",
        [call("weather", '{"city": "write <arg_value> here"}')],
    ),
    "glm45, malformed": Transcript(
        "glm45", "<tool_call>weather city=Oslo</tool_call>.", [said("<tool_call>weather city=Oslo</tool_call>.")]
    ),
    "gpt-oss": Transcript(
        "gpt-oss",
        "<|channel|>analysis<|message|>We should\ncall.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
        "<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        f"{OSLO}<|call|>",
        [thought("We should\ncall."), said("I look."), call("weather", OSLO)],
    ),
    "gpt-oss, recipient first": Transcript(
        "gpt-oss",
        f" to=functions.weather<|channel|>commentary json<|message|>{OSLO}",
        [call("weather", OSLO)],
    ),
    "gpt-oss, an answer": Transcript(
        "gpt-oss",
        "<|channel|>analysis<|message|>a < b<|end|><|start|>assistant<|channel|>final<|message|>Yes: a < b.<|return|>",
        [thought("a < b"), said("Yes: a < b.")],
    ),
    "gpt-oss, plain text": Transcript("gpt-oss", "all said", [said("all said")]),
    "gpt-oss, no JSON": Transcript(
        "gpt-oss",
        "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{oops<|call|>",
        [said("<|channel|>commentary to=functions.now <|constrain|>json<|message|>{oops")],
    ),
    "gpt-oss, continued": Transcript("gpt-oss", "on", [said("on")], "<|start|>assistant<|channel|>final<|message|>Go "),
}


def reader_of(transcript: Transcript, calls: bool = True, split: bool = True) -> AnswerReader:
    return FORMATS[transcript.format].reader(TOOLS if calls else None, split, PromptContext(transcript.prompt))


def merged(events: Sequence[Event]) -> list[Event3]:
    """Neighbouring pieces of one kind as one, and calls with their arguments."""
    found: list[Event3] = []
    for event in events:
        match event:
            case TextPiece(text) | ReasoningPiece(text):
                kind = "said" if isinstance(event, TextPiece) else "thought"
                if found and found[-1][0] == kind:
                    found[-1] = (kind, found[-1][1] + text)
                else:
                    found.append((kind, text))
            case CallStarted(_, _, name):
                found.append(("call", name, ""))
            case CallArguments(_, text):
                _, name, before = found[-1]
                found[-1] = ("call", name, before + text)
    return found
