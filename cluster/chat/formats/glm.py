"""GLM 4.5 and later: `<tool_call>name`, then `<arg_key>..</arg_key>`, `<arg_value>..</arg_value>` per argument."""

import re

from cluster.chat.blocks import TaggedBlock
from cluster.chat.formats.plan import THINK, CallSyntax, MarkedFormat
from cluster.chat.formats.tagged import tagged_arguments
from cluster.chat.reading import CallingMarks

BEGIN, END = "<tool_call>", "</tool_call>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
WHOLE = re.compile(
    r"<tool_call>\s*(?P<name>[^\s<]+)\s*"
    r"(?P<arguments>(?:<arg_key>[^<]*</arg_key>\s*<arg_value>(?:(?!</arg_value>).)*</arg_value>\s*)*)",
    re.DOTALL,
)
ARGUMENT = re.compile(r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>", re.DOTALL)


def _mark(name: str) -> tuple[str, str]:
    return f"<arg_key>{name}</arg_key>\n{VALUE}", f"{VALUE_END}\n"


GLM = MarkedFormat(
    "glm45",
    THINK,
    CallingMarks((BEGIN,), lambda tools: TaggedBlock(WHOLE, ARGUMENT, {BEGIN: END}, (VALUE, VALUE_END), tools)),
    CallSyntax(before=lambda name: f"{BEGIN}{name}\n", after=END, between="\n", arguments=tagged_arguments(_mark)),
    special=(THINK.begin, THINK.end, BEGIN, END, "<arg_key>", "</arg_key>", VALUE, VALUE_END),
)
