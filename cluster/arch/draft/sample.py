"""`draft_sample.json`: a draft's output on some tokens, recorded when the output was known to be right. When the draft
is loaded, its output is compared with the recorded one.

If the loader misreads a draft, the draft still loads and serves; only the acceptance falls, by half or by a few
percent. The draft's output at one position shows such a mistake: it differs from the recorded output by more than
rounding can explain, in any dtype.
"""

import math
from pathlib import Path
from typing import NamedTuple, TypeGuard

from cluster.arch.keys import ConfigKeys, read_json

SAMPLE_FILE = "draft_sample.json"


class Sample(NamedTuple):
    """The `tokens` of a prompt, and the draft's output at the last of them: the `hidden` state `[H]` that the next
    level of a tree would read, the likeliest `token` (a target id) and the log-probability of `token`.
    """

    tokens: tuple[int, ...]
    hidden: tuple[float, ...]
    token: int
    logprob: float


def read_sample(folder: str, vocab_size: int, width: int) -> Sample | None:
    """Return the sample in a draft's folder. Return None if the folder has no `draft_sample.json`.

    Raises:
        ConfigError: the file is malformed, or belongs to another draft.
    """
    if not (Path(folder) / SAMPLE_FILE).is_file():
        return None
    keys = ConfigKeys(read_json(folder, SAMPLE_FILE), folder, SAMPLE_FILE)
    tokens, hidden = keys.integers("tokens"), keys.data.get("hidden")
    token, logprob = keys.data.get("token"), keys.data.get("logprob")
    if not tokens or type(token) is not int or not all(0 <= token_id < vocab_size for token_id in [*tokens, token]):
        raise keys.error(f"tokens and token must be ids below the vocabulary's {vocab_size}")
    if not isinstance(hidden, list) or not all(map(_is_finite, hidden)):
        raise keys.error("hidden must list numbers")
    if len(hidden) != width or not any(hidden):
        raise keys.error(f"hidden must hold the draft's {width} numbers, got {len(hidden)}")
    if not _is_finite(logprob) or logprob > 0:
        raise keys.error(f"logprob must be a number of at most 0, got {logprob!r}")
    return Sample(tuple(tokens), tuple(map(float, hidden)), token, float(logprob))


def _is_finite(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
