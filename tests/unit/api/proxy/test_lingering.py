"""An early answer reaches its client, even if the client has not yet sent all of its body."""

import asyncio

import pytest
from starlette.types import Message, Receive, Scope, Send

from cluster.api.proxy import lingering
from cluster.api.proxy.lingering import Lingering

SCOPE: Scope = {"type": "http"}


async def early_app(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 413, "headers": []})
    await send({"type": "http.response.body", "body": b"too long"})


async def late_app(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive()).get("more_body"):
        pass
    await early_app(scope, receive, send)


def run_lingering(app: object, pieces: list[Message]) -> tuple[list[Message], int]:
    """The messages that `app` sent through `Lingering`, and the number of body pieces that were not read."""
    sent: list[Message] = []

    async def receive() -> Message:
        if not pieces:
            await asyncio.Event().wait()
        return pieces.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(Lingering(app)(SCOPE, receive, send))  # type: ignore[arg-type]
    return sent, len(pieces)


def body(count: int, last: bool = True) -> list[Message]:
    messages = [{"type": "http.request", "body": b"x" * 10, "more_body": True} for _ in range(count)]
    return [*messages, {"type": "http.request", "body": b""}] if last else messages


def test_early_answer_is_sent_and_remaining_body_is_read() -> None:
    sent, unread_pieces = run_lingering(early_app, body(5))
    assert unread_pieces == 0
    assert [message.get("body") for message in sent] == [None, b"too long", b""]
    assert [message.get("more_body") for message in sent[1:]] == [True, False]


def test_answer_is_unchanged_when_the_body_was_read() -> None:
    sent, _ = run_lingering(late_app, body(3))
    assert sent[1:] == [{"type": "http.response.body", "body": b"too long"}]


@pytest.mark.parametrize("end", [{"type": "http.disconnect"}, None])
def test_lingering_ends_when_the_client_disconnects_or_sends_nothing(
    monkeypatch: pytest.MonkeyPatch, end: Message | None
) -> None:
    monkeypatch.setattr(lingering, "LINGER_S", 0.05)
    sent, unread_pieces = run_lingering(early_app, [*body(2, last=False), *([end] if end else [])])
    assert unread_pieces == 0 and sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


def test_lingering_stops_reading_an_endless_body_at_linger_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lingering, "LINGER_BYTES", 45)
    assert run_lingering(early_app, body(100))[1] == 96
