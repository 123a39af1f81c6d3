"""An early answer reaches its client, however much of the body is still to come."""

import asyncio

import pytest
from starlette.types import Message, Receive, Scope, Send

from cluster.api.proxy import lingering
from cluster.api.proxy.lingering import Lingering

SCOPE: Scope = {"type": "http"}


async def early(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 413, "headers": []})
    await send({"type": "http.response.body", "body": b"too long"})


async def late(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive()).get("more_body"):
        pass
    await early(scope, receive, send)


def answered(app: object, pieces: list[Message]) -> tuple[list[Message], int]:
    """What was sent, and how many pieces of the body were not read."""
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
    more = [{"type": "http.request", "body": b"x" * 10, "more_body": True} for _ in range(count)]
    return [*more, {"type": "http.request", "body": b""}] if last else more


def test_early_answer_is_sent_and_remaining_body_is_read() -> None:
    sent, left = answered(early, body(5))
    assert left == 0
    assert [message.get("body") for message in sent] == [None, b"too long", b""]
    assert [message.get("more_body") for message in sent[1:]] == [True, False]


def test_answer_is_unchanged_when_the_body_was_read() -> None:
    sent, _ = answered(late, body(3))
    assert sent[1:] == [{"type": "http.response.body", "body": b"too long"}]


@pytest.mark.parametrize("end", [{"type": "http.disconnect"}, None])
def test_lingering_ends_when_the_client_disconnects_or_sends_nothing(
    monkeypatch: pytest.MonkeyPatch, end: Message | None
) -> None:
    monkeypatch.setattr(lingering, "LINGER_S", 0.05)
    sent, left = answered(early, [*body(2, last=False), *([end] if end else [])])
    assert left == 0 and sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


def test_lingering_stops_reading_an_endless_body_at_linger_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lingering, "LINGER_BYTES", 45)
    assert answered(early, body(100))[1] == 96
