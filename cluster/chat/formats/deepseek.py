"""DeepSeek: V3 and R1 write a call's arguments as a Markdown block of JSON, V3.1 and later as plain JSON."""

import re

from cluster.chat.blocks import JsonBlock, headed_call
from cluster.chat.formats.plan import THINK, CallSyntax, MarkedFormat
from cluster.chat.reading import CallingMarks

ALL, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ONE, ONE_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEP = "<｜tool▁sep｜>"
NAME = r"(?P<name>[A-Za-z0-9_.:-]+)"
HEADING = re.compile(rf"(?:{ALL}\s*)?(?:{ONE}\s*)?(?:function\s*{SEP}\s*)?{NAME}\s*(?:```json|{SEP})\s*")
CALLING = CallingMarks((ALL, ONE), lambda _: JsonBlock(HEADING, headed_call, ("```", ONE_END, ALL_END)))
SPECIAL = (ALL, ALL_END, ONE, ONE_END, SEP, THINK.begin, THINK.end)

DEEPSEEK_V3 = MarkedFormat(
    "deepseek_v3",
    THINK,
    CALLING,
    CallSyntax(
        before=lambda name: f"{ONE}function{SEP}{name}\n```json\n",
        after=f"\n```{ONE_END}",
        opening=ALL,
        ending=ALL_END,
        between="\n",
    ),
    special=SPECIAL,
)
DEEPSEEK_V31 = MarkedFormat(
    "deepseek_v31",
    THINK,
    CALLING,
    CallSyntax(before=lambda name: f"{ONE}{name}{SEP}", after=ONE_END, opening=ALL, ending=ALL_END),
    special=SPECIAL,
)
