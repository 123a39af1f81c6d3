"""One step's work of one rank: as plain values (`StepInput`), which travel between ranks, and as tensors (`Batch`).

Legend: R decoding requests, c prompt rows, F prompts that finish, B = R + F.
"""

from dataclasses import dataclass
from enum import IntFlag
from typing import NamedTuple

import torch
from torch import Tensor


class SamplingMode(IntFlag):
    """What a step does besides taking the best token: `NOISY` some request samples, `FILTERED` one that samples has a
    filter, `LOGPROBS` the target's log-probabilities are asked for, `ADJUSTED` some request has penalties or bans,
    `CONSTRAINED` one has a grammar, `PROMPT_LOGPROBS` a prompt's log-probabilities are asked for, `TREES` one is
    shown its trees, `WORDS` one that is adjusted has bad words.
    """

    NOISY = 1
    FILTERED = 2
    LOGPROBS = 4
    ADJUSTED = 8
    CONSTRAINED = 16
    PROMPT_LOGPROBS = 32
    TREES = 64
    WORDS = 128

    @property
    def adjusts(self) -> bool:
        """Whether logits change before tokens are drawn."""
        return bool(self & (SamplingMode.ADJUSTED | SamplingMode.CONSTRAINED))

    @property
    def repeatable(self) -> bool:
        """Whether its steps may be captured: not with bad words, since their table grows, nor where rows of prompts are
        scored, as their number is no part of a program's key, nor where trees are shown, which few ask for.
        """
        return not self & (SamplingMode.WORDS | SamplingMode.PROMPT_LOGPROBS | SamplingMode.TREES)


class DecodeRequest(NamedTuple):
    """The request in table row `row` decodes; `most` tokens of it are committed at most, `least` for certain."""

    row: int
    most: int
    least: int = 0


class PromptChunk(NamedTuple):
    """Prompt rows `start` to `stop - 1` of the request in table row `row`.

    `tokens` are the tokens of these rows and, unless they end the prompt (`final`), the one after them. Of the first
    `scored` rows the log-probability of the token after them is asked for.
    """

    row: int
    start: int
    stop: int
    final: bool
    tokens: tuple[int, ...]
    scored: int = 0


class RowSampling(NamedTuple):
    """How to sample for the request in table row `row`; see `SamplingParams`."""

    row: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


class RowPenalties(NamedTuple):
    """How the logits of the request in table row `row` are adjusted; see `Adjustments`.

    It has `tokens` so far, of which the first `prompt_len` are its prompt, and needs `missing` more before one of the
    tokens `late` may come.
    """

    row: int
    presence: float
    frequency: float
    repetition: float
    missing: int
    prompt_len: int
    tokens: tuple[int, ...]
    late: tuple[int, ...]
    bias: tuple[tuple[int, float], ...]
    allowed: tuple[int, ...] | None
    bad_words: tuple[tuple[int, ...], ...]


class RowGrammar(NamedTuple):
    """The request in table row `row` follows a compiled `grammar`; `tokens` were generated so far."""

    row: int
    grammar: str
    tokens: tuple[int, ...]


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


class StepInput(NamedTuple):
    """What a rank is to run in one step: requests that decode, and prompt `chunks` in order of length.

    How many tokens of a row are committed is the device's to know; the host knows bounds. Before the step, `lens`
    (table row, tokens committed), `samplings`, `adjustings`, `constraints` (a row in `samplings` alone has none)
    and `writes` are applied to the tables, then `copies` to the pools.
    `mode` is what its own requests need; a step runs in the mode of its plan. Padding to a plan adds `idle_finals`
    ends of prompts, all at the first prompt row, which then is idle, and has room for `chunk_places` chunks.
    """

    decodes: tuple[DecodeRequest, ...] = ()
    chunks: tuple[PromptChunk, ...] = ()
    lens: tuple[tuple[int, int], ...] = ()
    samplings: tuple[RowSampling, ...] = ()
    adjustings: tuple[RowPenalties, ...] = ()
    constraints: tuple[RowGrammar, ...] = ()
    writes: tuple[PageWrite, ...] = ()
    copies: tuple[PageCopy, ...] = ()
    mode: SamplingMode = SamplingMode(0)
    idle_finals: int = 0
    chunk_places: int = 0


class HostBounds(NamedTuple):
    """What the host knows of a step before it runs: no request has more than `longest` tokens committed, and prompt
    chunks, in order of length, have rows `(start, stop - 1)`; windows have `forced` more slots than others. Decoding
    request i has `least[i]` tokens committed or more; empty: nothing is known. Of steps that may be under way at the
    same time each has another `turn`.
    """

    longest: int = 0
    chunks: tuple[tuple[int, int], ...] = ()
    forced: int = 0
    least: tuple[int, ...] = ()
    turn: int = 0


@dataclass(frozen=True, slots=True)
class TreeRows:
    """q rows of each of R requests, request by request, in a draft level, verify or extend.

    The requests are in table rows `rows` `[R]` and have `lens` `[R]` tokens committed, all of which their rows see. Of
    the first `width` window slots they see what `bits` `[R or 1, q, ceil(width / 32)]` int32 say: a row's ancestors and
    itself, one slot for each position, so that its own is `lens` + the number of its bits - 1.
    """

    rows: Tensor
    lens: Tensor
    bits: Tensor
    width: int


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Chunks of n prompts in order of length: rows `indptr[i]` to `indptr[i + 1] - 1` (`[n + 1]`) are those of the
    request in table row `rows[i]`, at positions `starts[i]` onwards. They see what is before them, and themselves.
    """

    rows: Tensor
    starts: Tensor
    indptr: Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """What attention is told of a forward: first the tree's rows, then the text's; `write` `[T]` are pool slots of the
    new cells.

    Rows at position `first` and above see no cell below it; what other rows give is not used, but finite.
    """

    write: Tensor
    tree: TreeRows | None
    text: PromptRows | None = None
    first: int = 0


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
        if stop - start == self.seeds.shape[0]:
            return self
        columns = (self.inverse_temperature, self.noise_scale, self.top_k, self.top_p, self.min_p, self.seeds)
        inverse, scale, top_k, top_p, min_p, seeds = (column[start:stop] for column in columns)
        return SamplingBatch(inverse, scale, top_k, top_p, min_p, seeds, self.noisy, self.filtered)


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Prompt chunks that ride in this step.

    Each row's request is in table row `rows` `[c]`; `token_ids`, `next_ids`, `positions` are `[c]` too. `next_ids` is
    the token after each row (the EAGLE shift), 0 where the target has yet to choose it. `write` `[c]` are pool slots;
    `text` is what attention is told of the chunks, if there are any. F chunks finish their prompt: `final_rows` `[F]`
    are their last rows, `final_lens` `[F]` their token counts.
    """

    rows: Tensor
    token_ids: Tensor
    next_ids: Tensor
    positions: Tensor
    write: Tensor
    text: PromptRows | None
    final_rows: Tensor
    final_lens: Tensor


def with_prompts(trees: Tensor, prompts: Tensor) -> Tensor:
    """What belongs to rows of trees `[a, ...]`, then what belongs to rows of prompts `[b, ...]`; no copy if b is 0."""
    return torch.cat([trees, prompts]) if prompts.shape[0] else trees


@dataclass(frozen=True, slots=True)
class Batch:
    """What this rank runs in one step.

    `rows` `[B]` index the request tables: the R decoding requests, `decode_rows` `[R]`, then the F whose prompt
    finishes; `sampling` is theirs, in that order. `seq_lens` `[R]` count committed tokens, the bonus (at position
    seq_len) not among them; `window` `[R, W]` are the pool slots after them. `mode` is what the step does. `scored`
    `[q]` are the prompt rows of which the log-probability of the next token is asked for; None in a mode without.
    """

    rows: Tensor
    decode_rows: Tensor
    seq_lens: Tensor
    window: Tensor
    sampling: SamplingBatch
    prompt: PromptBatch
    mode: SamplingMode
    scored: Tensor | None = None

    @property
    def decodes(self) -> int:
        """R."""
        return self.decode_rows.shape[0]

    def tree(self, bits: Tensor, width: int) -> TreeRows:
        """What attention is told of the decoding requests; `bits` and `width` as in `TreeRows`."""
        return TreeRows(self.decode_rows, self.seq_lens, bits, width)
