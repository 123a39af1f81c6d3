"""Conversations rendered by chat templates that accept less than clients send, as templates of published models do."""

from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cluster.api.core.conversation import ChatMessage
from cluster.api.core.tokenizer import render_prompt, split_parallel_calls, template_messages

FIRST_SYSTEM_ONLY = (  # gpt-oss: a system message is rendered only if it is the first message
    "{% if messages[0].role in ['system', 'developer'] %}[{{ messages[0].content }}]{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if 'tool_calls' in m %}{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
    "A({{ m.content or m.thinking }})>{{ m.tool_calls[0].function.name }};"
    "{% else %}A:{{ m.content }};{% endif %}"
    "{% elif m.role == 'tool' %}T:{{ m.content }};{% elif m.role == 'user' %}U:{{ m.content }};{% endif %}{% endfor %}"
)
LAST_SYSTEM_ONLY = (  # DeepSeek-R1-Distill: the last system message replaces those before it
    "{% set ns = namespace(s='') %}{% for m in messages %}{% if m['role'] == 'system' %}{% set ns.s = m['content'] %}"
    "{% endif %}{% endfor %}[{{ ns.s }}]"
    "{% for m in messages %}{% if m['role'] == 'user' %}U:{{ m['content'] }};{% endif %}{% endfor %}"
)
ONE_CALL_PER_MESSAGE = (  # Llama 3: one tool call per message
    "{% for m in messages %}{% if m.tool_calls %}"
    "{% if not m.tool_calls|length == 1 %}{{ raise_exception('one call') }}{% endif %}"
    "C:{{ m.content }}{{ m.tool_calls[0].function.name }};{% else %}{{ m.role }}:{{ m.content }};{% endif %}"
    "{% endfor %}"
)
NO_SYSTEM = "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }};{% endif %}{% endfor %}"


def render_template(template: str, messages: list[dict[str, Any]]) -> tuple[str, list[str]]:
    def refuse(message: str) -> None:
        raise TemplateError(message)

    compiled = ImmutableSandboxedEnvironment().from_string(template, globals={"raise_exception": refuse})
    return render_prompt(lambda template_form: compiled.render(messages=template_form), messages)


def chat_message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def tool_call(name: str) -> dict[str, Any]:
    return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": {}}}


def tool_result(name: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{name}", "content": f"of {name}"}


@pytest.mark.parametrize(
    ("template", "roles", "prompt"),
    [
        (FIRST_SYSTEM_ONLY, ("system", "developer"), "[BASE\n\nRULE]U:hi;"),
        (FIRST_SYSTEM_ONLY, ("developer", "developer"), "[BASE\n\nRULE]U:hi;"),
        (LAST_SYSTEM_ONLY, ("system", "system"), "[BASE\n\nRULE]U:hi;"),
    ],
)
def test_all_system_messages_reach_the_prompt(template: str, roles: tuple[str, str], prompt: str) -> None:
    messages = [chat_message(roles[0], "BASE"), chat_message(roles[1], "RULE"), chat_message("user", "hi")]
    assert render_template(template, messages) == (prompt, [])


def test_system_message_dropped_by_the_template_gives_a_warning() -> None:
    text, warnings = render_template(
        NO_SYSTEM, [chat_message("system", "BASE"), chat_message("user", "hi"), chat_message("system", "hi")]
    )
    assert text == "hi;"
    assert warnings == ["messages: this model's chat template leaves out 1 of role system or developer"]


def test_blank_system_message_gives_no_warning() -> None:
    assert render_template(LAST_SYSTEM_ONLY, [chat_message("system", " \n"), chat_message("user", "hi")]) == (
        "[ \n]U:hi;",
        [],
    )


def test_parallel_tool_calls_are_split_with_their_results() -> None:
    messages = [
        chat_message("user", "hi"),
        {**chat_message("assistant", "I look. "), "tool_calls": [tool_call("a"), tool_call("b"), tool_call("c")]},
        tool_result("b"),
        tool_result("a"),
        {"role": "tool", "content": "without an id"},
        chat_message("user", "more"),
    ]
    text, warnings = render_template(ONE_CALL_PER_MESSAGE, messages)
    expected_parts = [
        "user:hi",
        "C:I look. a",
        "tool:of a",
        "C:b",
        "tool:of b",
        "C:c",
        "tool:without an id",
        "user:more",
        "",
    ]
    assert text == ";".join(expected_parts) and not warnings
    assert split_parallel_calls(split_parallel_calls(messages)) == split_parallel_calls(messages)
    without_results = [messages[0], messages[1], messages[5]]
    assert [len(message.get("tool_calls", ())) for message in split_parallel_calls(without_results)] == [0, 1, 1, 1, 0]


def test_template_error_is_that_of_the_original_messages() -> None:
    template = "{{ raise_exception(messages | length) }}"
    with pytest.raises(TemplateError, match="3"):
        render_template(template, [chat_message("system", "a"), chat_message("system", "b"), chat_message("user", "c")])


def test_gpt_oss_prompt_contains_reasoning_text_and_tool_call() -> None:
    answer = ChatMessage.model_validate(
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "call_a", "function": {"name": "a", "arguments": "{}"}}],
        }
    )
    text, warnings = render_template(
        FIRST_SYSTEM_ONLY, [chat_message("user", "hi"), *template_messages([answer], "thinking"), tool_result("a")]
    )
    assert (text, warnings) == ("U:hi;A(hm\n\nI look.)>a;T:of a;", [])
    (rendered_message,) = template_messages([answer], "reasoning_content")
    assert (rendered_message["content"], rendered_message["reasoning_content"]) == ("I look.", "hm")
