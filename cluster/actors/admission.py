"""Admission to the queue of a gang: which requests may enter, and how long a refused client should stay away.

While slots are free, a request waits for the prompts queued before its own; otherwise it waits for running streams to
end. Both rates are measured, as means over the last seconds: prompt tokens that left the queue while slots were free,
and new tokens per occupied slot. The estimated wait of a newcomer assumes that these rates continue: running streams
end after their expected remaining tokens, waiting requests take the freed slots in turn, and from slot to first token
takes the mean time measured so far. Lengths are learnt as a geometric distribution: every token has the same chance to
be the last one, namely the share of last tokens among all tokens so far, up to `max_tokens`. Until the gang has given
`KNOWN_TOKENS` for each running request, `GUESSED_PER_S` tokens a second per slot are assumed.

No Ray and no event loop here: plain bookkeeping over an injected clock.
"""

import heapq
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.actors.messages import Overloaded
from cluster.config import EngineConfig
from cluster.request import Request

FIRST_GUESS = 128.0  # tokens per stop that are assumed before any request has ended
LONG = 4096.0  # the same in `quantile`; long on purpose, so that max_tokens, which is mostly smaller, decides
MEMORY = 0.02  # weight of the latest request in the learnt lengths and in the mean time to the first token
TAU_S = 10.0  # time constant of the rates
FRESH_S = 0.1  # how long an estimate is used again: one costs a millisecond, and refusals may come by the hundred
HEADROOM = 0.7  # share of max_queue_wait_s: estimates err, and 99 of 100 admitted requests are to stay within it
KNOWN_S = 1.0  # seconds of measured work after which the prompt rate is used
KNOWN_TOKENS = 8  # for each running request, after which the token rate is used: prompts delayed the first ones
GUESSED_PER_S = 10.0  # tokens a second of one slot, assumed until then: low, because a start is slow
GOLDEN = 0.6180339887498949  # the fractional parts of its multiples spread evenly over [0, 1)
SHORTEST = 1.0  # tokens of the request that `full` asks about


class Rate:
    """A rate per second, as an exponential mean over the time in which the counted thing could happen."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    def happened(self, amount: float) -> None:
        """Count `amount`."""
        self._amount += amount

    def passed(self, seconds: float, times: float = 1.0) -> None:
        """Count elapsed time, for `times` slots at once."""
        kept = math.exp(-seconds / TAU_S)
        self._amount *= kept
        self._seconds = self._seconds * kept + seconds * times

    @property
    def known(self) -> bool:
        """Whether enough was measured to use `per_s`."""
        return self._amount > 0 and self._seconds >= KNOWN_S

    @property
    def per_s(self) -> float:
        """The rate; 0.0 before anything was measured."""
        return self._amount / self._seconds if self._seconds > 0 else 0.0


class Lengths:
    """How many new tokens requests have, learnt from those that ended."""

    def __init__(self) -> None:
        self._tokens = self._stops = 0.0

    def ended(self, tokens: int, stopped: bool) -> None:
        """A request ended after `tokens`; `stopped`: by itself, not at its limit or because its client left."""
        self._tokens = (1.0 - MEMORY) * self._tokens + tokens
        self._stops = (1.0 - MEMORY) * self._stops + stopped

    def expected(self, most: int) -> float:
        """The expected number of tokens until a stop or the limit `most`; prior: one stop per `FIRST_GUESS` tokens."""
        chance = min((self._stops + 1.0) / (self._tokens + FIRST_GUESS), 0.5)
        return -math.expm1(most * math.log1p(-chance)) / chance

    def quantile(self, share: float, most: int, lived: int) -> float:
        """The number of tokens that `share` of the requests do not exceed.

        `lived` counts the tokens of requests still running: without them the estimate would be biased towards short
        ones. Until a request has stopped, one stop in `LONG` tokens, or in those seen if more, is assumed.
        """
        seen = max(self._tokens + lived, 1.0)
        chance = min(max(self._stops / seen, 1.0 / max(seen, LONG)), 0.5)
        return min(float(most), math.log1p(-share) / math.log1p(-chance))


@dataclass(slots=True)
class Guest:
    """One open request: `prompt` tokens, `tokens` expected in all, `most` new ones allowed, `dealt` of them so far.

    `came` is the time at which it entered, None if it had to wait for a slot or for the gang.
    """

    prompt: int
    tokens: float
    most: int
    came: float | None
    dealt: int = 0


class Admission:
    """The queue of one gang as its router sees it. Waiting: has no token yet. Running: has at least one."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._slots = config.max_running_requests * config.attn_dp_size
        self._kv_tokens = 0
        self._clock = clock
        self._waiting: dict[str, Guest] = {}
        self._running: dict[str, Guest] = {}
        self._tokens = 0.0  # of all guests, expected ones included
        self.queued_tokens = 0.0  # of those waiting
        self._lengths = Lengths()
        self._first_s = 0.0  # mean time to the first token of requests that found a free slot
        self._pace, self._prompts = Rate(), Rate()
        self._given = 0  # tokens, ever
        self._at = clock()
        self._serving = True
        self._known: tuple[float, float] | None = None  # when the wait was estimated last, and what it was

    def new_tokens(self, request: Request) -> float:
        """The likely number of new tokens of a request."""
        return self._lengths.expected(request.params.max_tokens)

    def check(self, request: Request) -> None:
        """Refuse a request that there is no room for.

        Raises:
            Overloaded: with the time after which there is likely to be room.
        """
        if (why := self._why(len(request.prompt_token_ids) + self.new_tokens(request))) is not None:
            raise why

    def full(self) -> Overloaded | None:
        """Why even the shortest request would be refused now."""
        return self._why(SHORTEST)

    def _why(self, tokens: float) -> Overloaded | None:
        config, waiting = self._config, len(self._waiting)
        wait = self.wait_s()
        if waiting >= config.max_queued_requests:
            return Overloaded(f"{waiting} requests wait (max_queued_requests is {config.max_queued_requests})", wait)
        if waiting and self.queued_tokens + tokens > config.max_queued_tokens:
            held = f"the queue holds {self.queued_tokens:.0f} tokens (max_queued_tokens is {config.max_queued_tokens})"
            return Overloaded(held, wait)
        if wait > HEADROOM * config.max_queue_wait_s:
            long = f"a request would wait for about {wait:.0f} s (max_queue_wait_s is {config.max_queue_wait_s:g})"
            return Overloaded(long, wait)
        return None

    def entered(self, request: Request) -> None:
        """A request was admitted, and waits for its first token."""
        prompt = len(request.prompt_token_ids)
        self._pass()
        came = self._at if self._serving and self._free() else None
        guest = Guest(prompt, prompt + self.new_tokens(request), request.params.max_tokens, came)
        self._waiting[request.request_id] = guest
        self._tokens += guest.tokens
        self.queued_tokens += guest.tokens
        self._known = None

    def progressed(self, name: str, tokens: int) -> None:
        """A request was given tokens; with the first of them it changes from waiting to running."""
        self._pass()
        guest = self._running.get(name)
        if guest is None:
            guest = self._waiting.pop(name, None)
            if guest is None:
                return
            self._running[name] = guest
            self._leave(guest)
            self._prompts.happened(guest.prompt)
            if guest.came is not None:
                took = self._at - guest.came
                self._first_s += (MEMORY if self._first_s else 1.0) * (took - self._first_s)
        guest.dealt += tokens
        self._given += tokens
        self._pace.happened(tokens)

    def left(self, name: str, stopped: bool) -> None:
        """A request is over; see `Lengths.ended`."""
        self._pass()
        guest = self._running.pop(name, None)
        if guest is None:
            guest = self._waiting.pop(name, None)
            if guest is None:
                return
            self._leave(guest)
        self._tokens -= guest.tokens
        self._lengths.ended(guest.dealt, stopped)
        if not self._running and not self._waiting:  # float sums drift: reset them while the gang is empty
            self._tokens = self.queued_tokens = 0.0
            self._known = None

    def stopped(self) -> None:
        """The gang is down: until `started`, time does not count and no wait can be estimated."""
        self._pass()
        self._serving = False
        for guest in self._waiting.values():
            guest.came = None

    def started(self, kv_tokens: int) -> None:
        """The gang serves, or serves again; `kv_tokens` is the KV capacity of one rank."""
        self._kv_tokens = kv_tokens * self._config.attn_dp_size
        self._at = self._clock()
        self._serving, self._known = True, None

    def wait_s(self) -> float:
        """How long a newcomer would wait for its first token; 0.0 where nothing is known."""
        if not self._serving:
            return 0.0
        now = self._clock()
        if self._known is None or now - self._known[0] > FRESH_S:
            self._known = (now, self._estimate())
        return self._known[1]

    def _estimate(self) -> float:
        if self._free():
            rate = self._prompts.per_s if self._prompts.known else 0.0
            return sum(guest.prompt for guest in self._waiting.values()) / rate if rate else 0.0
        known = self._given >= KNOWN_TOKENS * max(1, len(self._running))
        each = self._pace.per_s if known else GUESSED_PER_S
        # Spread the lengths over the learnt distribution: with the mean for each, all slots would seem to end at once.
        shares = (GOLDEN * at % 1.0 for at in range(1, 1 + len(self._running) + len(self._waiting)))
        lived = sum(guest.dealt for guest in self._running.values())

        def lasts(guest: Guest) -> float:
            return self._lengths.quantile(next(shares), max(1, guest.most - guest.dealt), lived) / each

        ends = [lasts(guest) for guest in self._running.values()]
        heapq.heapify(ends)
        slots = max(self._room(), len(ends))
        for guest in self._waiting.values():
            starts = heapq.heappop(ends) if len(ends) >= slots else 0.0
            heapq.heappush(ends, starts + lasts(guest))
        return self._first_s + (ends[0] if len(ends) >= slots else 0.0)

    def _free(self) -> bool:
        """Whether a newcomer would find a slot. While nobody waits the KV cache has room, so `_room` is not asked."""
        guests = len(self._running) + len(self._waiting)
        return guests < (self._room() if self._waiting else self._slots)

    def _room(self) -> int:
        """How many requests of the present mean size can run at once; prefixes that they share are not known here."""
        guests = len(self._running) + len(self._waiting)
        if not guests or not self._tokens:
            return self._slots
        return max(1, min(self._slots, int(self._kv_tokens * guests / self._tokens)))

    def _leave(self, guest: Guest) -> None:
        self.queued_tokens = max(0.0, self.queued_tokens - guest.tokens)

    def _pass(self) -> None:
        """Count the time since the last call in each rate that could have grown during it."""
        now = self._clock()
        seconds, self._at = now - self._at, now
        if not self._serving:
            return
        if guests := len(self._running) + len(self._waiting):
            self._pace.passed(seconds, min(guests, self._room()))
        if self._waiting and self._free():
            self._prompts.passed(seconds)
