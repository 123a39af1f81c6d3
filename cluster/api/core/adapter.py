"""The interface that each API implements: it reads a body as a `CoreRequest` and writes the answer in its own form."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from cluster.api.core.conversation import ChatRequest, TokenizeRequest, unknown_field_warnings
from cluster.api.core.errors import ApiError, field_path
from cluster.api.core.generation import CompletionRequest
from cluster.api.core.limits import RequestLimits
from cluster.api.core.sequences import Delta, OutputSequence
from cluster.api.core.service import ServedModel
from cluster.api.core.tools import unsupported_tool_warnings
from cluster.tokenizer.tokenizer import TextTokenizer


class Origins:
    """Maps the path of each field of a chat request to the path of the body field from which the field came."""

    def __init__(self, body_paths: Mapping[str, str]) -> None:
        self._body_paths = body_paths

    def body_path(self, path: str) -> str:
        """Return the path in the body for a path in the chat request. The longest known prefix decides; a path without
        a known prefix is returned unchanged.
        """
        parts = path.split(".")
        for count in range(len(parts), 0, -1):
            source_path = self._body_paths.get(".".join(parts[:count]))
            if source_path is not None:
                return field_path(source_path, *parts[count:])
        return path

    def translate_warning(self, warning: str) -> str:
        """Return a warning after replacing the path at its start: the chat request's path becomes the body's path."""
        path, _, text = warning.partition(":")
        return f"{self.body_path(path)}:{text}"

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Translate each `ApiError` raised inside the `with` block, so that the error names the body's field."""
        try:
            yield
        except ApiError as error:
            if error.param is None:
                raise
            param = self.body_path(error.param)
            message = error.message
            if message.startswith(f"{error.param}:"):
                message = param + message.removeprefix(error.param)
            attributes = {"status": error.status, "code": error.code, "kind": error.kind, "headers": error.headers}
            raise ApiError(message, param=param, **attributes) from None  # type: ignore[arg-type]


class AnswerFormatter(Protocol):
    """Writes the answer of one call in the form of the API that was called. A formatter remembers what was sent, so
    each call has its own.
    """

    @property
    def keep_alive(self) -> bytes:
        """The bytes that are sent while a stream has nothing else to send, so that the connection stays open."""
        ...

    def body(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return the whole answer from all deltas of all sequences."""
        ...

    def events(self, delta: Delta) -> bytes:
        """Return the stream events for one delta. The events for the first delta also open the stream."""
        ...

    def final_events(self) -> bytes:
        """Return the events after the last delta."""
        ...

    def error_events(self, error: ApiError) -> bytes:
        """Return the events that report an error after the stream has begun."""
        ...


@dataclass(frozen=True, slots=True)
class CoreRequest:
    """The body of any API as a completion or chat request (`fields`), with warnings about ignored fields.

    `make_formatter` builds the object that writes the answer. The answer's id begins with `prefix`. If `id_header` is
    not empty, a response header of that name also has the id. `origins` translates names of `fields` in errors and
    warnings into the names in the client's body.
    """

    fields: CompletionRequest | ChatRequest
    warnings: list[str]
    prefix: str
    make_formatter: Callable[["GenerateCall"], AnswerFormatter]
    origins: Origins = field(default_factory=lambda: Origins({}))
    id_header: str = ""


@dataclass(slots=True)
class GenerateCall:
    """A call that is ready for the engine: its sequences, and all that its answer needs.

    `headers` are the HTTP headers of the answer. `echoed_prompts` has the texts of the prompts if answers begin with
    them; otherwise it is empty. `prompt_logprob_count` is the number of prompt log-probabilities in the answer; if it
    is large, the answer is serialised off the event loop. `created` is Unix seconds.
    """

    request: CoreRequest
    call_id: str
    model: str
    choices: Sequence[OutputSequence]
    tokenizer: TextTokenizer | None
    headers: dict[str, str] = field(default_factory=dict)
    echoed_prompts: tuple[str, ...] = ()
    prompt_logprob_count: int = 0
    created: int = field(default_factory=lambda: int(time.time()))
    formatter: AnswerFormatter = field(init=False)

    def __post_init__(self) -> None:
        self.formatter = self.request.make_formatter(self)

    @property
    def shows_reasoning(self) -> bool:
        """Whether the answer includes the reasoning."""
        fields = self.request.fields
        return not isinstance(fields, ChatRequest) or fields.include_reasoning


RequestReader = Callable[[ServedModel, RequestLimits, Mapping[str, Any]], CoreRequest]
"""A function that parses the body of one API. It raises an ApiError that names the wrong field if the body cannot be
served.
"""


F = TypeVar("F", CompletionRequest, ChatRequest, TokenizeRequest)


def read_checked_request(
    service: ServedModel, limits: RequestLimits, request_class: type[F], body: Mapping[str, Any]
) -> tuple[F, list[str]]:
    """Return the request in a JSON body, checked against the model and the limits, and warnings about ignored fields.
    Sampling fields that the client left out get the model's defaults.

    Raises:
        ApiError: the body cannot be served; the error names the field at fault.
    """
    fields, warnings = request_class.read(body)
    fields.check(service.model, limits)
    if isinstance(fields, TokenizeRequest):
        return fields, warnings + unsupported_tool_warnings(fields.tools)
    if isinstance(fields, ChatRequest):
        warnings += unsupported_tool_warnings(fields.tools) + unknown_field_warnings(fields.messages)
    return fields.with_defaults(service.model.sampling_defaults), warnings
