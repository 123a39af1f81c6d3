"""Renders a conversation even if the chat template does not support its form.

Some templates refuse a second system message, or two calls in one message; others silently omit messages that they do
not support. So a conversation that is refused, or loses a system text, is rendered again in equivalent forms.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jinja2 import TemplateError

Messages = list[dict[str, Any]]
ORDERING = ("system", "developer")
"""Roles whose messages are instructions; `rendered` checks that none of these texts is lost."""


def rendered(render: Callable[[Messages], str], messages: Messages) -> tuple[str, list[str]]:
    """Return the rendered prompt and warnings. The forms of the conversation are tried in order.

    The result is the first prompt that contains every instruction. If there is none, it is the first prompt that the
    template accepts, and a warning counts the lost instructions.

    Raises:
        TemplateError: the template refuses every form; the error is that of the original messages.
    """
    refusal: TemplateError | None = None
    found: tuple[str, list[str]] | None = None
    orders = [text for each in messages if each["role"] in ORDERING and (text := each["content"].strip())]
    for form in _forms(messages):
        try:
            text = render(form)
        except TemplateError as error:
            refusal = refusal or error
            continue
        lost = sum(order not in text for order in orders)
        if not lost:
            return text, []
        found = found or (text, [f"messages: this model's chat template leaves out {lost} of role system or developer"])
    if found is None:
        assert refusal is not None
        raise refusal
    return found


def _forms(messages: Messages) -> Iterator[Messages]:
    """Yield the original messages, then each different equivalent form."""
    tried: list[Messages] = []
    for form in (
        messages,
        with_one_system(messages),
        one_call_each(messages),
        one_call_each(with_one_system(messages)),
    ):
        if form not in tried:
            tried.append(form)
            yield form


def with_one_system(messages: Messages) -> Messages:
    """Return the messages with all system and developer texts joined into one system message at the beginning."""
    said = [each["content"] for each in messages if each["role"] in ORDERING]
    others = [each for each in messages if each["role"] not in ORDERING]
    return [{"role": "system", "content": "\n\n".join(said)}, *others] if said else others


def one_call_each(messages: Messages) -> Messages:
    """Return the messages with each tool call in a separate message, followed by the result of the call."""
    made: Messages = []
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls", ())
        results = _results(rest) if len(calls) > 1 else []
        for at, call in enumerate(calls if len(calls) > 1 else ()):
            first = message if at == 0 else {"role": message["role"], "content": ""}
            # Results are matched by id; where no id matches, they are taken in order.
            own = [each for each in results if each.get("tool_call_id") == call.get("id")] or results[:1]
            made += [{**first, "tool_calls": [call]}, *own]
            results = [each for each in results if each not in own]
        made += results if len(calls) > 1 else [message]
    return made


def _results(rest: Messages) -> Sequence[dict[str, Any]]:
    """Remove the tool results at the beginning of `rest` and return them."""
    results: Messages = []
    while rest and rest[0]["role"] == "tool":
        results.append(rest.pop(0))
    return results
