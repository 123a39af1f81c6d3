"""The acts of abusive clients against a server. They run in another process than the measured streams."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cache

from cluster.bench.hostile_grammars import asking
from cluster.bench.streams import HOST
from cluster.bench.wire import Reply, connect, head_of, post, read_reply

CHAT_BYTES = 900_000
KEYS = 50_000
SLOW_BODY = 4096  # Content-Length of a slow body
DRIP_S = 1.0  # seconds between two bytes of a slow body
SLOW_LIMIT_S = 60.0
ABORT_S = (0.004, 0.029)  # a scrape is closed after a time in this range


@dataclass(slots=True)
class AnswerTally:
    """Counts of answers by status, of answers that are not JSON, of requests without an answer (`unanswered`), and of
    connections that the client closed (`left`).
    """

    statuses: dict[int, int] = field(default_factory=dict)
    not_json: int = 0
    unanswered: int = 0
    left: int = 0
    examples: list[str] = field(default_factory=list)

    def note(self, reply: Reply) -> None:
        """Count one reply."""
        if not reply.status:
            self.unanswered += 1
            self.examples.append(reply.error)
            return
        self.statuses[reply.status] = self.statuses.get(reply.status, 0) + 1
        if not reply.is_json:
            self.not_json += 1
            self.examples.append(f"{reply.status}: {reply.body[:80]!r}")


async def act(name: str, port: int, model: str, count: int) -> AnswerTally:
    """Do the act `name` `count` times and return the tally. `ACTS` limits how many run at once."""
    tally = AnswerTally()
    once, at_once = ACTS[name]
    turn = asyncio.Semaphore(at_once or count)
    rng = random.Random(count)

    async def one(number: int) -> None:
        async with turn:
            await once(tally, port, model, number, rng)

    await asyncio.gather(*(one(number) for number in range(count)))
    tally.examples = [text for text, _ in Counter(tally.examples).most_common(3)]
    return tally


async def _leave(tally: AnswerTally, port: int, request: bytes, after_s: float) -> None:
    """Send a request and abort the connection after `after_s`, even in the middle of the answer."""
    try:
        _, writer = await asyncio.open_connection(HOST, port)
        writer.write(request)
        await asyncio.sleep(after_s)
        writer.transport.abort()
        tally.left += 1
    except OSError as error:
        tally.unanswered += 1
        tally.examples.append(f"{type(error).__name__}: {error}")


async def _scrape(tally: AnswerTally, port: int, model: str, number: int, rng: random.Random) -> None:
    await _leave(tally, port, head_of("GET", "/metrics"), rng.uniform(*ABORT_S))


async def _disconnect(tally: AnswerTally, port: int, model: str, number: int, rng: random.Random) -> None:
    body = {"model": model, "prompt": f"Once upon a time, {number}", "max_tokens": 64, "stream": number % 2 == 0}
    raw = json.dumps(body).encode()
    await _leave(tally, port, head_of("POST", "/v1/completions", len(raw)) + raw, rng.uniform(0.0, 0.2))


async def _chat(tally: AnswerTally, port: int, model: str, number: int, rng: random.Random) -> None:
    text = f"{number} " + "the quick brown fox " * (CHAT_BYTES // 20)
    body = {"model": model, "messages": [{"role": "user", "content": text[:CHAT_BYTES]}]}
    tally.note(await post(port, "/v1/chat/completions", body))


@cache  # made once, so that encoding it does not take CPU time from the server
def _body_of_keys(model: str) -> bytes:
    return json.dumps({"model": model, "prompt": "x", **{f"k{i}": i for i in range(KEYS)}}).encode()


async def _keys(tally: AnswerTally, port: int, model: str, number: int, rng: random.Random) -> None:
    tally.note(await post(port, "/v1/completions", _body_of_keys(model)))


async def _grammar(tally: AnswerTally, port: int, model: str, number: int, rng: random.Random) -> None:
    body = {"model": model, "prompt": "def", "max_tokens": 24, "temperature": 1, "seed": number, **asking(number)}
    tally.note(await post(port, "/v1/completions", body))


async def _ordinary(tally: AnswerTally, port: int, model: str, number: int, rng: random.Random) -> None:
    body = {"model": model, "prompt": "def", "max_tokens": 24, "temperature": 1, "seed": number}
    tally.note(await post(port, "/v1/completions", body))


async def _slow(tally: AnswerTally, port: int, model: str, number: int, rng: random.Random) -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, reply: Reply) -> None:
        answer = asyncio.ensure_future(read_reply(reader, reply))
        try:
            writer.write(head_of("POST", "/v1/completions", SLOW_BODY))
            while not answer.done():
                writer.write(b" ")
                await asyncio.wait((answer,), timeout=DRIP_S)
            answer.result()
        finally:
            answer.cancel()

    tally.note(await connect(port, drip, SLOW_LIMIT_S))


Once = Callable[[AnswerTally, int, str, int, random.Random], Awaitable[None]]
ACTS: dict[str, tuple[Once, int]] = {  # the coroutine that does one act, and how many run at once (0: all)
    "aborted scrapes": (_scrape, 4),
    "chats of 900 kB": (_chat, 16),
    "bodies of 50,000 keys": (_keys, 8),
    "slow bodies": (_slow, 0),
    "disconnects": (_disconnect, 16),
    "ordinary requests": (_ordinary, 8),  # the baseline of hostile grammars: the same requests without a grammar
    "hostile grammars": (_grammar, 8),
}
