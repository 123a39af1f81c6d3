"""Hermes, Qwen 2.5 and Qwen 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one block for each call."""

import json
import re

from cluster.chat.blocks import JsonBlock, named_call
from cluster.chat.formats.plan import THINK, MarkedFormat, Written
from cluster.chat.reading import Calling

BEGIN, END = "<tool_call>", "</tool_call>"
HEADING = re.compile(r"<tool_call>\s*")
FIELDS = ("arguments", "parameters")

HERMES = MarkedFormat(
    "hermes",
    THINK,
    Calling((BEGIN,), lambda _: JsonBlock(HEADING, lambda found, _: named_call(found, FIELDS), (END,))),
    Written(
        before=lambda name: f'{BEGIN}\n{{"name": {json.dumps(name)}, "arguments": ',
        after=f"}}\n{END}",
        between="\n",
    ),
)
