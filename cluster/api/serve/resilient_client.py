"""The `EngineClient` of an ingress replica: its streams survive the loss of the engine replica that feeds them.

The ingress keeps each stream's tokens. When the engine replica is gone, the ingress submits the request to any engine
replica again, with the tokens that the client already has as part of the prompt. The client gets the same tokens as
without the loss, because a request's tokens depend only on its prompt, parameters and seed (law 1 of
docs/architecture.md). An attempt is one submission of a request to an engine replica. This module does not import Ray;
`cluster.api.serve.engine_calls` implements attempts by Ray calls.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from cluster.actors.coalesced_call import CoalescedCall
from cluster.actors.messages import GangStatus, Overloaded
from cluster.actors.streams import MAX_FRUITLESS_RESUMES, OpenStream
from cluster.config import EngineConfig
from cluster.config.resolved import tokenizer_folder
from cluster.request import Request, Seeds, SequenceOutput

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 1.0  # for the calls `status` and `metrics`
HEARTBEAT_SHARE = 1 / 3  # of watchdog_timeout_s: how often an engine replica without output sends a `StreamHeartbeat`
SILENCE_TIMEOUT_SHARE = 2.0  # of watchdog_timeout_s: an engine replica that is silent for this long counts as gone
RETRY_S = 0.2  # pause between two tries to submit a request
MAX_TRIES = 3  # after this many tries, a request is refused if it is too long for the engine replica
LIMIT_VALID_S = 600.0  # how long a reported token limit of an engine replica counts


@dataclass(frozen=True, slots=True)
class StreamHeartbeat:
    """Says that an engine replica has taken the request and still exists. It is the first item of a stream, and is sent
    again while there is no output.

    `model` identifies the weights, dtypes and kernels: a stream is resumed on the same model only.
    `draft_tokens_per_tree` is the number of draft tokens in a full tree. `folders` names the model and tokenizer
    folders (`folders_of`). `max_request_tokens` is the most tokens of one request; each replica measures its own
    memory, so the numbers of two replicas may differ.
    """

    model: str
    draft_tokens_per_tree: int
    folders: str
    max_request_tokens: int


@dataclass(frozen=True, slots=True)
class RequestRefused:
    """Says that the engine will not serve the request. If no `StreamHeartbeat` came before, the engine's queue or
    Serve's queue is full, or the wait would be too long. If a `StreamHeartbeat` came before, the request is invalid.
    """

    message: str
    retry_after_s: float = 1.0


@dataclass(frozen=True, slots=True)
class StreamAbandoned:
    """Says that the engine replica gives the stream up, for example because it is shutting down, or because its gang
    (the ranks of one replica) is lost. Another engine replica may resume the stream.
    """

    reason: str


StreamItem = StreamHeartbeat | RequestRefused | StreamAbandoned | SequenceOutput


def folders_of(config: EngineConfig) -> str:
    """Return the folders of the model and the tokenizer as one string. If two replicas have the same string, token ids
    have the same meaning on both.
    """
    return f"{config.model_path}, {tokenizer_folder(config)}"


class SharedTokenLimit:
    """The token limit that holds at every engine replica: the smallest one reported within the last `LIMIT_VALID_S`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._reported_at = clock, dict[int, float]()

    def update(self, max_request_tokens: int) -> int:
        """Note the limit `max_request_tokens`, which an engine replica has reported; return the smallest limit."""
        now = self._clock()
        self._reported_at[max_request_tokens] = now
        self._reported_at = {
            limit: reported_at for limit, reported_at in self._reported_at.items() if reported_at > now - LIMIT_VALID_S
        }
        return min(self._reported_at)


class EngineGoneError(Exception):
    """The engine replica of an attempt is gone, silent or shutting down."""


class EngineQueueFullError(EngineGoneError):
    """Serve rejects the call: `max_queued_requests` calls already wait for the engine deployment."""


class Attempt(Protocol):
    """One submission of a request to an engine replica."""

    async def next(self, timeout_s: float) -> StreamItem:
        """Return the next item.

        Raises:
            EngineGoneError: no item will come, or none came within `timeout_s`.
        """
        ...

    def close(self) -> None:
        """Stop reading the stream. If the last output of the request was not read, the engine aborts the request."""
        ...


class EngineCalls(Protocol):
    """Calls engine replicas. The implementation chooses the replica of each call."""

    def open(self, request: Request) -> Attempt:
        """Submit a request to one engine replica. The first item of the attempt is `RequestRefused` if a queue is full,
        `StreamAbandoned` if the replica gives up its streams, and otherwise a `StreamHeartbeat`.
        """
        ...

    async def call(self, method: str) -> Any:
        """Call a method without arguments on one engine replica.

        Raises:
            EngineGoneError: no engine replica answers.
            EngineQueueFullError: the queue of the engine deployment is full.
        """
        ...


class ResilientClient:
    """Implements `EngineClient` over engine replicas that may die, be replaced, or be absent."""

    def __init__(
        self,
        engine_calls: EngineCalls,
        config: EngineConfig,
        rank: int,
        on_resumed: Callable[[], None],
        restart_timeout_s: float,
        on_token_limit: Callable[[int], None] = lambda max_request_tokens: None,
    ) -> None:
        """`rank` is this replica's rank in the ingress deployment. The seeds of requests without a seed are drawn from
        `random_seed` and `rank`.

        `on_resumed` is called once for each resumed stream. `on_token_limit` is called with the `max_request_tokens` of
        each engine replica that answers a request. Streams wait up to `restart_timeout_s` seconds for an engine
        replica.
        """
        self._on_token_limit = on_token_limit
        self._engine_calls = engine_calls
        self._seeds = Seeds(f"{config.random_seed}/{rank}")
        self._silence_timeout_s = SILENCE_TIMEOUT_SHARE * config.watchdog_timeout_s
        self._folders = folders_of(config)
        self._restart_timeout_s = restart_timeout_s
        self._on_resumed = on_resumed
        self._status = CoalescedCall(self._fetch_status)
        self._samples = CoalescedCall(self._fetch_metrics)
        self._shutting_down = False
        self._last_status = GangStatus(True)

    def end_streams(self) -> None:
        """Stop resuming streams, because the server is shutting down. The engine replicas end the open streams."""
        self._shutting_down = True

    async def generate(self, request: Request) -> AsyncIterator[SequenceOutput]:
        """Yield the outputs of a request, across engine replicas if one is lost (`EngineClient.generate`)."""
        stream = OpenStream(self._seeds.fill(request))
        model, resumes_without_token = "", 0
        while True:
            attempt, heartbeat = await self._submit_until_accepted(stream)
            if heartbeat is None:
                reason = f"no engine replica took it within {self._restart_timeout_s:g} s"
                yield _final_output(stream, "abort", "the server is shutting down" if self._shutting_down else reason)
                return
            if stream.sent_tokens and heartbeat.model != model:
                attempt.close()
                yield _final_output(stream, "abort", f"it began on {model}, but {heartbeat.model} is served now")
                return
            model = heartbeat.model
            stream.on_admitted()  # no heartbeat says when a step admits the request, so count it as admitted now
            try:
                while not stream.ended:
                    item = await attempt.next(self._silence_timeout_s)
                    if isinstance(item, SequenceOutput):
                        yield stream.record(replace(item, request_id=stream.name))
                    elif isinstance(item, RequestRefused):
                        if stream.submissions == 1:
                            raise ValueError(item.message)
                        yield _final_output(stream, "error", f"the engine would not resume it: {item.message}")
                        return
                    elif isinstance(item, StreamAbandoned):
                        raise EngineGoneError(item.reason)
                return
            except EngineGoneError as error:
                resumes_without_token = (
                    0 if stream.has_first_token else resumes_without_token + (stream.submissions > 1)
                )
                stream.on_incarnation_lost(heartbeat.draft_tokens_per_tree)
                logger.warning(
                    "request %s lost its engine after %d tokens: %s", stream.name, len(stream.sent_tokens), error
                )
                if resumes_without_token >= MAX_FRUITLESS_RESUMES:
                    yield _final_output(
                        stream, "error", f"it was resumed {MAX_FRUITLESS_RESUMES} times without a new token: {error}"
                    )
                    return
            finally:
                attempt.close()

    async def _submit_until_accepted(self, stream: OpenStream) -> tuple[Attempt, StreamHeartbeat | None]:
        """Submit a stream until an engine replica accepts it. The heartbeat is None if no replica accepted it within
        `restart_timeout_s`, or before the server began to shut down.

        During a redeploy with another model, replicas of both models answer. A new stream begins only on a replica
        whose `folders` are those of this ingress, since the prompt's token ids would mean other text elsewhere.

        Raises:
            Overloaded: the queue is full, and no engine replica has taken the stream before.
            ValueError: after `MAX_TRIES` tries the request is too long for the engine replica, and no engine replica
                has taken the stream before.
        """
        original = stream.request
        required_tokens = len(original.prompt_token_ids) - original.resumed_tokens + original.params.max_tokens
        deadline = time.monotonic() + self._restart_timeout_s
        request, reason, num_tries = stream.submission(), "", 0
        is_resume = stream.submissions > 1
        while True:
            # Each try needs a new request id: the replica of an earlier try may still hold the old one.
            request_id = f"{stream.name}~{stream.submissions}.{num_tries}" if is_resume or num_tries else stream.name
            attempt, accepted = self._engine_calls.open(replace(request, request_id=request_id)), False
            num_tries += 1
            try:
                item = await attempt.next(min(self._silence_timeout_s, max(0.0, deadline - time.monotonic())))
                reason = (
                    f"it serves {item.model}"
                    if isinstance(item, StreamHeartbeat)
                    else getattr(item, "message", "the engine replica gave up the stream")
                )
                # A stream with tokens is placed on any model: `generate` then ends it if the model differs.
                if isinstance(item, StreamHeartbeat) and (stream.sent_tokens or item.folders == self._folders):
                    self._on_token_limit(item.max_request_tokens)
                    accepted = required_tokens <= item.max_request_tokens
                    if accepted and is_resume:
                        self._on_resumed()
                    if accepted:
                        return attempt, item
                    reason = (
                        f"max_tokens: {required_tokens} tokens with the prompt, and an engine replica has room for "
                        f"{item.max_request_tokens}"
                    )
                    if not is_resume and num_tries >= MAX_TRIES:
                        raise ValueError(f"{reason} of one request; lower it, or shorten the prompt")
                if isinstance(item, RequestRefused) and not is_resume:
                    raise Overloaded(reason, item.retry_after_s)
            except EngineGoneError as error:
                reason = str(error)
            finally:
                if not accepted:
                    attempt.close()
            if self._shutting_down or time.monotonic() + RETRY_S > deadline:
                logger.error(
                    "request %s: no engine took it within %g s: %s", stream.name, self._restart_timeout_s, reason
                )
                return attempt, None
            await asyncio.sleep(RETRY_S)

    def overload(self) -> Overloaded | None:
        """Return None always, because only the engine replicas know whether they are full (`EngineClient.overload`)."""
        return None

    async def status(self) -> GangStatus:
        """Return health and load of one of the engine replicas (`EngineClient.status`). While Serve rejects the call
        because its queue is full, return the last known status.
        """
        return await self._status.get()

    async def metrics(self) -> list[bytes]:
        """Return the registry samples of all engine replicas and ranks that answer (`EngineClient.metrics`)."""
        return await self._samples.get()

    async def _fetch_status(self) -> GangStatus:
        try:
            self._last_status = await asyncio.wait_for(self._engine_calls.call("status"), CALL_TIMEOUT_S)
        except TimeoutError:
            return GangStatus(False, f"no engine replica answered within {CALL_TIMEOUT_S:g} s")
        except EngineQueueFullError:
            return self._last_status
        except EngineGoneError as error:
            return GangStatus(False, f"no engine replica answers: {error}")
        return self._last_status

    async def _fetch_metrics(self) -> list[bytes]:
        try:
            samples: list[bytes] = await asyncio.wait_for(self._engine_calls.call("metrics"), CALL_TIMEOUT_S)
        except (TimeoutError, EngineGoneError):
            return []
        return samples


def _final_output(stream: OpenStream, finish_reason: Literal["abort", "error"], reason: str) -> SequenceOutput:
    return SequenceOutput(stream.name, (), finish_reason=finish_reason, error=f"request {stream.name} ended: {reason}")
