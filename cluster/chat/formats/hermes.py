"""Hermes, Qwen 2.5 and Qwen 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one block for each call."""

import json
import re

from cluster.chat.blocks import JsonBlockReader, calls_of_object
from cluster.chat.formats.plan import THINK_MARKS, CallSyntax, MarkedFormat
from cluster.chat.reading import CallingMarks

BEGIN, END = "<tool_call>", "</tool_call>"
HEADING = re.compile(r"<tool_call>\s*")
FIELDS = ("arguments", "parameters")

HERMES = MarkedFormat(
    "hermes",
    THINK_MARKS,
    CallingMarks((BEGIN,), lambda _: JsonBlockReader(HEADING, lambda text, _: calls_of_object(text, FIELDS), (END,))),
    CallSyntax(
        prefix=lambda name: f'{BEGIN}\n{{"name": {json.dumps(name)}, "arguments": ', suffix=f"}}\n{END}", separator="\n"
    ),
)
