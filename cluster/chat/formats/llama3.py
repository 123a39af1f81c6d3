"""Llama 3: `{"name": ..., "parameters": {...}}` at the start of an answer, perhaps after `<|python_tag|>`."""

import json
import re

from cluster.chat.blocks import JsonBlock, members, named_call
from cluster.chat.formats.plan import CallSyntax, MarkedFormat
from cluster.chat.reading import CallingMarks, ToolCallText, Tools

TAG = "<|python_tag|>"
HEADING = re.compile(r"(?:<\|python_tag\|>)?\s*")
FIELDS = ("parameters", "arguments")


def _block(tools: Tools) -> JsonBlock:

    def calls(text: str, _: re.Match[str]) -> list[ToolCallText]:
        """An object is a call only if it names a tool and has arguments: an answer may be any other JSON."""
        given = members(text) or {}
        known = [call for call in named_call(text, FIELDS) if call.name in tools]
        return known if any(field in given for field in FIELDS) else []

    return JsonBlock(HEADING, calls, ())


LLAMA3 = MarkedFormat(
    "llama3_json",
    None,
    CallingMarks((TAG, "{"), _block, first=True, skipped=" \t\r\n;"),
    CallSyntax(before=lambda name: f'{{"name": {json.dumps(name)}, "parameters": ', after="}", between="; "),
    special=(TAG,),
)
