"""The request fields whose values are objects: `stream_options`, and `speculation` (how much may be drafted)."""

from pydantic import ConfigDict, Field

from cluster.api.core.fields import StrictModel
from cluster.request import TOKEN_COUNT_LIMIT


class StreamOptions(StrictModel):
    """`stream_options`. `continuous_usage_stats` puts the usage so far into every chunk. `include_obfuscation` asks for
    padding that hides the length of a chunk. It is accepted and has no effect: the number of chunks and their times
    would still show how many tokens each step produced, which reveals more than the length.
    """

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class Speculation(StrictModel):
    """`speculation`: how much of a request's output may be drafted. It changes the speed, never the text.

    With `enabled` false the request gets one token in each step. Otherwise a step accepts at most `max_draft_tokens`
    drafted tokens for the request; null means that only the server's settings limit this number.
    """

    model_config = ConfigDict(extra="forbid")

    enabled: bool = True
    max_draft_tokens: int | None = Field(default=None, ge=0, lt=TOKEN_COUNT_LIMIT)
