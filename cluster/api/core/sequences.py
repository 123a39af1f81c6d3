"""The output sequences of one call: each is a separate request to the engine; the outputs are merged as they come."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from cluster.actors.messages import EngineClient, Overloaded, Unavailable
from cluster.api.core.errors import ApiError, internal_error, overloaded_error, unavailable_error
from cluster.chat.events import Event, TextPiece
from cluster.chat.reading import AnswerReader
from cluster.observability.metrics import Outcome, RequestTimer
from cluster.request import ErrorCode, FinishReason, Request, SequenceOutput, SpeculationCounts, StepTree, TokenLogprob
from cluster.tokenizer.stop_strings import StoppedText

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Delta:
    """The output that one step added to one sequence, ready to send.

    `text` may lag behind `token_ids`, because text that may begin a stop string is sent later. `events` are the parts
    of the text (plain text, reasoning, tool calls), parsed by the model's format. `tree` is the draft tree of the step,
    or None if the client did not request it.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    events: tuple[Event, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    tree: StepTree | None = None


class OutputSequence:
    """One output sequence of a call. `index` is its place in `choices`, ordered by prompt and then by sample."""

    def __init__(
        self,
        index: int,
        prompt_index: int,
        request: Request,
        text: StoppedText | None,
        reader: AnswerReader | None = None,
    ) -> None:
        """`text` turns the tokens into text up to a stop string; it is None if the model has no tokenizer. `reader`
        parses reasoning and tool calls; None means that the answer is plain text.
        """
        self.index = index
        self.prompt_index = prompt_index
        self.request = request
        self.timer: RequestTimer | None = None
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.speculation: SpeculationCounts | None = None
        self.finished = False
        self._text = text
        self._reader = reader
        self.reasoning_tokens = 0

    @property
    def prompt_tokens(self) -> int:
        """The length of the prompt in tokens."""
        return len(self.request.prompt_token_ids)

    def attach_timer(self, timer: RequestTimer) -> None:
        """Attach the timer, which records the tokens and the end of this sequence."""
        self.timer = timer

    def process_output(self, output: SequenceOutput) -> Delta:
        """Count the tokens of one output of the engine, and return the output as a `Delta`.

        Raises:
            ApiError: the engine aborted the sequence or failed on it.
        """
        if output.finish_reason in ("error", "abort"):
            is_server_error = output.finish_reason == "error"
            reason = output.error or output.finish_reason
            logger.log(
                logging.ERROR if is_server_error else logging.INFO,
                "request %s was ended: %s",
                output.request_id,
                reason,
            )
            if not is_server_error:
                raise unavailable_error(f"the server ended request {output.request_id} early; it may be shutting down")
            if output.error_code is not None and output.error is not None:
                raise _request_fault_error(output.error, output.error_code)
            raise internal_error(output.request_id)
        self.completion_tokens += len(output.token_ids)
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        self.speculation = output.speculation or self.speculation
        self.finished = output.finish_reason is not None
        if self.timer:
            self.timer.on_tokens(len(output.token_ids))
            if output.finish_reason:
                self.timer.on_finish(output.finish_reason, self.prompt_tokens)
        text, events = "", tuple[Event, ...]()
        if self._text:
            ids = self._text.visible_token_ids(output)
            text, events = (
                self._push_text(self._text, ids) if self._reader is None else self._parse_tokens(self._reader, ids)
            )
        end_fields = (output.finish_reason, output.stop_reason)
        return Delta(
            self.index,
            text,
            output.token_ids,
            output.logprobs,
            *end_fields,
            events,
            output.prompt_logprobs,
            output.tree,
        )

    def _push_text(self, stopped_text: StoppedText, token_ids: Sequence[int]) -> tuple[str, tuple[Event, ...]]:
        text = stopped_text.push(token_ids)
        if self.finished:
            text += stopped_text.finish()
        return text, (TextPiece(text),) if text else ()

    def _parse_tokens(self, reader: AnswerReader, token_ids: Sequence[int]) -> tuple[str, tuple[Event, ...]]:
        """Parse the tokens one by one, so that the count of reasoning tokens is exact."""
        assert self._text is not None
        text, events = "", list[Event]()
        for token in token_ids:
            was_thinking = reader.is_reasoning
            piece = self._text.push((token,))
            events += reader.push(piece)
            text += piece
            self.reasoning_tokens += (
                was_thinking or reader.is_reasoning
            )  # markers that open and close reasoning count too
        if self.finished:
            piece = self._text.finish()
            events += [*reader.push(piece), *reader.finish()]
            text += piece
        return text, tuple(events)


def _request_fault_error(message: str, code: ErrorCode) -> ApiError:
    """Return the error for a fault that the request itself caused. The client may see `message`."""
    if code == "slow_grammar":
        return ApiError(message, code=code)
    return ApiError(message, status=500, kind="server_error", code=code)


def join_deltas(index: int, deltas: Sequence[Delta]) -> Delta:
    """Join all deltas of one sequence into one, for an answer that is not streamed."""
    return Delta(
        index,
        "".join(delta.text for delta in deltas),
        tuple(token for delta in deltas for token in delta.token_ids),
        tuple(logprob for delta in deltas for logprob in delta.logprobs),
        deltas[-1].finish_reason if deltas else None,
        deltas[-1].stop_reason if deltas else None,
        tuple(event for delta in deltas for event in delta.events),
        tuple(logprob for delta in deltas for logprob in delta.prompt_logprobs),
    )


async def generate_deltas(engine: EngineClient, choices: Sequence[OutputSequence]) -> AsyncGenerator[Delta, None]:
    """Yield the deltas of all choices as they come. If the generator is closed or a choice fails, abort all choices.

    Raises:
        ApiError: 503 if the queue is full or the engine is unavailable, 400 if the engine refuses a request, 500 if the
            engine fails.
    """
    outcome: Outcome = "abort"
    try:
        async with aclosing(merge_outputs(engine, [choice.request for choice in choices])) as outputs:
            async for index, output in outputs:
                if output.token_ids or output.finish_reason:
                    yield choices[index].process_output(output)
        if unfinished_ids := [choice.request.request_id for choice in choices if not choice.finished]:
            logger.error("the engine ended the stream of %s without a finish reason", unfinished_ids)
            raise internal_error(unfinished_ids[0])
    except ApiError as error:
        outcome = "overloaded" if error.code == "overloaded" else "invalid" if error.status < 500 else "error"
        raise
    except Exception:
        outcome = "error"
        logger.exception("request %s failed", choices[0].request.request_id)
        raise internal_error(choices[0].request.request_id) from None
    finally:
        for choice in choices:
            if choice.timer:
                choice.timer.on_finish(outcome, choice.prompt_tokens)  # no effect on a choice that has ended


async def merge_outputs(
    engine: EngineClient, requests: Sequence[Request]
) -> AsyncGenerator[tuple[int, SequenceOutput], None]:
    """Yield pairs (index of the request, output). If the generator is closed or a request fails, abort all requests.

    A request that finds the engine's queue full is submitted again when another request of the call gets its first
    output or ends. The call is refused only if none of its requests is with the engine. (If its own requests fill the
    queue, refusing it would not help: the client's retry would fill the queue again.)

    Raises:
        ApiError: 503 if the queue is full or the engine is unavailable, 400 if the engine refuses a request.
    """
    queue_retries = _QueueRetries(len(requests))
    if len(requests) == 1:  # a single request needs no task and no queue
        async with aclosing(_outputs(engine, requests[0], queue_retries)) as outputs:
            async for output in outputs:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, SequenceOutput | Exception | None]] = asyncio.Queue()

    async def pump(index: int) -> None:
        try:
            async with aclosing(_outputs(engine, requests[index], queue_retries)) as outputs:
                async for output in outputs:
                    queue.put_nowait((index, output))
            queue.put_nowait((index, None))
        except Exception as error:
            queue.put_nowait((index, error))

    tasks = [asyncio.create_task(pump(index)) for index in range(len(requests))]
    try:
        running = len(tasks)
        while running:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _QueueRetries:
    """The requests of a call that wait because the engine's queue was full. When another request of the call gets its
    first output or ends, the request that has waited longest is submitted again.
    """

    def __init__(self, count: int) -> None:
        self._submitted = count  # requests that are with the engine, or are being submitted
        self._waiting: deque[asyncio.Event] = deque()

    async def wait(self, refusal: ApiError) -> None:
        """Wait until another request of the call gets its first output or ends.

        Raises:
            ApiError: `refusal`, if no other request of the call is with the engine. Nothing would then end the wait.
        """
        self._submitted -= 1
        if not self._submitted:
            raise refusal
        wakeup = asyncio.Event()
        self._waiting.append(wakeup)
        await wakeup.wait()

    def wake_one(self) -> None:
        """Wake one waiting request. Another request got its first output or ended, so the queue may have a place."""
        if self._waiting:
            self._submitted += 1
            self._waiting.popleft().set()

    def request_ended(self) -> None:
        """Wake one waiting request, and count the ended request as no longer with the engine."""
        self.wake_one()
        self._submitted -= 1


async def _outputs(
    engine: EngineClient, request: Request, queue_retries: _QueueRetries
) -> AsyncGenerator[SequenceOutput, None]:
    """Yield one request's outputs. The engine's iterator is always closed at the end, which aborts an unfinished
    request.
    """
    has_output = False
    while True:
        stream = engine.generate(request)
        try:
            async for output in stream:
                if not has_output:
                    has_output = True
                    queue_retries.wake_one()
                yield output
            queue_retries.request_ended()
            return
        except Overloaded as error:
            refusal = overloaded_error(error)
        except Unavailable as error:
            raise unavailable_error(str(error), error.retry_after_s) from None
        except ValueError as error:
            name, separator, _ = str(error).partition(": ")  # a message "FIELD: ..." names the wrong field
            param = name if separator and name.isidentifier() else None
            raise ApiError(str(error), param=param, code="invalid_value") from None
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()
        await queue_retries.wait(refusal)


def sequence_usage(choice: OutputSequence) -> dict[str, int]:
    """Return the usage of one sequence so far, for `continuous_usage_stats`."""
    return {
        "prompt_tokens": choice.prompt_tokens,
        "completion_tokens": choice.completion_tokens,
        "total_tokens": choice.prompt_tokens + choice.completion_tokens,
    }


def usage(choices: Sequence[OutputSequence]) -> dict[str, Any]:
    """Return the usage of a whole call in tokens. A prompt with several choices counts once.

    Completion tokens include a final stop token. Prediction tokens are the nodes of the verified trees without their
    roots; the target has accepted or rejected each of them.
    """
    first_choices = {choice.prompt_index: choice for choice in reversed(choices)}.values()
    prompt_tokens = sum(choice.prompt_tokens for choice in first_choices)
    completion_tokens = sum(choice.completion_tokens for choice in choices)
    counts = [choice.speculation for choice in choices if choice.speculation]
    accepted_tokens = sum(count.accepted_tokens for count in counts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in first_choices)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(choice.reasoning_tokens for choice in choices),
            "accepted_prediction_tokens": accepted_tokens,
            "rejected_prediction_tokens": sum(count.drafted for count in counts) - accepted_tokens,
        },
    }


def speculation_metrics(choices: Sequence[OutputSequence]) -> dict[str, Any] | None:
    """Return the field `metrics` of an answer in vLLM's form, which the benchmark AIPerf reads. Return None if there
    was no speculation, or if the call has several sequences.

    `acceptance_histogram[j]` counts steps that accepted j draft tokens; its length is `num_spec_tokens + 1`.
    """
    counts = choices[0].speculation if len(choices) == 1 else None
    return {"speculative_decoding": _speculative_decoding(counts)} if counts else None


def _speculative_decoding(counts: SpeculationCounts) -> dict[str, Any]:
    histogram = list(counts.accepted) or [0]
    return {
        "mean_acceptance_length": counts.accept_length,
        "draft_acceptance_rate": counts.accepted_tokens / counts.drafted if counts.drafted else 0.0,
        "acceptance_histogram": histogram,
        "num_spec_steps": counts.steps,
        "num_accepted_draft_tokens": counts.accepted_tokens,
        "num_draft_tokens": counts.drafted,
        "num_spec_tokens": len(histogram) - 1,
    }
