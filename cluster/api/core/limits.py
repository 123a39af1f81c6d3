"""The served model, the limits of one call, and the limit of work on the event loop.

The event loop serves every stream of the replica. Work that takes too long for it, such as encoding long prompts, runs
in a small thread pool. The pool has few threads, so that the streams still get most of the GIL; further work waits in
the pool's queue.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Self, TypeVar

from cluster.api.proxy.body_time_limit import BYTES_PER_S, GRACE_S


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The one model that is served. `created` is Unix seconds.

    `context_length` is the largest number of tokens of a request, prompt and output together. `kv_cache_tokens` is
    the number of tokens of one request that fit into the KV cache of a rank, or None if unknown. Token ids of a prompt
    lie below `vocab_size`; `eos_token_ids` end an output. `sampling_defaults` maps names of request fields to the
    defaults that the model's makers recommend.
    """

    model_id: str
    context_length: int
    vocab_size: int
    created: int
    kv_cache_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)

    @property
    def max_request_tokens(self) -> int:
        """The largest number of tokens of a request that is served: the context, or less if the KV cache is small."""
        return self.context_length if self.kv_cache_tokens is None else min(self.context_length, self.kv_cache_tokens)


MIN_BODY_BYTES = 1 << 20  # a body may always have this many bytes
BODY_BYTES_PER_TOKEN = 32  # of the context; a token is 3 to 5 bytes of text, and JSON may write a character as 6 bytes
MAX_FULL_BODIES = 128  # bodies of the full length that may be in memory at once
MIN_MESSAGES = 1024


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one call, shown by /server_info. A call that exceeds a limit gets a 400, except for the limits of the
    body: a call gets a 413 if its body is too long, a 408 if the body arrives too slowly, and a 503 if all bodies in
    memory together are too long.
    """

    body_bytes: int = MIN_BODY_BYTES
    held_bytes: int = MAX_FULL_BODIES * MIN_BODY_BYTES  # for all bodies in memory together; a call beyond it: 503
    body_grace_s: float = GRACE_S  # a body must arrive within body_grace_s + (bytes so far) / body_bytes_per_s
    body_bytes_per_s: int = BYTES_PER_S
    choices: int = 128  # the largest n and best_of
    sequences: int = 128  # prompts * n, or prompts * best_of
    messages: int = MIN_MESSAGES
    tools: int = 256
    stops: int = 64
    stop_characters: int = 256
    stop_token_ids: int = 64
    bad_words: int = 64
    logprobs: int = 20
    prompt_logprobs: int = 1 << 18  # per call: (prompt tokens, summed over its sequences) * (1 + alternatives)
    default_completion_tokens: int = (
        16  # default max_tokens of /v1/completions, as at OpenAI; a chat may fill the context
    )

    @classmethod
    def of(cls, context_length: int) -> Self:
        """Return the limits that follow from a model's context length in tokens.

        The limit of a body is 32 bytes per token of the context, and at least 1 MiB. So a full context fits, also as
        token ids (at most 9 bytes each) or as text that JSON escapes. The limit of a conversation is one message per 4
        tokens of the context, and at least 1,024 messages: in the usual chat formats the markers around a message alone
        take 4 tokens.
        """
        body_bytes = max(MIN_BODY_BYTES, BODY_BYTES_PER_TOKEN * context_length)
        return cls(
            body_bytes=body_bytes,
            held_bytes=MAX_FULL_BODIES * body_bytes,
            messages=max(MIN_MESSAGES, context_length // 4),
        )


T = TypeVar("T")

INLINE_CHARACTERS = 2048  # work on at most this many characters or bytes runs on the event loop: well under 1 ms
THREAD_COUNT = max(1, min(4, (os.cpu_count() or 1) // 4))
_POOL = ThreadPoolExecutor(THREAD_COUNT, thread_name_prefix="offload")


async def run_off_loop(input_length: int, work: Callable[[], T]) -> T:
    """Return the result of `work`, which runs in a thread if `input_length` exceeds `INLINE_CHARACTERS`."""
    if input_length <= INLINE_CHARACTERS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_POOL, work)
