"""DeepSeek: V3 and R1 write a call's arguments as a Markdown block of JSON, V3.1 and later as plain JSON."""

import re

from cluster.chat.blocks import JsonBlockReader, calls_of_heading
from cluster.chat.formats.plan import THINK_MARKS, CallSyntax, MarkedFormat
from cluster.chat.reading import CallingMarks

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
NAME = r"(?P<name>[A-Za-z0-9_.:-]+)"
HEADING = re.compile(
    rf"(?:{CALLS_BEGIN}\s*)?(?:{CALL_BEGIN}\s*)?(?:function\s*{SEPARATOR}\s*)?{NAME}\s*(?:```json|{SEPARATOR})\s*"
)
CALLING = CallingMarks(
    (CALLS_BEGIN, CALL_BEGIN), lambda _: JsonBlockReader(HEADING, calls_of_heading, ("```", CALL_END, CALLS_END))
)
SPECIAL = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR, THINK_MARKS.begin, THINK_MARKS.end)

DEEPSEEK_V3 = MarkedFormat(
    "deepseek_v3",
    THINK_MARKS,
    CALLING,
    CallSyntax(
        prefix=lambda name: f"{CALL_BEGIN}function{SEPARATOR}{name}\n```json\n",
        suffix=f"\n```{CALL_END}",
        opening=CALLS_BEGIN,
        closing=CALLS_END,
        separator="\n",
    ),
    special_tokens=SPECIAL,
)
DEEPSEEK_V31 = MarkedFormat(
    "deepseek_v31",
    THINK_MARKS,
    CALLING,
    CallSyntax(
        prefix=lambda name: f"{CALL_BEGIN}{name}{SEPARATOR}", suffix=CALL_END, opening=CALLS_BEGIN, closing=CALLS_END
    ),
    special_tokens=SPECIAL,
)
