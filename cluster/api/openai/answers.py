"""OpenAI's Completions and Chat Completions APIs: reads bodies; writes the whole answer, or the chunks of a stream."""

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from cluster.api.core.adapter import CoreRequest, GenerateCall, checked
from cluster.api.core.conversation import ChatRequest
from cluster.api.core.errors import ApiError
from cluster.api.core.generation import CompletionRequest, StreamOptions
from cluster.api.core.limits import RequestLimits
from cluster.api.core.sequences import Delta, OutputSequence, joined, speculation_metrics, usage, usage_so_far
from cluster.api.core.service import Served
from cluster.api.core.wire import ALIVE, DONE
from cluster.api.core.wire import event as framed
from cluster.chat.events import CallArguments, CallBegun, Event, ReasoningPiece, TextPiece
from cluster.request import StepTree, TokenLogprob


def read_completion(service: Served, limits: RequestLimits, body: Mapping[str, Any]) -> CoreRequest:
    """Read a body of /v1/completions."""
    fields, warnings = checked(service, limits, CompletionRequest, body)
    return CoreRequest(fields, warnings, "cmpl-", CompletionShape)


def read_chat(service: Served, limits: RequestLimits, body: Mapping[str, Any]) -> CoreRequest:
    """Read a body of /v1/chat/completions."""
    fields, warnings = checked(service, limits, ChatRequest, body)
    return CoreRequest(fields, warnings, "chatcmpl-", ChatShape)


LOWEST_LOGPROB = -9999.0  # replaces -inf, which JSON cannot write


class OpenAIShape:
    """Base of completion and chat answers: id, time, model, usage. It knows which sequences have begun to stream."""

    alive = ALIVE
    object_of_body: ClassVar[str]
    object_of_chunk: ClassVar[str]

    def __init__(self, call: GenerateCall) -> None:
        self.choices = call.choices
        self._head = {"id": call.call_id, "created": call.created, "model": call.model}
        self._tokenizer = call.tokenizer
        self._fields = fields = call.asked.fields
        self._options = fields.stream_options or StreamOptions()
        self._ids_as_text = fields.return_tokens_as_token_ids or call.tokenizer is None
        self._with_token_ids = fields.return_token_ids or call.tokenizer is None
        self._logprobs_wanted = fields.top_logprobs_wanted()
        self._echoes = call.echoes
        self._begun: set[int] = set()

    def body(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return the whole answer from all deltas of all sequences."""
        whole = [joined(at, [delta for delta in deltas if delta.index == at]) for at in range(len(self.choices))]
        body: dict[str, Any] = {"object": self.object_of_body, **self._head}
        if self._scored:  # only the first output of each prompt has the prompt's log-probabilities
            each = self._each
            whole = [replace(d, prompt_logprobs=whole[at - at % each].prompt_logprobs) for at, d in enumerate(whole)]
        if self._fields.samples > self._fields.n:
            whole = self._best(whole, self._fields.n)
        body["choices"] = [{**self._choice(delta), "index": at} for at, delta in enumerate(whole)]
        body["usage"] = usage(self.choices)
        if metrics := speculation_metrics(self.choices):
            body["metrics"] = metrics
        return body

    def events(self, delta: Delta) -> bytes:
        """Return the chunks of a delta as events."""
        return b"".join(framed(chunk) for chunk in self.chunks(delta))

    def end(self) -> bytes:
        """Return the chunk with the usage, if the client wants one, and `[DONE]`."""
        last = self.last_chunk()
        return (framed(last) if last else b"") + DONE

    def failed(self, error: ApiError) -> bytes:
        """Return the error in OpenAI's envelope."""
        return framed(error.envelope())

    @property
    def _each(self) -> int:
        """The number of outputs of each prompt."""
        return len(self.choices) // (1 + self.choices[-1].prompt_index)

    @property
    def _scored(self) -> bool:
        """Whether the answer holds log-probabilities of prompts."""
        return self._fields.prompt_logprobs is not None or bool(self._echoes and self._logprobs_wanted is not None)

    def _best(self, whole: Sequence[Delta], count: int) -> list[Delta]:
        """Return the `count` outputs of each prompt with the highest total log-probability, best first."""
        best: list[Delta] = []
        for start in range(0, len(whole), self._each):
            best += sorted(whole[start : start + self._each], key=_likelihood, reverse=True)[:count]
        return best if self._logprobs_wanted is not None else [replace(delta, logprobs=()) for delta in best]

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the chunks of a delta, usually one. The first one is or includes the opening (role, prompt ids)."""
        pieces = [self._chunk_choice(delta)]
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            pieces = self._opening(delta.index, pieces[0])
        return [self._chunk([piece], self.choices[delta.index]) for piece in pieces]

    def last_chunk(self) -> dict[str, Any] | None:
        """Return the chunk with the call's usage, or None if the client did not ask for it."""
        if not self._options.include_usage:
            return None
        chunk = self._chunk([], None)
        chunk["usage"] = usage(self.choices)
        if metrics := speculation_metrics(self.choices):
            chunk["metrics"] = metrics
        return chunk

    def _chunk(self, pieces: list[dict[str, Any]], choice: OutputSequence | None) -> dict[str, Any]:
        chunk: dict[str, Any] = {"object": self.object_of_chunk, **self._head, "choices": pieces}
        if self._options.continuous_usage_stats and choice:
            chunk["usage"] = usage_so_far(choice)
        elif self._options.include_usage:
            chunk["usage"] = None
        return chunk

    def _end(self, delta: Delta) -> dict[str, Any]:
        """Return the last fields of a choice: finish and stop reason, token ids, tree."""
        end: dict[str, Any] = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        if self._with_token_ids:
            end["token_ids"] = list(delta.token_ids)
        if delta.tree is not None:
            end["tree"] = self._tree(delta.tree)
        return end

    def _tree(self, tree: StepTree) -> dict[str, Any]:
        """Return the step's tree, with the text of its nodes; the root's `parent` is null."""
        drafted = len(tree.token_ids) - tree.forced
        nodes = [
            {"parent": parent if node else None, "forced": node >= drafted, **self._piece(token)}
            for node, (parent, token) in enumerate(zip(tree.parents, tree.token_ids, strict=True))
        ]
        return {"nodes": nodes, "accepted": list(tree.accepted), "bonus": self._piece(tree.bonus)}

    def _piece(self, token_id: int) -> dict[str, Any]:
        return {"token_id": token_id, "token": self._token(token_id)[0]}

    def _prompt_token_ids(self, index: int) -> dict[str, Any]:
        ids = self.choices[index].request.prompt_token_ids
        return {"prompt_token_ids": list(ids)} if self._with_token_ids else {}

    def _token(self, token_id: int) -> tuple[str, bytes]:
        if self._ids_as_text or self._tokenizer is None:
            text = f"token_id:{token_id}"
            return text, text.encode()
        return self._tokenizer.token_text(token_id)

    def _prompt_logprobs(self, delta: Delta) -> dict[str, Any]:
        """Return `prompt_logprobs` in vLLM's form. The first token's entry is null: nothing predicts it."""
        most = self._fields.prompt_logprobs
        if most is None:
            return {}
        return {"prompt_logprobs": [None, *(self._ranked(entry, most) for entry in delta.prompt_logprobs)]}

    def _ranked(self, entry: TokenLogprob, most: int) -> dict[str, Any]:
        return {
            str(token): {"logprob": _number(logprob), "rank": rank, "decoded_token": self._token(token)[0]}
            for token, (logprob, rank) in ranked(entry, most).items()
        }

    def _choice(self, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _chunk_choice(self, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _opening(self, index: int, first: dict[str, Any]) -> list[dict[str, Any]]:
        raise NotImplementedError


class CompletionShape(OpenAIShape):
    """The answer of /v1/completions: object `text_completion`, in the body and in the chunks."""

    object_of_body = object_of_chunk = "text_completion"
    _offsets: dict[int, "_Offsets"]

    def _choice(self, delta: Delta) -> dict[str, Any]:
        scores = self._prompt_logprobs(delta)
        return {**self._chunk_choice(delta), **self._prompt_token_ids(delta.index), **scores}

    def _chunk_choice(self, delta: Delta) -> dict[str, Any]:
        text, echoed = delta.text, bool(self._echoes) and delta.index not in self._begun
        if echoed:
            text = self._echoes[self.choices[delta.index].prompt_index] + text
        logprobs = None
        if delta.logprobs or (echoed and self._logprobs_wanted is not None):
            logprobs = self._logprobs(delta, echoed)
        return {"index": delta.index, "text": text, "logprobs": logprobs, **self._end(delta)}

    def _opening(self, index: int, first: dict[str, Any]) -> list[dict[str, Any]]:
        return [{**first, **self._prompt_token_ids(index)}]

    def _logprobs(self, delta: Delta, echoed: bool) -> dict[str, Any]:
        """Return the `logprobs` columns of an output. If `echoed` is true, the prompt's tokens come first."""
        choice = self.choices[delta.index]
        text = self._echoes[choice.prompt_index] if self._echoes else ""
        if not hasattr(self, "_offsets"):
            self._offsets = {}
        begins = self._offsets.setdefault(delta.index, _Offsets(len(text)))
        told = self._named(delta.logprobs)
        told["text_offset"] = [begins.before(self._shown(entry.token_id)) for entry in delta.logprobs]
        if not echoed:
            return told
        ids = choice.request.prompt_token_ids
        scores = self._named(replace(e, top=e.top[: self._logprobs_wanted]) for e in delta.prompt_logprobs)
        scores["text_offset"] = offsets(text, (self._token(token)[1] for token in ids))[1:]
        first = {"tokens": self._token(ids[0])[0], "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
        return {name: [first[name], *scores[name], *column] for name, column in told.items()}

    def _named(self, entries: Iterable[TokenLogprob]) -> dict[str, list[Any]]:
        """Return all `logprobs` columns except `text_offset`."""
        lines = [(self._token(entry.token_id)[0], entry) for entry in entries]
        return {
            "tokens": [text for text, _ in lines],
            "token_logprobs": [_number(entry.logprob) for _, entry in lines],
            "top_logprobs": [
                {self._token(i)[0]: _number(p) for i, p in (*entry.top, (entry.token_id, entry.logprob))}
                for _, entry in lines
            ],
        }

    def _shown(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text; b"" for a special token."""
        hidden = self._tokenizer is not None and not self._tokenizer.textual([token_id])
        return b"" if hidden else self._token(token_id)[1]


class ChatShape(OpenAIShape):
    """The answer of /v1/chat/completions: `chat.completion`, or chunks, of which each choice's first has the role."""

    object_of_body = "chat.completion"
    object_of_chunk = "chat.completion.chunk"

    def __init__(self, call: GenerateCall) -> None:
        super().__init__(call)
        self._thought = call.shows_reasoning
        self._called: set[int] = set()  # indices of choices whose chunks so far hold a tool call

    def body(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return the whole answer. The prompt's token ids are next to `choices`: all choices have the same prompt."""
        scores: dict[str, Any] = {}
        if self._fields.prompt_logprobs is not None:
            scores = self._prompt_logprobs(joined(0, [delta for delta in deltas if delta.index == 0]))
        return {**super().body(deltas), **self._prompt_token_ids(0), **scores}

    def _choice(self, delta: Delta) -> dict[str, Any]:
        message = {"role": "assistant", "content": None, "refusal": None, **self._said(delta.events)}
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
        for call in message.get("tool_calls", ()):
            del call["index"]
        return {"index": delta.index, "message": message, "logprobs": self._logprobs(delta), **self._end(delta)}

    def _chunk_choice(self, delta: Delta) -> dict[str, Any]:
        content = self._said(delta.events) or {"content": ""}
        if any(isinstance(event, CallBegun) for event in delta.events):
            self._called.add(delta.index)
        return {"index": delta.index, "delta": content, "logprobs": self._logprobs(delta), **self._end(delta)}

    def _said(self, events: Sequence[Event]) -> dict[str, Any]:
        """Return the events as fields of a message: content, reasoning, tool_calls. Empty fields are left out."""
        said = "".join(event.text for event in events if isinstance(event, TextPiece))
        thought = "".join(event.text for event in events if isinstance(event, ReasoningPiece)) if self._thought else ""
        fields: dict[str, Any] = {"content": said} if said else {}
        if thought:  # `reasoning_content`: SGLang and older vLLM; `reasoning`: newer vLLM
            fields |= {"reasoning_content": thought, "reasoning": thought}
        calls: dict[int, dict[str, Any]] = {}
        for event in events:
            if isinstance(event, CallBegun):
                kind, given = ("custom", "input") if event.custom else ("function", "arguments")
                called = {"name": event.name, given: ""}
                calls[event.call] = {"index": event.call, "id": event.call_id, "type": kind, kind: called}
            elif isinstance(event, CallArguments):
                # A call that began in an earlier delta is a function's: a custom tool's call comes in one delta.
                call = calls.setdefault(event.call, {"index": event.call, "function": {"arguments": ""}})
                if "custom" in call:
                    call["custom"]["input"] += event.text
                else:
                    call["function"]["arguments"] += event.text
        return {**fields, "tool_calls": list(calls.values())} if calls else fields

    def _end(self, delta: Delta) -> dict[str, Any]:
        """Return the last fields. The finish reason `stop` becomes `tool_calls` if the answer has calls."""
        end = super()._end(delta)
        called = delta.index in self._called or any(isinstance(event, CallBegun) for event in delta.events)
        return {**end, "finish_reason": "tool_calls"} if called and delta.finish_reason == "stop" else end

    def _opening(self, index: int, first: dict[str, Any]) -> list[dict[str, Any]]:
        role = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": role, "logprobs": None, "finish_reason": None}, first]

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if not delta.logprobs:
            return None
        content = [self._entry(entry) for entry in delta.logprobs]
        return {"content": content, "refusal": None}

    def _entry(self, entry: TokenLogprob) -> dict[str, Any]:
        return logprob_entry(entry, self._token)


class _Offsets:
    """Computes the offset of each token in the text, in characters. Tokens of a split character have its offset."""

    def __init__(self, start: int = 0) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = start

    def before(self, raw: bytes) -> int:
        at = self._characters
        self._characters += len(self._decoder.decode(raw))
        return at


def logprob_entry(entry: TokenLogprob, token: Callable[[int], tuple[str, bytes]]) -> dict[str, Any]:
    """Return a token's log-probability and those of its alternatives; `token` maps an id to its text and bytes."""

    def named(token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = token(token_id)
        return {"token": text, "logprob": _number(logprob), "bytes": list(raw)}

    return {**named(entry.token_id, entry.logprob), "top_logprobs": [named(*pair) for pair in entry.top]}


def ranked(entry: TokenLogprob, most: int) -> dict[int, tuple[float, int]]:
    """Return {token id: (log-probability, rank)} of a token and of the `most` likeliest tokens at its position. Ranks
    begin at 1. The rank 0 means unknown: the token is not among the likeliest, and its rank was not computed.
    """
    top = {token: (logprob, place) for place, (token, logprob) in enumerate(entry.top[:most], start=1)}
    _, place = top.get(entry.token_id, (0.0, 0))
    return {entry.token_id: (entry.logprob, entry.rank or place)} | {
        token: found for token, found in top.items() if token != entry.token_id
    }


def _number(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def _likelihood(delta: Delta) -> float:
    return sum(entry.logprob for entry in delta.logprobs)


SLACK = 16
"""How many characters that the tokenizer's normalizer has removed are skipped, at most, to find the next token."""


def offsets(text: str, tokens: Iterable[bytes]) -> list[int]:
    """Return where each token begins in `text`, in characters; `tokens` are the bytes of the tokens of the text.

    If a character is split over several tokens, all of them have the offset of the character. A token that is not in
    the text, such as a special token that the tokenizer adds, has length 0.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    at, found = 0, []
    for raw in tokens:
        found.append(at)
        piece = decoder.decode(raw)
        if text.startswith(piece, at):
            at += len(piece)
        elif piece.startswith(" ") and text.startswith(piece[1:], at):  # the tokenizer added a space before the text
            at += len(piece) - 1
        elif (later := text.find(piece, at, at + len(piece) + SLACK)) > at:  # the normalizer removed characters
            found[-1], at = later, later + len(piece)
    return found
