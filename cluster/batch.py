"""The work of one rank in one step: as plain values that travel between ranks (`StepInput`), and as tensors (`Batch`).

A row is one token in the forward of a model; prompt rows are the tokens of prompts. A table row is the entry of one
request in the tables on the device. A token is committed once its KV is in the pools.

Legend: R decoding requests, c prompt rows, F prompts that finish in the step, B = R + F.
"""

from dataclasses import dataclass, replace
from enum import IntEnum, IntFlag
from typing import NamedTuple

import torch
from torch import Tensor


class SamplingMode(IntFlag):
    """What a step does beyond greedy decoding. A flag is set if at least one request of the step needs it."""

    RANDOM = 1  # a request samples (temperature above 0)
    FILTERED = 2  # a request that samples has top_k, top_p or min_p
    LOGPROBS = 4  # a request gets the log-probabilities of its output
    ADJUSTED = 8  # a request has logit adjustments: penalties, biases, bans, min_tokens
    CONSTRAINED = 16  # a request has a grammar
    PROMPT_LOGPROBS = 32  # a request gets the log-probabilities of its prompt
    TREES = 64  # a request gets the trees that were verified (`return_tree`)
    BAD_WORDS = 128  # a request with logit adjustments has bad words
    LIMITED = 256  # a request limits its drafted tokens (`max_draft_tokens`)

    @property
    def changes_logits(self) -> bool:
        """Whether logits are changed before tokens are drawn."""
        return bool(self & (SamplingMode.ADJUSTED | SamplingMode.CONSTRAINED))

    @property
    def capturable(self) -> bool:
        """Whether a step of this mode may be captured as a program, for replay in later steps. Three flags prevent it:
        `BAD_WORDS`, because the table of bad words changes its size; `PROMPT_LOGPROBS`, because the key of a program
        does not hold the number of scored rows; `TREES`, because it is rare.
        """
        return not self & (SamplingMode.BAD_WORDS | SamplingMode.PROMPT_LOGPROBS | SamplingMode.TREES)


class ExtendMode(IntEnum):
    """Which rows the draft reads in the extend phase.

    `ACCEPTED`: the accepted tokens of decoding requests, and prompt rows. The other modes are for steps without trees,
    with a draft that rests: it does not read the tokens of decoding requests, and catches up later
    (`spec/resting.py`). `PROMPTS`: prompt rows only. `NOTHING`: no rows, because no rank has prompt rows. `MISSED`: the
    draft wakes, and reads the last tokens that it has missed (at most `MISSED_TOKENS` of each request), and prompt
    rows.
    """

    ACCEPTED = 0
    PROMPTS = 1
    NOTHING = 2
    MISSED = 3

    @property
    def rests(self) -> bool:
        """Whether the draft does not read the tokens of decoding requests."""
        return self in (ExtendMode.PROMPTS, ExtendMode.NOTHING)


class DecodeRequest(NamedTuple):
    """A request that decodes, in table row `row`. It has between `min_seq_len` and `max_seq_len` tokens committed."""

    row: int
    max_seq_len: int
    min_seq_len: int = 0


class PromptChunk(NamedTuple):
    """Prompt rows `start` to `stop - 1` of the request in table row `row`; `final` if they end the prompt.

    `tokens` are the tokens of these rows. If not `final`, they also include the next prompt token, because the draft
    reads, at each row, the token after it (the EAGLE shift). Each of the first `scored` rows returns the
    log-probability of the token after it.
    """

    row: int
    start: int
    stop: int
    final: bool
    tokens: tuple[int, ...]
    scored: int = 0


UNLIMITED_DRAFT = 1 << 30
"""`max_draft_tokens` of a request without a limit."""


class RowSampling(NamedTuple):
    """The sampling parameters of the request in table row `row`; see `RequestParams`."""

    row: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    max_draft_tokens: int = UNLIMITED_DRAFT


class RowPenalties(NamedTuple):
    """The logit adjustments of the request in table row `row`; see `LogitAdjustments`.

    `tokens` are the request's tokens so far; the first `prompt_len` of them are the prompt. `stop_tokens` are EOS and
    stop tokens: they are banned until `min_tokens_left` more tokens have been generated (`min_tokens`).
    """

    row: int
    presence: float
    frequency: float
    repetition: float
    min_tokens_left: int
    prompt_len: int
    tokens: tuple[int, ...]
    stop_tokens: tuple[int, ...]
    bias: tuple[tuple[int, float], ...]
    allowed: tuple[int, ...] | None
    bad_words: tuple[tuple[int, ...], ...]


class RowTokens(NamedTuple):
    """The tokens so far, prompt and output, of the request in table row `row`. Steps search them for an earlier
    occurrence of the end of the text, and look up what followed it.
    """

    row: int
    tokens: tuple[int, ...]


class RowGrammar(NamedTuple):
    """The compiled `grammar` of the request in table row `row`; `tokens` are the tokens generated so far."""

    row: int
    grammar: str
    tokens: tuple[int, ...]


class PageWrite(NamedTuple):
    """A change of the page table: entry `entry` of row `row` is now page `page`. Entry -1 clears the row."""

    row: int
    entry: int
    page: int


class WindowPageWrite(NamedTuple):
    """A change of the `WindowMap`: the window pools keep the tokens of page `page` in their page `window_page` from now
    on; 0: they keep none of them.
    """

    page: int
    window_page: int


class PageCopy(NamedTuple):
    """A copy of the first `tokens` slots of page `source` to page `target`, in all memory that is indexed by slot. In
    window pools, it is a copy from their page `window_source` to `window_target`; without window pools these are 0.
    """

    source: int
    target: int
    tokens: int
    window_source: int = 0
    window_target: int = 0


class StepInput(NamedTuple):
    """The work of one rank in one step: the requests that decode (`decodes`), and prompt `chunks` in order of length.

    Only the device knows how many tokens of a decoding request are committed; the host knows bounds. Before the
    step `writes`, `window_writes`, `samplings`, `penalties`, `constraints`, `histories` and `lens` (pairs of table
    row, committed tokens) are written to the tables; then `copies` are made in the pools. A request in `samplings`
    is newly admitted. If it is not in `penalties`, it has no logit adjustments; if it is not in `constraints`, it
    has no grammar. `mode` is the mode that this rank's requests need; the step runs in the mode that the requests
    of all ranks need together. Rows and entries are called idle if they are padding. In a captured step, the lists
    of finishing prompts get `idle_finishing_prompts` idle entries, and the lists of chunks are padded to
    `padded_chunks` entries. If there are idle entries of finishing prompts, the first prompt row is idle, and they
    point at it.
    """

    decodes: tuple[DecodeRequest, ...] = ()
    chunks: tuple[PromptChunk, ...] = ()
    lens: tuple[tuple[int, int], ...] = ()
    samplings: tuple[RowSampling, ...] = ()
    penalties: tuple[RowPenalties, ...] = ()
    constraints: tuple[RowGrammar, ...] = ()
    histories: tuple[RowTokens, ...] = ()
    writes: tuple[PageWrite, ...] = ()
    window_writes: tuple[WindowPageWrite, ...] = ()
    copies: tuple[PageCopy, ...] = ()
    mode: SamplingMode = SamplingMode(0)
    idle_finishing_prompts: int = 0
    padded_chunks: int = 0


class HostBounds(NamedTuple):
    """What the host knows about a step before the step runs, for `prepare` of attention backends.

    No decoding request has more than `max_seq_len` tokens committed; request i has at least `min_seq_lens[i]`, which is
    unknown if `min_seq_lens` is empty. `chunks` are `(start, stop)` of the prompt chunks, in order of length. The
    window of a request (its slots for the nodes of its tree) has `forced_nodes` more slots than without grammars, for
    tokens that a grammar forces. `buffer_set` is the number of the host buffers to use. A backend with two sets
    (FlashInfer) alternates between them, because the step before may still read its own set.
    """

    max_seq_len: int = 0
    chunks: tuple[tuple[int, int], ...] = ()
    forced_nodes: int = 0
    min_seq_lens: tuple[int, ...] = ()
    buffer_set: int = 0


@dataclass(frozen=True, slots=True)
class TreeRows:
    """The tree rows of one forward (a draft level, verify or extend): q rows for each of R requests, request after
    request.

    `rows` `[R]` are the table rows of the requests, `lens` `[R]` the numbers of their committed tokens. Every row sees
    all committed tokens of its request. `bits` `[R or 1, q, ceil(width / 32)]` int32 is the mask over the first `width`
    slots of the request's window: a row sees its ancestors in the tree and itself. Each of them is one level deeper
    than the one before, so the position of a row is its request's `lens` + popcount(bits) - 1.
    """

    rows: Tensor
    lens: Tensor
    bits: Tensor
    width: int


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Chunks of n prompts, in order of length. Chunk i has the rows `indptr[i]` to `indptr[i + 1] - 1` (`indptr`:
    `[n + 1]`). Its request is in table row `rows[i]`, its first position is `starts[i]`. Its mask is causal.
    """

    rows: Tensor
    starts: Tensor
    indptr: Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The input of attention besides q, k and v. The T rows of a forward are the rows of `tree`, then those of `text`.

    `write` `[T]` are the pool slots for the new K and V. `first` is above 0 for all runners of a multi-layer draft but
    the first one: rows at positions from `first` on do not see tokens at positions below `first`. The output of rows
    below `first` is finite, and nobody uses it.
    """

    write: Tensor
    tree: TreeRows | None
    text: PromptRows | None = None
    first: int = 0


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling parameters of B requests, `[B]` each. `any_random` says that a request samples, `any_filtered` that a
    request which samples has filters.

    Greedy requests have `inverse_temperature` 1 and `noise_scale` 0, so greedy and sampled rows share one code path.
    `draft_limits` are the most drafted tokens that a step may accept for each request: 0 for idle requests (padding).
    The field is None in a batch that verifies no trees, such as those that `pick` returns.
    """

    inverse_temperature: Tensor
    noise_scale: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    any_random: bool
    any_filtered: bool
    draft_limits: Tensor | None = None

    def narrow(self, start: int, stop: int) -> "SamplingBatch":
        """The parameters of requests `start` to `stop - 1`."""
        if stop - start == self.seeds.shape[0]:
            return self
        columns = (self.inverse_temperature, self.noise_scale, self.top_k, self.top_p, self.min_p, self.seeds)
        inverse, scale, top_k, top_p, min_p, seeds = (column[start:stop] for column in columns)
        limits = None if self.draft_limits is None else self.draft_limits[start:stop]
        return SamplingBatch(inverse, scale, top_k, top_p, min_p, seeds, self.any_random, self.any_filtered, limits)

    def pick(self, requests: Tensor) -> "SamplingBatch":
        """The parameters of requests number `requests` `[M]`, which may repeat; without `draft_limits`."""
        columns = (self.inverse_temperature, self.noise_scale, self.top_k, self.top_p, self.min_p, self.seeds)
        inverse, scale, top_k, top_p, min_p, seeds = (column.index_select(0, requests) for column in columns)
        return SamplingBatch(inverse, scale, top_k, top_p, min_p, seeds, self.any_random, self.any_filtered)


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """The prompt chunks of a step, as c rows.

    `rows` `[c]` are the table rows of their requests; `token_ids`, `next_ids`, `positions` are `[c]` too. `next_ids`
    holds the token after each row (the EAGLE shift), or 0 if the target has not chosen that token yet. `write` `[c]`
    are the pool slots for K and V; `text` describes the chunks for attention, and is None if there are no chunks. For
    the F chunks that finish a prompt, `final_rows` `[F]` are their last prompt rows, and `final_lens` `[F]` the token
    counts of the prompts.
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
    """Concatenate values of tree rows `[a, ...]` and of prompt rows `[b, ...]`. Return `trees` itself if b is 0."""
    return torch.cat([trees, prompts]) if prompts.shape[0] else trees


@dataclass(frozen=True, slots=True)
class Batch:
    """The work of one rank in one step, as tensors.

    `rows` `[B]` index the request tables: first the R decoding requests (`decode_rows` `[R]`), then the F requests
    whose prompt finishes. `sampling` has the same order. `seq_lens` `[R]` count committed tokens. They exclude the
    bonus token (the last token chosen), which is at position seq_len. `window` `[R, W]` are the pool slots from that
    position on, for the nodes of the tree. `scored` `[q]` are the prompt rows whose next token gets a log-probability;
    it is None if `mode` lacks `PROMPT_LOGPROBS`. `extend_mode` says which rows the draft reads.
    """

    rows: Tensor
    decode_rows: Tensor
    seq_lens: Tensor
    window: Tensor
    sampling: SamplingBatch
    prompt: PromptBatch
    mode: SamplingMode
    scored: Tensor | None = None
    extend_mode: ExtendMode = ExtendMode.ACCEPTED

    @property
    def decodes(self) -> int:
        """R, the number of decoding requests."""
        return self.decode_rows.shape[0]

    def without_decodes(self) -> "Batch":
        """Return the same prompts without the decoding requests."""
        r = self.decodes
        return replace(
            self,
            rows=self.rows[r:],
            decode_rows=self.decode_rows[:0],
            seq_lens=self.seq_lens[:0],
            window=self.window[:0],
            sampling=self.sampling.narrow(r, self.rows.shape[0]),
        )

    def tree(self, bits: Tensor, width: int) -> TreeRows:
        """Return the `TreeRows` of the decoding requests; `bits` and `width` are their mask, as in `TreeRows`."""
        return TreeRows(self.decode_rows, self.seq_lens, bits, width)
