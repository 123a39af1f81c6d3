"""Mistral: `[TOOL_CALLS]name[ARGS]{...}` for each call, or older `[TOOL_CALLS] [{"name": .., "arguments": ..}]`."""

import json
import re

from cluster.chat.blocks import JsonBlock, headed_call, named_calls
from cluster.chat.formats.plan import CallSyntax, MarkedFormat, short_id
from cluster.chat.reading import CallingMarks, ThinkingMarks, ToolCallText

CALLS, ARGS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
HEADING = re.compile(
    r"\[TOOL_CALLS\]\s*(?:(?P<list>\[)\s*|(?P<name>[A-Za-z0-9_.:-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\])?\s*)"
)
FIELDS = ("arguments", "parameters")


def _calls(text: str, heading: re.Match[str]) -> list[ToolCallText]:
    return named_calls(text, FIELDS) if heading["list"] is not None else headed_call(text, heading)


CALLING = CallingMarks((CALLS,), lambda _: JsonBlock(HEADING, _calls, ()))
THOUGHT = ThinkingMarks("[THINK]", "[/THINK]")
SPECIAL = (CALLS, ARGS, ID, THOUGHT.begin, THOUGHT.end)

MISTRAL = MarkedFormat(
    "mistral",
    THOUGHT,
    CALLING,
    CallSyntax(before=lambda name: f"{CALLS}{name}{ARGS}"),
    special=SPECIAL,
    new_id=short_id,
)
MISTRAL_LIST = MarkedFormat(
    "mistral_list",
    THOUGHT,
    CALLING,
    CallSyntax(
        before=lambda name: f'{{"name": {json.dumps(name)}, "arguments": ',
        after="}",
        opening=f"{CALLS} [",
        ending="]",
        between=", ",
    ),
    special=SPECIAL,
    new_id=short_id,
)
