"""What abusive clients do to a server. They run in another process than the streams that are measured meanwhile."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cache

from cluster.bench.hostile_grammars import hostile_request_fields
from cluster.bench.streams import HOST
from cluster.bench.wire import Reply, connect, post, read_reply, request_head

CHAT_BYTES = 900_000
KEY_COUNT = 50_000
SLOW_BODY_BYTES = 4096  # Content-Length of a slow body, which is never sent completely
BYTE_INTERVAL_S = 1.0  # seconds between two bytes of a slow body
SLOW_LIMIT_S = 60.0
ABORT_RANGE_S = (0.004, 0.029)  # a request of /metrics is aborted after a time in this range


@dataclass(slots=True)
class AnswerTally:
    """Counts of answers by status, of answers that are not a JSON object (`not_json`), of requests without an answer
    (`unanswered`), and of connections that the client aborted (`left`). `examples` are texts of unwanted results.
    """

    statuses: dict[int, int] = field(default_factory=dict)
    not_json: int = 0
    unanswered: int = 0
    left: int = 0
    examples: list[str] = field(default_factory=list)

    def count_reply(self, reply: Reply) -> None:
        """Count one reply."""
        if not reply.status:
            self.unanswered += 1
            self.examples.append(reply.error)
            return
        self.statuses[reply.status] = self.statuses.get(reply.status, 0) + 1
        if not reply.is_json:
            self.not_json += 1
            self.examples.append(f"{reply.status}: {reply.body[:80]!r}")


async def run_abuse(name: str, port: int, model: str, count: int) -> AnswerTally:
    """Do the act `name` of `ABUSE_KINDS` `count` times, as many at once as given there, and return the tally."""
    tally = AnswerTally()
    abuse, concurrency = ABUSE_KINDS[name]
    semaphore = asyncio.Semaphore(concurrency or count)
    rng = random.Random(count)

    async def run_one(number: int) -> None:
        async with semaphore:
            await abuse(tally, port, model, number, rng)

    await asyncio.gather(*(run_one(number) for number in range(count)))
    tally.examples = [example for example, _ in Counter(tally.examples).most_common(3)]
    return tally


async def _abort_connection(tally: AnswerTally, port: int, request: bytes, delay_s: float) -> None:
    """Send a request and abort the connection after `delay_s`, even in the middle of the answer."""
    try:
        _, writer = await asyncio.open_connection(HOST, port)
        writer.write(request)
        await asyncio.sleep(delay_s)
        writer.transport.abort()
        tally.left += 1
    except OSError as error:
        tally.unanswered += 1
        tally.examples.append(f"{type(error).__name__}: {error}")


async def _aborted_scrape(tally: AnswerTally, port: int, model: str, number: int, rng: random.Random) -> None:
    await _abort_connection(tally, port, request_head("GET", "/metrics"), rng.uniform(*ABORT_RANGE_S))


async def _disconnect(tally: AnswerTally, port: int, model: str, number: int, rng: random.Random) -> None:
    body = {"model": model, "prompt": f"Once upon a time, {number}", "max_tokens": 64, "stream": number % 2 == 0}
    encoded_body = json.dumps(body).encode()
    await _abort_connection(
        tally, port, request_head("POST", "/v1/completions", len(encoded_body)) + encoded_body, rng.uniform(0.0, 0.2)
    )


async def _long_chat(tally: AnswerTally, port: int, model: str, number: int, rng: random.Random) -> None:
    text = f"{number} " + "the quick brown fox " * (CHAT_BYTES // 20)
    body = {"model": model, "messages": [{"role": "user", "content": text[:CHAT_BYTES]}]}
    tally.count_reply(await post(port, "/v1/chat/completions", body))


@cache  # the body is encoded only once, so that encoding does not take CPU time from the server
def _many_keys_body(model: str) -> bytes:
    return json.dumps({"model": model, "prompt": "x", **{f"k{i}": i for i in range(KEY_COUNT)}}).encode()


async def _many_keys(tally: AnswerTally, port: int, model: str, number: int, rng: random.Random) -> None:
    tally.count_reply(await post(port, "/v1/completions", _many_keys_body(model)))


async def _hostile_grammar(tally: AnswerTally, port: int, model: str, number: int, rng: random.Random) -> None:
    body = {
        "model": model,
        "prompt": "def",
        "max_tokens": 24,
        "temperature": 1,
        "seed": number,
        **hostile_request_fields(number),
    }
    tally.count_reply(await post(port, "/v1/completions", body))


async def _ordinary_request(tally: AnswerTally, port: int, model: str, number: int, rng: random.Random) -> None:
    body = {"model": model, "prompt": "def", "max_tokens": 24, "temperature": 1, "seed": number}
    tally.count_reply(await post(port, "/v1/completions", body))


async def _slow_body(tally: AnswerTally, port: int, model: str, number: int, rng: random.Random) -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, reply: Reply) -> None:
        reading = asyncio.ensure_future(read_reply(reader, reply))
        try:
            writer.write(request_head("POST", "/v1/completions", SLOW_BODY_BYTES))
            while not reading.done():
                writer.write(b" ")
                await asyncio.wait((reading,), timeout=BYTE_INTERVAL_S)
            reading.result()
        finally:
            reading.cancel()

    tally.count_reply(await connect(port, drip, SLOW_LIMIT_S))


Abuse = Callable[[AnswerTally, int, str, int, random.Random], Awaitable[None]]
ABUSE_KINDS: dict[str, tuple[Abuse, int]] = {  # the coroutine that does one act, and how many run at once (0: all)
    "aborted scrapes": (_aborted_scrape, 4),
    "chats of 900 kB": (_long_chat, 16),
    "bodies of 50,000 keys": (_many_keys, 8),
    "slow bodies": (_slow_body, 0),
    "disconnects": (_disconnect, 16),
    "ordinary requests": (
        _ordinary_request,
        8,
    ),  # to compare with hostile grammars: the same requests without a grammar
    "hostile grammars": (_hostile_grammar, 8),
}
