"""Mistral: `[TOOL_CALLS]name[ARGS]{...}` for each call, or older `[TOOL_CALLS] [{"name": .., "arguments": ..}]`."""

import json
import re

from cluster.chat.blocks import JsonBlockReader, calls_of_heading, calls_of_list
from cluster.chat.formats.plan import CallSyntax, MarkedFormat, new_short_call_id
from cluster.chat.reading import CallingMarks, ThinkingMarks, ToolCallText

CALLS, ARGS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
HEADING = re.compile(
    r"\[TOOL_CALLS\]\s*(?:(?P<list>\[)\s*|(?P<name>[A-Za-z0-9_.:-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\])?\s*)"
)
FIELDS = ("arguments", "parameters")


def _calls(text: str, heading: re.Match[str]) -> list[ToolCallText]:
    return calls_of_list(text, FIELDS) if heading["list"] is not None else calls_of_heading(text, heading)


CALLING = CallingMarks((CALLS,), lambda _: JsonBlockReader(HEADING, _calls, ()))
THINKING = ThinkingMarks("[THINK]", "[/THINK]")
SPECIAL = (CALLS, ARGS, ID, THINKING.begin, THINKING.end)

MISTRAL = MarkedFormat(
    "mistral",
    THINKING,
    CALLING,
    CallSyntax(prefix=lambda name: f"{CALLS}{name}{ARGS}"),
    special_tokens=SPECIAL,
    new_id=new_short_call_id,
)
MISTRAL_LIST = MarkedFormat(
    "mistral_list",
    THINKING,
    CALLING,
    CallSyntax(
        prefix=lambda name: f'{{"name": {json.dumps(name)}, "arguments": ',
        suffix="}",
        opening=f"{CALLS} [",
        closing="]",
        separator=", ",
    ),
    special_tokens=SPECIAL,
    new_id=new_short_call_id,
)
