"""Qwen3-Coder: `<tool_call><function=name>`, then `<parameter=key>value</parameter>` for each argument. The model
sometimes omits `<tool_call>`, but not `</tool_call>`.
"""

import re

from cluster.chat.blocks import TaggedBlockReader
from cluster.chat.formats.plan import THINK_MARKS, CallSyntax, MarkedFormat
from cluster.chat.formats.tagged import tagged_arguments
from cluster.chat.reading import CallingMarks

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
CALL_PATTERN = re.compile(
    r"(?:<tool_call>\s*)?<function=(?P<name>[^>\s]+)>\s*"
    r"(?P<arguments>(?:<parameter=[^>]*>(?:(?!</parameter>).)*</parameter>\s*)*)(?:</function>\s*)?",
    re.DOTALL,
)
ARGUMENT_PATTERN = re.compile(r"<parameter=(?P<key>[^>]*)>\n?(?P<value>.*?)\n?</parameter>", re.DOTALL)


def _value_marks(name: str) -> tuple[str, str]:
    return f"<parameter={name}>\n", "\n</parameter>\n"


QWEN3_CODER = MarkedFormat(
    "qwen3_coder",
    THINK_MARKS,
    CallingMarks(
        (BEGIN, FUNCTION),
        lambda tools: TaggedBlockReader(
            CALL_PATTERN, ARGUMENT_PATTERN, {BEGIN: END, FUNCTION: FUNCTION_END}, ("<parameter=", "</parameter>"), tools
        ),
    ),
    CallSyntax(
        prefix=lambda name: f"{BEGIN}\n<function={name}>\n",
        suffix=f"</function>\n{END}",
        separator="\n",
        arguments=tagged_arguments(_value_marks),
    ),
)
