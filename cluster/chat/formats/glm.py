"""GLM 4.5 and later: `<tool_call>name`, then `<arg_key>..</arg_key><arg_value>..</arg_value>` for each argument."""

import re

from cluster.chat.blocks import TaggedBlockReader
from cluster.chat.formats.plan import THINK_MARKS, CallSyntax, MarkedFormat
from cluster.chat.formats.tagged import tagged_arguments
from cluster.chat.reading import CallingMarks

BEGIN, END = "<tool_call>", "</tool_call>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
CALL_PATTERN = re.compile(
    r"<tool_call>\s*(?P<name>[^\s<]+)\s*"
    r"(?P<arguments>(?:<arg_key>[^<]*</arg_key>\s*<arg_value>(?:(?!</arg_value>).)*</arg_value>\s*)*)",
    re.DOTALL,
)
ARGUMENT_PATTERN = re.compile(r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>", re.DOTALL)


def _value_marks(name: str) -> tuple[str, str]:
    return f"<arg_key>{name}</arg_key>\n{VALUE}", f"{VALUE_END}\n"


GLM = MarkedFormat(
    "glm45",
    THINK_MARKS,
    CallingMarks(
        (BEGIN,),
        lambda tools: TaggedBlockReader(CALL_PATTERN, ARGUMENT_PATTERN, {BEGIN: END}, (VALUE, VALUE_END), tools),
    ),
    CallSyntax(
        prefix=lambda name: f"{BEGIN}{name}\n", suffix=END, separator="\n", arguments=tagged_arguments(_value_marks)
    ),
    special_tokens=(THINK_MARKS.begin, THINK_MARKS.end, BEGIN, END, "<arg_key>", "</arg_key>", VALUE, VALUE_END),
)
