"""OpenAI's Completions and Chat Completions APIs: reads bodies, and writes whole answers or the chunks of streams."""

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from cluster.api.core.adapter import CoreRequest, GenerateCall, read_checked_request
from cluster.api.core.conversation import ChatRequest
from cluster.api.core.errors import ApiError
from cluster.api.core.generation import CompletionRequest
from cluster.api.core.limits import RequestLimits
from cluster.api.core.options import StreamOptions
from cluster.api.core.sequences import Delta, OutputSequence, join_deltas, sequence_usage, speculation_metrics, usage
from cluster.api.core.service import ServedModel
from cluster.api.core.wire import DONE_EVENT, KEEP_ALIVE
from cluster.api.core.wire import sse_event as encode_event
from cluster.chat.events import CallArguments, CallStarted, Event, ReasoningPiece, TextPiece
from cluster.request import StepTree, TokenLogprob


def read_completion(service: ServedModel, limits: RequestLimits, body: Mapping[str, Any]) -> CoreRequest:
    """Read a body of /v1/completions."""
    fields, warnings = read_checked_request(service, limits, CompletionRequest, body)
    return CoreRequest(fields, warnings, "cmpl-", CompletionFormatter)


def read_chat(service: ServedModel, limits: RequestLimits, body: Mapping[str, Any]) -> CoreRequest:
    """Read a body of /v1/chat/completions."""
    fields, warnings = read_checked_request(service, limits, ChatRequest, body)
    return CoreRequest(fields, warnings, "chatcmpl-", ChatFormatter)


MIN_LOGPROB = -9999.0  # replaces -inf, which JSON cannot write


class OpenAIFormatter:
    """Writes the common fields of answers (id, time, model, usage). Remembers which sequences have begun to stream."""

    keep_alive = KEEP_ALIVE
    object_of_body: ClassVar[str]
    object_of_chunk: ClassVar[str]

    def __init__(self, call: GenerateCall) -> None:
        self.choices = call.choices
        self._common_fields = {"id": call.call_id, "created": call.created, "model": call.model}
        self._tokenizer = call.tokenizer
        self._fields = fields = call.request.fields
        self._stream_options = fields.stream_options or StreamOptions()
        self._ids_as_text = fields.return_tokens_as_token_ids or call.tokenizer is None
        self._with_token_ids = fields.return_token_ids or call.tokenizer is None
        self._num_logprobs = fields.requested_top_logprobs()
        self._echoed_prompts = call.echoed_prompts
        self._opened_choices: set[int] = set()

    def body(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return the whole answer from all deltas of all sequences."""
        outputs = [join_deltas(i, [delta for delta in deltas if delta.index == i]) for i in range(len(self.choices))]
        body: dict[str, Any] = {"object": self.object_of_body, **self._common_fields}
        if self._has_prompt_logprobs:  # only the first output of each prompt has the prompt's log-probabilities
            n = self._samples_per_prompt
            outputs = [
                replace(output, prompt_logprobs=outputs[i - i % n].prompt_logprobs) for i, output in enumerate(outputs)
            ]
        if self._fields.samples_per_prompt > self._fields.n:
            outputs = self._best_outputs(outputs, self._fields.n)
        body["choices"] = [{**self._choice(delta), "index": i} for i, delta in enumerate(outputs)]
        body["usage"] = usage(self.choices)
        if metrics := speculation_metrics(self.choices):
            body["metrics"] = metrics
        return body

    def events(self, delta: Delta) -> bytes:
        """Return the chunks of a delta as events."""
        return b"".join(encode_event(chunk) for chunk in self.chunks(delta))

    def final_events(self) -> bytes:
        """Return the chunk with the usage, if the client wants one, and `[DONE]`."""
        usage_chunk = self.last_chunk()
        return (encode_event(usage_chunk) if usage_chunk else b"") + DONE_EVENT

    def error_events(self, error: ApiError) -> bytes:
        """Return the error in OpenAI's envelope."""
        return encode_event(error.envelope())

    @property
    def _samples_per_prompt(self) -> int:
        """The number of outputs of each prompt."""
        return len(self.choices) // (1 + self.choices[-1].prompt_index)

    @property
    def _has_prompt_logprobs(self) -> bool:
        """Whether the answer holds log-probabilities of prompts."""
        return self._fields.prompt_logprobs is not None or bool(self._echoed_prompts and self._num_logprobs is not None)

    def _best_outputs(self, outputs: Sequence[Delta], count: int) -> list[Delta]:
        """Return the `count` outputs of each prompt with the highest total log-probability, best first."""
        best: list[Delta] = []
        for start in range(0, len(outputs), self._samples_per_prompt):
            best += sorted(outputs[start : start + self._samples_per_prompt], key=_total_logprob, reverse=True)[:count]
        return best if self._num_logprobs is not None else [replace(delta, logprobs=()) for delta in best]

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the chunks of a delta, usually one. For the first delta of a sequence, the first chunk has the role
        (chat) or, if requested, the prompt's token ids (completions).
        """
        choices = [self._chunk_choice(delta)]
        if delta.index not in self._opened_choices:
            self._opened_choices.add(delta.index)
            choices = self._opening_choices(delta.index, choices[0])
        return [self._chunk([choice], self.choices[delta.index]) for choice in choices]

    def last_chunk(self) -> dict[str, Any] | None:
        """Return the chunk with the call's usage, or None if the client did not ask for it."""
        if not self._stream_options.include_usage:
            return None
        chunk = self._chunk([], None)
        chunk["usage"] = usage(self.choices)
        if metrics := speculation_metrics(self.choices):
            chunk["metrics"] = metrics
        return chunk

    def _chunk(self, chunk_choices: list[dict[str, Any]], choice: OutputSequence | None) -> dict[str, Any]:
        chunk: dict[str, Any] = {"object": self.object_of_chunk, **self._common_fields, "choices": chunk_choices}
        if self._stream_options.continuous_usage_stats and choice:
            chunk["usage"] = sequence_usage(choice)
        elif self._stream_options.include_usage:
            chunk["usage"] = None
        return chunk

    def _end_fields(self, delta: Delta) -> dict[str, Any]:
        """Return the last fields of a choice: finish and stop reason, token ids, tree."""
        fields: dict[str, Any] = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        if self._with_token_ids:
            fields["token_ids"] = list(delta.token_ids)
        if delta.tree is not None:
            fields["tree"] = self._tree(delta.tree)
        return fields

    def _tree(self, tree: StepTree) -> dict[str, Any]:
        """Return the step's tree with each node's text. A node is `forced` if a grammar allowed only this token."""
        draft_count = len(tree.token_ids) - tree.forced
        nodes = [
            {"parent": parent if node else None, "forced": node >= draft_count, **self._token_fields(token)}
            for node, (parent, token) in enumerate(zip(tree.parents, tree.token_ids, strict=True))
        ]
        return {"nodes": nodes, "accepted": list(tree.accepted), "bonus": self._token_fields(tree.bonus)}

    def _token_fields(self, token_id: int) -> dict[str, Any]:
        return {"token_id": token_id, "token": self._token_text(token_id)[0]}

    def _prompt_token_ids(self, index: int) -> dict[str, Any]:
        ids = self.choices[index].request.prompt_token_ids
        return {"prompt_token_ids": list(ids)} if self._with_token_ids else {}

    def _token_text(self, token_id: int) -> tuple[str, bytes]:
        if self._ids_as_text or self._tokenizer is None:
            text = f"token_id:{token_id}"
            return text, text.encode()
        return self._tokenizer.token_text(token_id)

    def _prompt_logprobs(self, delta: Delta) -> dict[str, Any]:
        """Return `prompt_logprobs` in vLLM's form. The first token's entry is null, because nothing predicts it."""
        num_logprobs = self._fields.prompt_logprobs
        if num_logprobs is None:
            return {}
        return {
            "prompt_logprobs": [None, *(self._ranked_fields(entry, num_logprobs) for entry in delta.prompt_logprobs)]
        }

    def _ranked_fields(self, entry: TokenLogprob, num_logprobs: int) -> dict[str, Any]:
        return {
            str(token): {"logprob": _finite_logprob(logprob), "rank": rank, "decoded_token": self._token_text(token)[0]}
            for token, (logprob, rank) in ranked_logprobs(entry, num_logprobs).items()
        }

    def _choice(self, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _chunk_choice(self, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _opening_choices(self, index: int, first_choice: dict[str, Any]) -> list[dict[str, Any]]:
        raise NotImplementedError


class CompletionFormatter(OpenAIFormatter):
    """Writes the answers of /v1/completions. The field `object` is `text_completion`, in the body and in chunks."""

    object_of_body = object_of_chunk = "text_completion"
    _offsets: dict[int, "_OffsetCounter"]

    def _choice(self, delta: Delta) -> dict[str, Any]:
        prompt_logprobs = self._prompt_logprobs(delta)
        return {**self._chunk_choice(delta), **self._prompt_token_ids(delta.index), **prompt_logprobs}

    def _chunk_choice(self, delta: Delta) -> dict[str, Any]:
        text, begins_with_echo = delta.text, bool(self._echoed_prompts) and delta.index not in self._opened_choices
        if begins_with_echo:
            text = self._echoed_prompts[self.choices[delta.index].prompt_index] + text
        logprobs = None
        if delta.logprobs or (begins_with_echo and self._num_logprobs is not None):
            logprobs = self._logprobs(delta, begins_with_echo)
        return {"index": delta.index, "text": text, "logprobs": logprobs, **self._end_fields(delta)}

    def _opening_choices(self, index: int, first_choice: dict[str, Any]) -> list[dict[str, Any]]:
        return [{**first_choice, **self._prompt_token_ids(index)}]

    def _logprobs(self, delta: Delta, with_prompt: bool) -> dict[str, Any]:
        """Return the `logprobs` columns of an output. If `with_prompt` is true, the prompt's tokens come first."""
        choice = self.choices[delta.index]
        text = self._echoed_prompts[choice.prompt_index] if self._echoed_prompts else ""
        if not hasattr(self, "_offsets"):
            self._offsets = {}
        offset_counter = self._offsets.setdefault(delta.index, _OffsetCounter(len(text)))
        columns = self._token_columns(delta.logprobs)
        columns["text_offset"] = [offset_counter.advance(self._text_bytes(entry.token_id)) for entry in delta.logprobs]
        if not with_prompt:
            return columns
        ids = choice.request.prompt_token_ids
        prompt_columns = self._token_columns(replace(e, top=e.top[: self._num_logprobs]) for e in delta.prompt_logprobs)
        prompt_columns["text_offset"] = token_offsets(text, (self._token_text(token)[1] for token in ids))[1:]
        first_token = {
            "tokens": self._token_text(ids[0])[0],
            "token_logprobs": None,
            "top_logprobs": None,
            "text_offset": 0,
        }
        return {name: [first_token[name], *prompt_columns[name], *column] for name, column in columns.items()}

    def _token_columns(self, entries: Iterable[TokenLogprob]) -> dict[str, list[Any]]:
        """Return all `logprobs` columns except `text_offset`."""
        rows = [(self._token_text(entry.token_id)[0], entry) for entry in entries]
        return {
            "tokens": [text for text, _ in rows],
            "token_logprobs": [_finite_logprob(entry.logprob) for _, entry in rows],
            "top_logprobs": [
                {self._token_text(i)[0]: _finite_logprob(p) for i, p in (*entry.top, (entry.token_id, entry.logprob))}
                for _, entry in rows
            ],
        }

    def _text_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text. A special token adds none."""
        is_special = self._tokenizer is not None and not self._tokenizer.visible_token_ids([token_id])
        return b"" if is_special else self._token_text(token_id)[1]


class ChatFormatter(OpenAIFormatter):
    """Writes the answers of /v1/chat/completions. In a stream, the first chunk of each choice has the role."""

    object_of_body = "chat.completion"
    object_of_chunk = "chat.completion.chunk"

    def __init__(self, call: GenerateCall) -> None:
        super().__init__(call)
        self._shows_reasoning = call.shows_reasoning
        self._choices_with_calls: set[int] = set()  # indices of choices whose chunks so far hold a tool call

    def body(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return the whole answer. All choices have one prompt, so its token ids are next to `choices`, not in them."""
        prompt_logprobs: dict[str, Any] = {}
        if self._fields.prompt_logprobs is not None:
            prompt_logprobs = self._prompt_logprobs(join_deltas(0, [delta for delta in deltas if delta.index == 0]))
        return {**super().body(deltas), **self._prompt_token_ids(0), **prompt_logprobs}

    def _choice(self, delta: Delta) -> dict[str, Any]:
        message = {"role": "assistant", "content": None, "refusal": None, **self._message_fields(delta.events)}
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
        for call in message.get("tool_calls", ()):
            del call["index"]
        return {"index": delta.index, "message": message, "logprobs": self._logprobs(delta), **self._end_fields(delta)}

    def _chunk_choice(self, delta: Delta) -> dict[str, Any]:
        content = self._message_fields(delta.events) or {"content": ""}
        if any(isinstance(event, CallStarted) for event in delta.events):
            self._choices_with_calls.add(delta.index)
        return {"index": delta.index, "delta": content, "logprobs": self._logprobs(delta), **self._end_fields(delta)}

    def _message_fields(self, events: Sequence[Event]) -> dict[str, Any]:
        """Return the events as fields of a message: content, reasoning, tool_calls. Empty fields are left out."""
        content = "".join(event.text for event in events if isinstance(event, TextPiece))
        reasoning = (
            "".join(event.text for event in events if isinstance(event, ReasoningPiece))
            if self._shows_reasoning
            else ""
        )
        fields: dict[str, Any] = {"content": content} if content else {}
        if reasoning:  # `reasoning_content`: SGLang and older vLLM; `reasoning`: newer vLLM
            fields |= {"reasoning_content": reasoning, "reasoning": reasoning}
        calls: dict[int, dict[str, Any]] = {}
        for event in events:
            if isinstance(event, CallStarted):
                call_type, arguments_field = ("custom", "input") if event.custom else ("function", "arguments")
                function = {"name": event.name, arguments_field: ""}
                calls[event.call_index] = {
                    "index": event.call_index,
                    "id": event.call_id,
                    "type": call_type,
                    call_type: function,
                }
            elif isinstance(event, CallArguments):
                # A call that began in an earlier delta is a function call, because a custom tool call is in one delta.
                call = calls.setdefault(event.call_index, {"index": event.call_index, "function": {"arguments": ""}})
                if "custom" in call:
                    call["custom"]["input"] += event.text
                else:
                    call["function"]["arguments"] += event.text
        return {**fields, "tool_calls": list(calls.values())} if calls else fields

    def _end_fields(self, delta: Delta) -> dict[str, Any]:
        """Return the last fields of a choice. If it has calls, the finish reason `stop` becomes `tool_calls`."""
        fields = super()._end_fields(delta)
        has_calls = delta.index in self._choices_with_calls or any(
            isinstance(event, CallStarted) for event in delta.events
        )
        return {**fields, "finish_reason": "tool_calls"} if has_calls and delta.finish_reason == "stop" else fields

    def _opening_choices(self, index: int, first_choice: dict[str, Any]) -> list[dict[str, Any]]:
        role = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": role, "logprobs": None, "finish_reason": None}, first_choice]

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if not delta.logprobs:
            return None
        content = [self._logprob_fields(entry) for entry in delta.logprobs]
        return {"content": content, "refusal": None}

    def _logprob_fields(self, entry: TokenLogprob) -> dict[str, Any]:
        return logprob_entry(entry, self._token_text)


class _OffsetCounter:
    """Computes the offset of each token in the text, in characters. Tokens that share a character have one offset."""

    def __init__(self, start: int = 0) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._position = start

    def advance(self, raw: bytes) -> int:
        offset = self._position
        self._position += len(self._decoder.decode(raw))
        return offset


def logprob_entry(entry: TokenLogprob, token_text: Callable[[int], tuple[str, bytes]]) -> dict[str, Any]:
    """Return the fields of a token and of its alternatives. `token_text` maps a token id to text and bytes."""

    def token_fields(token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = token_text(token_id)
        return {"token": text, "logprob": _finite_logprob(logprob), "bytes": list(raw)}

    return {**token_fields(entry.token_id, entry.logprob), "top_logprobs": [token_fields(*pair) for pair in entry.top]}


def ranked_logprobs(entry: TokenLogprob, num_logprobs: int) -> dict[int, tuple[float, int]]:
    """Return {token id: (log-probability, rank)} of a token and of the `num_logprobs` likeliest tokens at its
    position. Ranks begin at 1. The rank 0 means that the rank is not known, because the token is not among the
    likeliest and the engine did not compute its rank.
    """
    top = {token: (logprob, rank) for rank, (token, logprob) in enumerate(entry.top[:num_logprobs], start=1)}
    _, rank = top.get(entry.token_id, (0.0, 0))
    return {entry.token_id: (entry.logprob, entry.rank or rank)} | {
        token: ranked_logprob for token, ranked_logprob in top.items() if token != entry.token_id
    }


def _finite_logprob(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


def _total_logprob(delta: Delta) -> float:
    return sum(entry.logprob for entry in delta.logprobs)


MAX_SKIPPED_CHARACTERS = 16
"""`token_offsets` skips at most this many characters (which the normalizer removed) to find the next token."""


def token_offsets(text: str, tokens: Iterable[bytes]) -> list[int]:
    """Return where each token begins in `text`, in characters; `tokens` are the bytes of the tokens of the text.

    If a character is split over several tokens, all of them have the offset of the character. A token that is not in
    the text, such as a special token that the tokenizer adds, has length 0.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    position, starts = 0, []
    for raw in tokens:
        starts.append(position)
        piece = decoder.decode(raw)
        if text.startswith(piece, position):
            position += len(piece)
        elif piece.startswith(" ") and text.startswith(piece[1:], position):
            # the tokenizer added a space before the text
            position += len(piece) - 1
        elif (next_start := text.find(piece, position, position + len(piece) + MAX_SKIPPED_CHARACTERS)) > position:
            # the normalizer removed characters
            starts[-1], position = next_start, next_start + len(piece)
    return starts
