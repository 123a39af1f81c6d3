"""One step's work of one rank: as plain values (`Order`), which travel between ranks, and as tensors (`Batch`).

Legend: R decoding requests, c prompt rows, F prompts that finish, B = R + F.
"""

from dataclasses import dataclass
from enum import IntFlag
from typing import NamedTuple

from torch import Tensor


class Mode(IntFlag):
    """What a step does besides taking the best token: `NOISY` some request samples, `FILTERED` one that samples has a
    filter, `LOGPROBS` the target's log-probabilities are asked for.
    """

    NOISY = 1
    FILTERED = 2
    LOGPROBS = 4


class PromptChunk(NamedTuple):
    """Prompt rows `start` to `stop - 1` of the request in table row `row`.

    `tokens` are the tokens of these rows and, unless they end the prompt (`final`), the one after them.
    """

    row: int
    start: int
    stop: int
    final: bool
    tokens: tuple[int, ...]


class Sampling(NamedTuple):
    """How to sample for the request in table row `row`; see `SamplingParams`."""

    row: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


class PageWrite(NamedTuple):
    """Page `page` became entry `entry` of table row `row`; entry -1: the row was cleared."""

    row: int
    entry: int
    page: int


class PageCopy(NamedTuple):
    """Copy the first `tokens` cells of page `source` to page `target`, in every pool."""

    source: int
    target: int
    tokens: int


class Order(NamedTuple):
    """What a rank is to run in one step: `decodes` are (table row, most tokens committed), `chunks` in order of length.

    How many tokens of a row are committed is the device's to know; the host knows a bound. Before the step, `lens`
    (table row, tokens committed), `samplings` and `writes` are applied to the tables, then `copies` to the pools.
    `mode` is what its own requests need; a step runs in the mode of its plan.
    """

    decodes: tuple[tuple[int, int], ...] = ()
    chunks: tuple[PromptChunk, ...] = ()
    lens: tuple[tuple[int, int], ...] = ()
    samplings: tuple[Sampling, ...] = ()
    writes: tuple[PageWrite, ...] = ()
    copies: tuple[PageCopy, ...] = ()
    mode: Mode = Mode(0)


@dataclass(frozen=True, slots=True)
class Group:
    """R requests with q rows each. `rows` are batch rows: a slice when they lie together, else an index `[R * q]`.

    `slots` `[R, L]` are the pool slots read, all of them written, by this request or for its prefix; `bias`
    `[R, q, L]` is 0 where row q may look and -inf where not, in the compute dtype. `back`, when set, picks the real
    rows out of the padded `[R * q]` ones, in batch order.
    """

    requests: int
    q_rows: int
    rows: slice | Tensor
    slots: Tensor
    bias: Tensor
    back: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Reach:
    """What R requests can see and write: slots of their committed tokens, then of the window after them.

    `prefix` is `[R, P]`, padded with a request's first window slot; `bias` `[R, 1, P]` masks the padding; `window` is
    `[R, w]`.
    """

    prefix: Tensor
    bias: Tensor
    window: Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """`write` `[T]` pool slots of the new rows; `groups` cover the batch rows in order."""

    write: Tensor
    groups: tuple[Group, ...]

    @staticmethod
    def of(write: Tensor, *groups: Group) -> "AttentionPlan":
        """The plan of these groups, those without requests left out."""
        return AttentionPlan(write, tuple(group for group in groups if group.requests))


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling parameters of B requests, `[B]` each. `noisy`: some request samples; `filtered`: some has a filter.

    `inverse_temperature` is 1 and `noise_scale` 0 for greedy requests, so that greedy and sampled rows share one path.
    """

    inverse_temperature: Tensor
    noise_scale: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    noisy: bool
    filtered: bool

    def narrow(self, start: int, stop: int) -> "SamplingBatch":
        """The parameters of requests `start` to `stop - 1`."""
        columns = (self.inverse_temperature, self.noise_scale, self.top_k, self.top_p, self.min_p, self.seeds)
        inverse, scale, top_k, top_p, min_p, seeds = (column[start:stop] for column in columns)
        return SamplingBatch(inverse, scale, top_k, top_p, min_p, seeds, self.noisy, self.filtered)


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Prompt chunks that ride in this step.

    `token_ids`, `next_ids`, `positions` are `[c]`; `next_ids` is the token after each row (the EAGLE shift), 0 where
    the target has yet to choose it. `write` `[c]` are pool slots, `groups` their attention groups counted from row 0.
    F chunks finish their prompt: `final_rows` `[F]` are their last rows, `final_lens` `[F]` their token counts.
    """

    token_ids: Tensor
    next_ids: Tensor
    positions: Tensor
    write: Tensor
    groups: tuple[Group, ...]
    final_rows: Tensor
    final_lens: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """What this rank runs in one step.

    `rows` `[B]` index the request tables: the R decoding requests, then the F whose prompt finishes; `sampling` is
    theirs, in that order. `seq_lens` `[R]` count committed tokens, the bonus (at position seq_len) not among them;
    `reach` says where those and the W slots after them lie. `copies` `[2, n]` are slots whose cells come from others,
    `(to, from)`, before anything else. `logprobs` asks for the target's log-probabilities.
    """

    decodes: int
    rows: Tensor
    seq_lens: Tensor
    reach: Reach
    sampling: SamplingBatch
    prompt: PromptRows
    copies: Tensor
    logprobs: bool

    @property
    def decode_rows(self) -> Tensor:
        """Table rows of the decoding requests, `[R]`."""
        return self.rows[: self.decodes]
