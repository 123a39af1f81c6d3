"""What the REST layer is given: an engine, a model, a tokenizer, metrics. Ray is not imported here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, Self

from cluster.actors.messages import EngineClient
from cluster.api.core.constraints import OutputConstraint
from cluster.api.core.tokenizer import ChatTokenizer
from cluster.api.proxy.middleware import BYTES_PER_S, GRACE_S
from cluster.observability.metrics import ServingMetrics


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The one model that is served. `created` is Unix seconds.

    `context_length` counts prompt and output tokens together; `kv_room` is how many of them the KV cache of a rank
    holds for one request, where that is less. `vocab_size` bounds the token ids of a prompt; `eos_token_ids` end an
    output. `sampling` are fields of requests that leave them out, as the model's makers would have it sampled.
    """

    model_id: str
    context_length: int
    vocab_size: int
    created: int
    kv_room: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    sampling: Mapping[str, float] = field(default_factory=dict)

    @property
    def room(self) -> int:
        """The most tokens, prompt and output together, that one request can have."""
        return self.context_length if self.kv_room is None else min(self.context_length, self.kv_room)


LEAST_BODY = 1 << 20
BODY_BYTES_PER_TOKEN = 32  # of the context; a token of text is 3 to 5 bytes, or 6 per character that JSON escapes
BODIES_HELD = 128
LEAST_MESSAGES = 1024


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one call may ask for; more is a 400 (413 and 408 for the body). Shown by /server_info."""

    body_bytes: int = LEAST_BODY
    held_bytes: int = BODIES_HELD * LEAST_BODY  # of all bodies that are being read and encoded; beyond it, a 503
    body_grace_s: float = GRACE_S  # a body must arrive within body_grace_s,
    body_bytes_per_s: int = BYTES_PER_S  # plus a second for each body_bytes_per_s bytes
    choices: int = 128  # n
    sequences: int = 128  # prompts * n
    messages: int = LEAST_MESSAGES
    tools: int = 256
    stops: int = 64
    stop_characters: int = 256
    stop_token_ids: int = 64
    bad_words: int = 64
    logprobs: int = 20
    prompt_logprobs: int = 1 << 18  # of all prompts of a call: their tokens, times the alternatives and itself
    default_completion_tokens: int = (
        16  # max_tokens of /v1/completions when it is left out, as OpenAI has it; for chat: what fits
    )

    @classmethod
    def of(cls, context_length: int) -> Self:
        """The limits that follow from a model's context length in tokens.

        A body may have 32 bytes per token, and always 1 MiB: a full context fits also as token ids (at most 9 bytes
        each) and as text that JSON escapes. A conversation may have one message per 4 tokens, which the frame
        of a message takes in the usual chat formats, and always 1,024.
        """
        body = max(LEAST_BODY, BODY_BYTES_PER_TOKEN * context_length)
        return cls(body_bytes=body, held_bytes=BODIES_HELD * body, messages=max(LEAST_MESSAGES, context_length // 4))


class GrammarCompiler(Protocol):
    """Compiles what requests ask of the form of their output; see `cluster.api.core.grammars.Grammars`."""

    async def compiled(self, constraint: OutputConstraint) -> str:
        """The compiled grammar of a constraint, or an `ApiError` that names its field."""
        ...


class Served(Protocol):
    """What a request is read against."""

    @property
    def model(self) -> ModelInfo:
        """The model that is served."""
        ...

    @property
    def tokenizer(self) -> ChatTokenizer | None:
        """None when the model's folder has no tokenizer: then prompts are token ids."""
        ...

    @property
    def grammars(self) -> GrammarCompiler:
        """Compiles what constrains an output."""
        ...


class Service(Served, Protocol):
    """Everything the routes use; looked up on every call, so parts may become available after the app is made."""

    @property
    def engine(self) -> EngineClient:
        """The gang, or the client of several."""
        ...

    @property
    def metrics(self) -> ServingMetrics:
        """The instruments of this replica."""
        ...

    async def samples(self) -> list[bytes]:
        """The registry samples of all replicas and ranks (see `cluster.observability.metrics`)."""
        ...

    async def metrics_page(self) -> bytes:
        """The Prometheus text of all replicas and ranks."""
        ...
