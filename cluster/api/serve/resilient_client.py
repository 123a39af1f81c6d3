"""The `EngineClient` of an ingress replica: its streams survive the loss of the engine replica that feeds them.

The ingress keeps each stream's tokens. When the engine replica is gone, the ingress submits the request to any engine
replica again, with the tokens that the client already has as part of the prompt. The client gets the same tokens as
without the loss (lossless by seed: law 1 of docs/architecture.md). An attempt is one submission of a request to an
engine replica. This module does not import Ray; `cluster.api.serve.engine_calls` implements attempts by Ray calls.
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
from cluster.config.resolved import tokenizer_folder
from cluster.request import Request, Seeds, SequenceOutput

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 1.0  # for the calls `status` and `metrics`
SIGN_SHARE = 1 / 3  # of watchdog_timeout_s: how often an engine replica without output sends a `StreamSign`
SILENCE_SHARE = 2.0  # of watchdog_timeout_s: an engine replica that is silent for this long counts as gone
RETRY_S = 0.2  # pause between two tries to submit a request
TRIES = 3  # a request that is too long for the engine replicas tried is refused after this many tries
ROOM_S = 600.0  # how long a reported token limit of an engine replica counts


@dataclass(frozen=True, slots=True)
class StreamSign:
    """An engine replica has taken the request. Sent first, and again as a keep-alive while there is no output.

    `model` identifies the weights, dtypes and kernels: a stream is resumed on the same model only. `nodes` is the
    number of drafted tokens per tree. `folders` names the model and tokenizer folders (`folders_of`). `room` is the
    most tokens of one request; each replica measures its own memory, so replicas may differ.
    """

    model: str
    nodes: int
    folders: str
    room: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Says that the engine will not serve the request. If no `StreamSign` came before, the queue of the engine or of
    Serve is full. If a `StreamSign` came before, the request is invalid.
    """

    message: str
    retry_after_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Leaving:
    """Says that the engine replica gives up the stream: its gang is lost, or it is shutting down."""

    reason: str


Item = StreamSign | Refused | Leaving | SequenceOutput


def folders_of(config: EngineConfig) -> str:
    """Return the folders of the model and the tokenizer as one string. Token ids mean the same where it is equal."""
    return f"{config.model_path}, {tokenizer_folder(config)}"


class Rooms:
    """The token limit that holds at every engine replica: the smallest one reported within the last `ROOM_S`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._heard = clock, dict[int, float]()

    def heard(self, room: int) -> int:
        """Note the limit `room` of an engine replica; return the smallest limit."""
        now = self._clock()
        self._heard[room] = now
        self._heard = {each: at for each, at in self._heard.items() if at > now - ROOM_S}
        return min(self._heard)


class GoneError(Exception):
    """The engine replica of an attempt is gone, silent or shutting down."""


class ShedError(GoneError):
    """Serve rejects the call: `max_queued_requests` calls already wait for the engine deployment."""


class Attempt(Protocol):
    """One submission of a request to an engine replica."""

    async def next(self, timeout_s: float) -> Item:
        """Return the next item.

        Raises:
            GoneError: no item will come, or none came within `timeout_s`.
        """
        ...

    def close(self) -> None:
        """Stop reading; the engine then aborts the request, unless its last output was read."""
        ...


class EngineCalls(Protocol):
    """Calls engine replicas. The implementation chooses the replica of each call."""

    def open(self, request: Request) -> Attempt:
        """Submit a request to one engine replica. The first item is a `StreamSign`; it is `Refused` if the queue is
        full, or `Leaving` if the replica gives up its streams.
        """
        ...

    async def call(self, method: str) -> Any:
        """Call a method without arguments on one engine replica.

        Raises:
            GoneError: no engine replica answers.
            ShedError: the queue of the engine deployment is full.
        """
        ...


class ResilientClient:
    """Implements `EngineClient` over engine replicas that may die, be replaced, or be absent."""

    def __init__(
        self,
        calls: EngineCalls,
        config: EngineConfig,
        rank: int,
        on_resumed: Callable[[], None],
        patience_s: float,
        on_room: Callable[[int], None] = lambda room: None,
    ) -> None:
        """`rank` is this replica's rank in the ingress deployment; it seeds the generator of request seeds (`Router`).

        `on_resumed` is called once per resumed stream, `on_room` with the token limit of each engine replica that
        answers a request. Streams wait up to `patience_s` for an engine replica.
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
        """Stop resuming streams: the server is shutting down."""
        self._ending = True

    async def generate(self, request: Request) -> AsyncIterator[SequenceOutput]:
        """Yield the outputs of a request, across engine replicas if one is lost (`EngineClient.generate`)."""
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
            stream.begin()  # a `StreamSign` does not say when a step admits the request, so count it as begun now
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
        """Submit a stream until an engine replica takes it; the sign is None if none did within `patience_s`. During a
        redeploy with another model, replicas of both models answer: a new stream begins only on a replica whose
        `folders` are those of this ingress, since the prompt's token ids would mean other text elsewhere.

        Raises:
            Overloaded: the queue is full, and no engine replica has taken the stream before.
            ValueError: it is too long for `TRIES` engine replicas, and none has taken the stream before.
        """
        asked = stream.request
        need = len(asked.prompt_token_ids) - asked.resumed_tokens + asked.params.max_tokens
        until = time.monotonic() + self._patience_s
        request, why, tries = stream.submission(), "", 0
        again = stream.submissions > 1
        while True:
            # Each try needs a new request id: the replica of an earlier try may still hold the old one.
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
                # A stream with tokens is placed on any model: `generate` then ends it if the model differs.
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
        """Return None always: only the engine replicas know whether they are full (`EngineClient.full`)."""
        return None

    async def status(self) -> GangStatus:
        """Return health and load of one of the engine replicas (`EngineClient.status`). While Serve rejects the call
        because its queue is full, return the last known status.
        """
        return await self._status.get()

    async def metrics(self) -> list[bytes]:
        """Return the registry samples of all engine replicas and ranks that answer (`EngineClient.metrics`)."""
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
