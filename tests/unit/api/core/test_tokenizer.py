"""Conversations through templates that take less than clients send, as those of published families do."""

from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cluster.api.core.conversation import ChatMessage
from cluster.api.core.tokenizer import render_prompt, split_parallel_calls, template_messages

FIRST_ALONE = (  # gpt-oss: a first message of the system's; the loop has no place for another
    "{% if messages[0].role in ['system', 'developer'] %}[{{ messages[0].content }}]{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if 'tool_calls' in m %}{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
    "A({{ m.content or m.thinking }})>{{ m.tool_calls[0].function.name }};"
    "{% else %}A:{{ m.content }};{% endif %}"
    "{% elif m.role == 'tool' %}T:{{ m.content }};{% elif m.role == 'user' %}U:{{ m.content }};{% endif %}{% endfor %}"
)
LAST_ALONE = (  # DeepSeek-R1-Distill: the last message of the system's replaces those before
    "{% set ns = namespace(s='') %}{% for m in messages %}{% if m['role'] == 'system' %}{% set ns.s = m['content'] %}"
    "{% endif %}{% endfor %}[{{ ns.s }}]"
    "{% for m in messages %}{% if m['role'] == 'user' %}U:{{ m['content'] }};{% endif %}{% endfor %}"
)
ONE_CALL = (  # Llama 3: one call in a message
    "{% for m in messages %}{% if m.tool_calls %}"
    "{% if not m.tool_calls|length == 1 %}{{ raise_exception('one call') }}{% endif %}"
    "C:{{ m.content }}{{ m.tool_calls[0].function.name }};{% else %}{{ m.role }}:{{ m.content }};{% endif %}"
    "{% endfor %}"
)
NO_SYSTEM = "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }};{% endif %}{% endfor %}"


def through(template: str, messages: list[dict[str, Any]]) -> tuple[str, list[str]]:
    def refuse(message: str) -> None:
        raise TemplateError(message)

    compiled = ImmutableSandboxedEnvironment().from_string(template, globals={"raise_exception": refuse})
    return render_prompt(lambda form: compiled.render(messages=form), messages)


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def call(name: str) -> dict[str, Any]:
    return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": {}}}


def result(name: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{name}", "content": f"of {name}"}


@pytest.mark.parametrize(
    ("template", "roles", "prompt"),
    [
        (FIRST_ALONE, ("system", "developer"), "[BASE\n\nRULE]U:hi;"),
        (FIRST_ALONE, ("developer", "developer"), "[BASE\n\nRULE]U:hi;"),
        (LAST_ALONE, ("system", "system"), "[BASE\n\nRULE]U:hi;"),
    ],
)
def test_all_system_messages_reach_the_prompt(template: str, roles: tuple[str, str], prompt: str) -> None:
    messages = [said(roles[0], "BASE"), said(roles[1], "RULE"), said("user", "hi")]
    assert through(template, messages) == (prompt, [])


def test_system_message_dropped_by_the_template_gives_a_warning() -> None:
    text, warnings = through(NO_SYSTEM, [said("system", "BASE"), said("user", "hi"), said("system", "hi")])
    assert text == "hi;"
    assert warnings == ["messages: this model's chat template leaves out 1 of role system or developer"]


def test_blank_system_message_gives_no_warning() -> None:
    assert through(LAST_ALONE, [said("system", " \n"), said("user", "hi")]) == ("[ \n]U:hi;", [])


def test_parallel_tool_calls_are_split_with_their_results() -> None:
    messages = [
        said("user", "hi"),
        {**said("assistant", "I look. "), "tool_calls": [call("a"), call("b"), call("c")]},
        result("b"),
        result("a"),
        {"role": "tool", "content": "without an id"},
        said("user", "more"),
    ]
    text, warnings = through(ONE_CALL, messages)
    parts = ["user:hi", "C:I look. a", "tool:of a", "C:b", "tool:of b", "C:c", "tool:without an id", "user:more", ""]
    assert text == ";".join(parts) and not warnings
    assert split_parallel_calls(split_parallel_calls(messages)) == split_parallel_calls(messages)
    without = [messages[0], messages[1], messages[5]]
    assert [len(each.get("tool_calls", ())) for each in split_parallel_calls(without)] == [0, 1, 1, 1, 0]


def test_template_error_is_that_of_the_original_messages() -> None:
    template = "{{ raise_exception(messages | length) }}"
    with pytest.raises(TemplateError, match="3"):
        through(template, [said("system", "a"), said("system", "b"), said("user", "c")])


def test_gpt_oss_prompt_contains_reasoning_text_and_tool_call() -> None:
    answer = ChatMessage.model_validate(
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "call_a", "function": {"name": "a", "arguments": "{}"}}],
        }
    )
    text, warnings = through(FIRST_ALONE, [said("user", "hi"), *template_messages([answer], "thinking"), result("a")])
    assert (text, warnings) == ("U:hi;A(hm\n\nI look.)>a;T:of a;", [])
    (other,) = template_messages([answer], "reasoning_content")
    assert (other["content"], other["reasoning_content"]) == ("I look.", "hm")
