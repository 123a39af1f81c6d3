"""Hermes, Qwen 2.5 and Qwen 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one block for each call."""

import json
import re

from cluster.chat.blocks import JsonBlock, named_call
from cluster.chat.formats.plan import THINK, CallSyntax, MarkedFormat
from cluster.chat.reading import CallingMarks

BEGIN, END = "<tool_call>", "</tool_call>"
HEADING = re.compile(r"<tool_call>\s*")
FIELDS = ("arguments", "parameters")

HERMES = MarkedFormat(
    "hermes",
    THINK,
    CallingMarks((BEGIN,), lambda _: JsonBlock(HEADING, lambda found, _: named_call(found, FIELDS), (END,))),
    CallSyntax(
        before=lambda name: f'{BEGIN}\n{{"name": {json.dumps(name)}, "arguments": ', after=f"}}\n{END}", between="\n"
    ),
)
