"""Streams that outlive the engine replica that feeds them: the `EngineClient` of a separate ingress.

Each stream's tokens are kept here. When its engine replica is gone, the request is submitted again, to any replica,
with the tokens that the client has as part of the prompt; it goes on exactly as it would have (lossless by seed: law 1
of docs/architecture.md). Ray is not imported here; `cluster.api.serve.engine_calls` opens the attempts.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from cluster.actors.coalesced_call import CoalescedCall
from cluster.actors.messages import GangStatus, Overloaded
from cluster.actors.streams import RESUMES, OpenStream
from cluster.config import EngineConfig
from cluster.request import Request, Seeds, SequenceOutput

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 1.0  # of status and metrics
SIGN_SHARE = 1 / 3  # of watchdog_timeout_s: how often an engine replica with no output sends a `StreamSign`
SILENCE_SHARE = 2.0  # of watchdog_timeout_s: an engine replica that sends nothing for so long is gone
RETRY_S = 0.2  # between two tries to submit a request
TRIES = 3  # of replicas with too little room for a request, before it is refused
ROOM_S = 600.0  # for how long the room of a replica that was heard of counts


@dataclass(frozen=True, slots=True)
class StreamSign:
    """An engine replica has taken the request. Sent first, and again as a keep-alive while there is no output.

    `model` identifies the weights and how they compute: a stream is resumed on the same model only. `nodes` counts
    drafted tokens per tree. `folders` are those of the tokens' ids (`folders_of`). `room` is the most tokens of one
    request: each replica measures its own memory, so they may differ.
    """

    model: str
    nodes: int
    folders: str
    room: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine will not serve the request: its queue, or Serve's in front of it, is full (no `StreamSign` came
    before), or the request is invalid.
    """

    message: str
    retry_after_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Leaving:
    """The engine replica gives the stream up: its gang is lost, or it is shutting down."""

    reason: str


Item = StreamSign | Refused | Leaving | SequenceOutput


def folders_of(config: EngineConfig) -> str:
    """Where the model and the tokenizer are that give token ids their meaning."""
    return f"{config.model_path}, {config.tokenizer_path or config.model_path}"


class Rooms:
    """The room that a request may count on: the least of all engine replicas that were heard of lately."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._heard = clock, dict[int, float]()

    def heard(self, room: int) -> int:
        """Note a replica's; returns the least."""
        now = self._clock()
        self._heard[room] = now
        self._heard = {each: at for each, at in self._heard.items() if at > now - ROOM_S}
        return min(self._heard)


class GoneError(Exception):
    """The engine replica of an attempt is gone, silent or leaving."""


class ShedError(GoneError):
    """Serve sheds the call: as many wait for the engine's deployment as its `max_queued_requests` allows."""


class Attempt(Protocol):
    """One submission of a request to some engine replica."""

    async def next(self, timeout_s: float) -> Item:
        """The next item.

        Raises:
            GoneError: none will come, or none came within the time.
        """
        ...

    def close(self) -> None:
        """Stop reading; the engine then drops the request, unless its last output was read."""
        ...


class EngineCalls(Protocol):
    """Calls the engine replicas, and chooses which one; callers do not know how many there are."""

    def open(self, request: Request) -> Attempt:
        """Submit a request to one of them; its first item is a `StreamSign`, or `Refused` when the queue is full."""
        ...

    async def call(self, method: str) -> Any:
        """Call a method without arguments on one of them.

        Raises:
            GoneError: none answers.
            ShedError: the queue of their deployment is full.
        """
        ...


class ResilientClient:
    """Implements `EngineClient` over engine replicas that may die, be replaced, or not be there at all."""

    def __init__(
        self,
        calls: EngineCalls,
        config: EngineConfig,
        rank: int,
        on_resumed: Callable[[], None],
        patience_s: float,
        on_room: Callable[[int], None] = lambda room: None,
    ) -> None:
        """`rank` is this replica's among the ingress replicas, for the seeds that it draws; see `Router`.

        `on_resumed` is called per resumed stream, `on_room` with the room of each engine replica that answers. Streams
        wait up to `patience_s` for an engine replica.
        """
        self._on_room = on_room
        self._calls = calls
        self._seeds = Seeds(f"{config.random_seed}/{rank}")
        self._silence_s = SILENCE_SHARE * config.watchdog_timeout_s
        self._folders = folders_of(config)
        self._patience_s = patience_s
        self._on_resumed = on_resumed
        self._status = CoalescedCall(self._ask_status)
        self._samples = CoalescedCall(self._ask_metrics)
        self._ending = False
        self._known = GangStatus(True)

    def end_streams(self) -> None:
        """Do not resume streams from now on: the server is shutting down."""
        self._ending = True

    async def generate(self, request: Request) -> AsyncIterator[SequenceOutput]:
        """Stream one output per step that gave the request tokens; see `EngineClient.generate`."""
        stream = OpenStream(self._seeds.fill(request))
        model, fruitless = "", 0
        while True:
            attempt, sign = await self._place(stream)
            if sign is None:
                why = f"no engine replica took it within {self._patience_s:g} s"
                yield _ended(stream, "abort", "the server is shutting down" if self._ending else why)
                return
            if stream.dealt and sign.model != model:
                attempt.close()
                yield _ended(stream, "abort", f"it began on {model}, but {sign.model} is served now")
                return
            model = sign.model
            stream.begin()  # a `StreamSign` says no more than that it was taken
            try:
                while not stream.ended:
                    item = await attempt.next(self._silence_s)
                    if isinstance(item, SequenceOutput):
                        yield stream.take(replace(item, request_id=stream.name))
                    elif isinstance(item, Refused):
                        if stream.submissions == 1:
                            raise ValueError(item.message)
                        yield _ended(stream, "error", f"the engine would not resume it: {item.message}")
                        return
                    elif isinstance(item, Leaving):
                        raise GoneError(item.reason)
                return
            except GoneError as gone:
                fruitless = 0 if stream.answered else fruitless + (stream.submissions > 1)
                stream.lose(sign.nodes)
                logger.warning("request %s lost its engine after %d tokens: %s", stream.name, len(stream.dealt), gone)
                if fruitless >= RESUMES:
                    yield _ended(stream, "error", f"it was resumed {RESUMES} times without a new token: {gone}")
                    return
            finally:
                attempt.close()

    async def _place(self, stream: OpenStream) -> tuple[Attempt, StreamSign | None]:
        """Submit a stream until an engine replica takes it; the sign is None when none did within `patience_s`. While a
        service is redeployed with another model there are replicas of both: only one that knows these tokens is asked
        to begin.

        Raises:
            Overloaded: the queue is full, and the stream was never taken before.
            ValueError: those that were asked have no room for it, and it was never taken before.
        """
        asked = stream.request
        need = len(asked.prompt_token_ids) - asked.resumed_tokens + asked.params.max_tokens
        until = time.monotonic() + self._patience_s
        request, why, tries = stream.submission(), "", 0
        again = stream.submissions > 1
        while True:
            # a new id for each try: the replica of an earlier one may still hold the old id
            name = f"{stream.name}~{stream.submissions}.{tries}" if again or tries else stream.name
            attempt, taken = self._calls.open(replace(request, request_id=name)), False
            tries += 1
            try:
                item = await attempt.next(min(self._silence_s, max(0.0, until - time.monotonic())))
                why = (
                    f"it serves {item.model}"
                    if isinstance(item, StreamSign)
                    else getattr(item, "message", "it is leaving")
                )
                if isinstance(item, StreamSign) and (stream.dealt or item.folders == self._folders):
                    self._on_room(item.room)
                    taken = need <= item.room
                    if taken and again:
                        self._on_resumed()
                    if taken:
                        return attempt, item
                    why = f"max_tokens: {need} tokens with the prompt, and an engine replica has room for {item.room}"
                    if not again and tries >= TRIES:
                        raise ValueError(f"{why} of one request; lower it, or shorten the prompt")
                if isinstance(item, Refused) and not again:
                    raise Overloaded(why, item.retry_after_s)
            except GoneError as gone:
                why = str(gone)
            finally:
                if not taken:
                    attempt.close()
            if self._ending or time.monotonic() + RETRY_S > until:
                logger.error("request %s: no engine took it within %g s: %s", stream.name, self._patience_s, why)
                return attempt, None
            await asyncio.sleep(RETRY_S)

    def full(self) -> Overloaded | None:
        """Always None: only the engine replicas know; see `EngineClient.full`."""
        return None

    async def status(self) -> GangStatus:
        """Health and load of any one of the engine replicas; the last known one while Serve sheds this call too. See
        `EngineClient.status`.
        """
        return await self._status.get()

    async def metrics(self) -> list[bytes]:
        """Registry samples of all engine replicas and ranks, as far as they answer; see `EngineClient.metrics`."""
        return await self._samples.get()

    async def _ask_status(self) -> GangStatus:
        try:
            self._known = await asyncio.wait_for(self._calls.call("status"), CALL_TIMEOUT_S)
        except TimeoutError:
            return GangStatus(False, f"no engine replica answered within {CALL_TIMEOUT_S:g} s")
        except ShedError:
            return self._known
        except GoneError as gone:
            return GangStatus(False, f"no engine replica answers: {gone}")
        return self._known

    async def _ask_metrics(self) -> list[bytes]:
        try:
            samples: list[bytes] = await asyncio.wait_for(self._calls.call("metrics"), CALL_TIMEOUT_S)
        except (TimeoutError, GoneError):
            return []
        return samples


def _ended(stream: OpenStream, finish_reason: Literal["abort", "error"], why: str) -> SequenceOutput:
    return SequenceOutput(stream.name, (), finish_reason=finish_reason, error=f"request {stream.name} ended: {why}")
