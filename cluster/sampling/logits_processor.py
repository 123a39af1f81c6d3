"""Logit adjustments and grammars of some requests of a step: all that changes logits before a token is sampled.

Legend: R requests, n rows of each, V token ids, D tokens of a path.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from cluster.batch import SamplingMode, StepInput
from cluster.device.staging import Staging
from cluster.sampling.grammars import GrammarTable
from cluster.sampling.penalties import PenaltyTable
from cluster.sampling.row_blocks import blocks, concat

TEMPORARIES_PER_LOGIT = 4  # temporary numbers per logit while logits are adjusted


@dataclass(frozen=True, slots=True)
class LogitsTables:
    """The tables of all running requests: logit adjustments (on the device) and grammars (on the host), by row."""

    adjustments: PenaltyTable
    grammars: GrammarTable

    def stage(self, step_input: StepInput, staging: Staging) -> None:
        """Add the adjustments of admitted requests to the next copy to the device; `put` writes them to the table."""
        self.adjustments.stage(step_input, staging)

    def put(self, step_input: StepInput, staged: Mapping[str, Tensor]) -> None:
        """Write to the tables what `stage` sent to the device, and the grammars of admitted requests."""
        self.adjustments.put(step_input, staged)
        self.grammars.put(step_input)

    def processor_of(self, rows: Tensor, mode: SamplingMode) -> "LogitsProcessor | None":
        """Return the processor of the requests in `rows` `[R]`, in a step of this mode; None if no logits change."""
        adjustments = self.adjustments if SamplingMode.ADJUSTED in mode else None
        grammars = self.grammars if SamplingMode.CONSTRAINED in mode else None
        return (
            LogitsProcessor(rows, adjustments, grammars, SamplingMode.BAD_WORDS in mode)
            if mode.changes_logits
            else None
        )


@dataclass(frozen=True, slots=True)
class LogitsProcessor:
    """Adjusts the logits of the R requests in table rows `rows`.

    `adjustments` and `grammars` are None if no request of the step needs that table. `has_bad_words` says that some
    request has bad words. The tables know the committed tokens. `path` `[R, n, D]` has the drafted tokens that follow
    them before each row of logits, padded with -1. If `path` is None, there are none.
    """

    rows: Tensor
    adjustments: PenaltyTable | None
    grammars: GrammarTable | None
    has_bad_words: bool = False
    path: Tensor | None = None

    def after(self, path: Tensor) -> "LogitsProcessor":
        """Return the processor for rows of logits after the tokens `path` `[R, n, D]`."""
        return replace(self, path=path)

    def narrow(self, requests: slice) -> "LogitsProcessor":
        """Return the processor of some of the requests."""
        return replace(self, rows=self.rows[requests], path=None if self.path is None else self.path[requests])

    def pick(self, requests: Tensor) -> "LogitsProcessor":
        """Return the processor of M rows, without `path`. Row i belongs to request `requests[i]` of this processor."""
        return replace(self, rows=self.rows.index_select(0, requests), path=None)

    def commit(self, tokens: Tensor, lens: Tensor) -> None:
        """Tell the tables that the first `lens` `[R]` of `tokens` `[R, n]` were generated for these requests."""
        if self.adjustments is not None:
            self.adjustments.commit(self.rows, tokens, lens, self.has_bad_words)
        if self.grammars is not None:
            self.grammars.commit(self.rows, tokens, lens)

    @property
    def only_bitmasks(self) -> bool:
        """Whether only grammars change logits, and a sampler can apply their bitmasks without copying the logits."""
        return self.adjustments is None and self.grammars is not None and self.grammars.has_fused_bitmask

    def masks(self, rows_per_request: int) -> Tensor:
        """Return the grammars' token bitmasks for the `rows_per_request` rows of each request, one row after the other:
        `[R * rows_per_request, words]`.
        """
        assert self.grammars is not None, "no request of the step has a grammar"
        return self.grammars.masks(self.rows, self._paths(rows_per_request)).flatten(0, 1)

    def apply(self, logits: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return adjusted logits `[R, n, V]`, in float32 at least. `ids` `[V]` are the token ids of the columns. If
        `ids` is None, column i is token id i.
        """
        r, n, vocab = logits.shape
        path = self._paths(n)
        if self.adjustments is None and self.grammars is not None and self.grammars.has_fused_bitmask:
            return self._apply_block(logits, self.rows, path, ids)
        request_blocks = blocks(r, TEMPORARIES_PER_LOGIT * n * vocab, logits.device)
        return concat(
            [self._apply_block(logits[block], self.rows[block], path[block], ids) for block in request_blocks]
        )

    def _paths(self, rows_per_request: int) -> Tensor:
        request_count = self.rows.shape[0]
        return (
            self.rows.new_full((request_count, rows_per_request, 0), -1)
            if self.path is None
            else self.path.expand(request_count, rows_per_request, -1)
        )

    def _apply_block(self, logits: Tensor, rows: Tensor, path: Tensor, ids: Tensor | None) -> Tensor:
        if self.adjustments is not None:
            logits = self.adjustments.apply(logits, rows, path, ids, self.has_bad_words)
        return logits if self.grammars is None else self.grammars.apply(logits, rows, path, ids)
