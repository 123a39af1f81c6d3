"""Everything that changes logits before a token is drawn, of some requests of a step.

Legend: R requests, n rows of each, V token ids, D tokens of a path.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cluster.batch import SamplingMode, StepInput
from cluster.device.staging import Staging
from cluster.sampling.grammars import GrammarTable
from cluster.sampling.penalties import PenaltyTable
from cluster.sampling.row_blocks import blocks

AT_ONCE = 4  # numbers that adjusting needs on the way, for each logit


@dataclass(frozen=True, slots=True)
class LogitsTables:
    """What running requests change, by row: on the device their adjustments, on the host their grammars."""

    adjustments: PenaltyTable
    grammars: GrammarTable

    def stage(self, order: StepInput, staging: Staging) -> None:
        """Put what admitted requests change on its way; `put` writes it where it arrives."""
        self.adjustments.stage(order, staging)

    def put(self, order: StepInput, sent: Mapping[str, Tensor]) -> None:
        """Write what `stage` sent."""
        self.adjustments.put(order, sent)
        self.grammars.put(order)

    def of(self, rows: Tensor, mode: SamplingMode) -> "LogitsProcessor | None":
        """What requests in `rows` `[R]` change in a step of this mode; None if nobody changes anything."""
        adjustments = self.adjustments if SamplingMode.ADJUSTED in mode else None
        grammars = self.grammars if SamplingMode.CONSTRAINED in mode else None
        return LogitsProcessor(rows, adjustments, grammars, SamplingMode.WORDS in mode) if mode.adjusts else None


@dataclass(frozen=True, slots=True)
class LogitsProcessor:
    """What R requests in `rows` change: what the tables say that some request of the step needs, with bad words if some
    request has `words`. `path` `[R, n, D]` are the tokens of each row's path after those that the tables have counted,
    -1 beyond them; None where there are none.
    """

    rows: Tensor
    adjustments: PenaltyTable | None
    grammars: GrammarTable | None
    words: bool = False
    path: Tensor | None = None

    def after(self, path: Tensor) -> "LogitsProcessor":
        """The same for rows after these paths."""
        return replace(self, path=path)

    def narrow(self, requests: slice) -> "LogitsProcessor":
        """That of some requests."""
        return replace(self, rows=self.rows[requests], path=None if self.path is None else self.path[requests])

    def commit(self, tokens: Tensor, lens: Tensor) -> None:
        """The first `lens` `[R]` of `tokens` `[R, n]` were generated for these requests."""
        if self.adjustments is not None:
            self.adjustments.commit(self.rows, tokens, lens, self.words)
        if self.grammars is not None:
            self.grammars.commit(self.rows, tokens, lens)

    @property
    def masks_alone(self) -> bool:
        """Whether grammars alone change logits, and the chooser applies their masks without a copy of the logits."""
        return self.adjustments is None and self.grammars is not None and self.grammars.frugal

    def masks(self, each: int) -> Tensor:
        """Which tokens grammars allow after `each` rows of every request, as bits, `[R * each, words]`."""
        assert self.grammars is not None, "no request of the step has a grammar"
        return self.grammars.masks(self.rows, self._paths(each)).flatten(0, 1)

    def apply(self, logits: Tensor, ids: Tensor | None = None) -> Tensor:
        """Logits `[R, n, V]` -> the adjusted ones, in float32 at least. Where the columns are not all tokens in their
        order, `ids` `[V]` are theirs.
        """
        r, n, width = logits.shape
        path = self._paths(n)
        if self.adjustments is None and self.grammars is not None and self.grammars.frugal:
            return self._block(logits, self.rows, path, ids)
        parts = [
            self._block(logits[block], self.rows[block], path[block], ids)
            for block in blocks(r, AT_ONCE * n * width, logits.device)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _paths(self, each: int) -> Tensor:
        count = self.rows.shape[0]
        return self.rows.new_full((count, each, 0), -1) if self.path is None else self.path.expand(count, each, -1)

    def _block(self, logits: Tensor, rows: Tensor, path: Tensor, ids: Tensor | None) -> Tensor:
        if self.adjustments is not None:
            logits = self.adjustments.apply(logits, rows, path, ids, self.words)
        return logits if self.grammars is None else self.grammars.apply(logits, rows, path, ids)
