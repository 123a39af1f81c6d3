"""A conversation through a chat template that takes less than a client may send.

Some templates refuse a second message of the system's, or two calls in one message; others leave out of the prompt what
they have no place for, without a word. So a conversation that is refused, or loses a text of the system's, is put to
the template once more in forms that mean the same.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jinja2 import TemplateError

Messages = list[dict[str, Any]]
ORDERING = ("system", "developer")
"""The roles whose texts say how to answer."""


def rendered(render: Callable[[Messages], str], messages: Messages) -> tuple[str, list[str]]:
    """The text that `render` makes of the messages, or of a form of them of which nothing is lost; and warnings.

    Raises:
        TemplateError: of the messages as they are, where no form of them is taken.
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
    """The messages as they are, and each other form of them once."""
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
    """The same messages with all texts of the system's and the developer's in one, the first, as the system's."""
    said = [each["content"] for each in messages if each["role"] in ORDERING]
    others = [each for each in messages if each["role"] not in ORDERING]
    return [{"role": "system", "content": "\n\n".join(said)}, *others] if said else others


def one_call_each(messages: Messages) -> Messages:
    """The same messages with each call in one of its own, before its result."""
    made: Messages = []
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls", ())
        results = _results(rest) if len(calls) > 1 else []
        for at, call in enumerate(calls if len(calls) > 1 else ()):
            first = message if at == 0 else {"role": message["role"], "content": ""}
            own = [each for each in results if each.get("tool_call_id") == call.get("id")] or results[:1]
            made += [{**first, "tool_calls": [call]}, *own]
            results = [each for each in results if each not in own]
        made += results if len(calls) > 1 else [message]
    return made


def _results(rest: Messages) -> Sequence[dict[str, Any]]:
    """The results of tools that the messages begin with, taken from them."""
    results: Messages = []
    while rest and rest[0]["role"] == "tool":
        results.append(rest.pop(0))
    return results
