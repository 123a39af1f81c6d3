"""Llama 3: `{"name": ..., "parameters": {...}}` at the start of an answer, perhaps after `<|python_tag|>`."""

import json
import re

from cluster.chat.blocks import JsonBlockReader, calls_of_object, object_members
from cluster.chat.formats.plan import CallSyntax, MarkedFormat
from cluster.chat.reading import CallingMarks, ToolCallText, Tools

PYTHON_TAG = "<|python_tag|>"
HEADING = re.compile(r"(?:<\|python_tag\|>)?\s*")
FIELDS = ("parameters", "arguments")


def _block_reader(tools: Tools) -> JsonBlockReader:

    def parse_calls(text: str, _: re.Match[str]) -> list[ToolCallText]:
        """Return the call in the object if the object names one of `tools` and has arguments. Otherwise return no call:
        the object is text, because an answer may be any JSON.
        """
        members = object_members(text) or {}
        tool_calls = [call for call in calls_of_object(text, FIELDS) if call.name in tools]
        return tool_calls if any(field in members for field in FIELDS) else []

    return JsonBlockReader(HEADING, parse_calls, ())


LLAMA3 = MarkedFormat(
    "llama3_json",
    None,
    CallingMarks((PYTHON_TAG, "{"), _block_reader, only_at_start=True, skipped_chars=" \t\r\n;"),
    CallSyntax(prefix=lambda name: f'{{"name": {json.dumps(name)}, "parameters": ', suffix="}", separator="; "),
    special_tokens=(PYTHON_TAG,),
)
