"""Grammars of running requests: which tokens are allowed after each node of a tree.

A grammar is matched on the host. So in a step with a grammar, the host waits for the device: for the tokens of each
draft level, for those of the tree, and for the accepted tokens. All ranks of a group match the same tokens, so they
mask out the same tokens.
Legend: R requests, n rows of each, V token ids, D tokens of a path.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.batch import RowGrammar, StepInput
from cluster.capture.recorder import host_call
from cluster.grammar.asked import GrammarError
from cluster.sampling.token_bitmask import TOKENS_PER_WORD, ApplyTokenBitmask, CTokenBitmask

logger = logging.getLogger(__name__)

Mask = NDArray[np.int32]
T = TypeVar("T")

CPU_BURST_S, CPU_SHARE_PER_STEP_S = 0.1, 0.01
"""The CPU seconds that the grammar of a request may take: `CPU_BURST_S` at once, and `CPU_SHARE_PER_STEP_S` more for
each step. The longest call is not counted, because it may contain a pause of the process or the machine.
"""


class Matcher(Protocol):
    """The position of one request in its grammar. If a method raises an error, only that request fails."""

    def accept(self, tokens: Sequence[int]) -> None:
        """Advance by tokens that were committed."""

    def fill(self, path: Sequence[int], out: NDArray[np.int32]) -> None:
        """Write the token bitmask after `path`, whose tokens are not committed yet, into `out` `[words]`. If the
        grammar does not allow `path`, the mask is arbitrary.
        """

    def forced(self, path: Sequence[int], max_tokens: int) -> list[int]:
        """Return at most `max_tokens` tokens that must follow `path`, because the grammar allows only one text there.
        Return an empty list if it allows several texts.

        A text can be cut into tokens in several ways; these are the tokens that the model most likely chooses.
        """


class MatcherFactory(Protocol):
    """Creates matchers of compiled grammars."""

    def __call__(self, grammar: str) -> Matcher:
        """Return a matcher at the start of the compiled grammar `grammar`. Raises `GrammarError` if it is not one."""

    def preload(self, grammar: str) -> None:
        """Do the slow part of `__call__` in advance. Any thread may call it. It raises what `__call__` raises."""

    def prepare(self) -> None:
        """Do in advance the work that is needed once, before the first grammar. Any thread may call it. Raises
        `ConfigError` if no grammar can be matched over this model's tokens.
        """


class GrammarPosition:
    """The position of a request in its grammar, and the CPU time that its matcher has used. If the matcher raises, it
    is dropped: the grammar has failed.
    """

    def __init__(self, constraint: RowGrammar, create_matcher: MatcherFactory) -> None:
        self._matcher: Matcher | None = None
        self._cpu_s = self._longest_call_s = (
            0.0  # CPU seconds used beyond the shares of past steps, and those of them that the longest call used
        )
        self._matcher = self._call_and_charge(create_matcher, constraint.grammar)
        self.accept(constraint.tokens)
        self._cpu_s = self._longest_call_s = 0.0  # creating the matcher and advancing to here is not charged

    @property
    def is_slow(self) -> bool:
        """Whether the grammar takes so much CPU time that other requests wait too long."""
        return self._cpu_s - self._longest_call_s > CPU_BURST_S

    def accept(self, tokens: Sequence[int]) -> None:
        """Advance by the tokens committed in one step, and deduct `CPU_SHARE_PER_STEP_S` from the CPU time used."""
        if self._matcher is not None:
            self._call_and_charge(self._matcher.accept, tokens)
        self._cpu_s, self._longest_call_s = (
            max(0.0, self._cpu_s - CPU_SHARE_PER_STEP_S),
            max(0.0, self._longest_call_s - CPU_SHARE_PER_STEP_S),
        )

    def fill(self, paths: Sequence[Sequence[int]], out: Mask) -> None:
        """Write the bitmasks after `paths` (padded with -1) into `out` `[n, words]`; zeros if the grammar failed."""
        if self._matcher is not None:
            self._call_and_charge(self._fill, self._matcher, paths, out)
        if self._matcher is None:
            out.fill(0)

    @staticmethod
    def _fill(matcher: Matcher, paths: Sequence[Sequence[int]], out: Mask) -> None:
        for path, mask in zip(paths, out, strict=True):
            matcher.fill([token for token in path if token >= 0], mask)

    def forced_tokens(self, path: Sequence[int], max_tokens: int) -> list[int]:
        """Return the forced tokens, see `Matcher.forced`; none if the grammar failed."""
        return (None if self._matcher is None else self._call_and_charge(self._matcher.forced, path, max_tokens)) or []

    def _call_and_charge(self, function: Callable[..., T], *arguments: Any) -> T | None:
        """Return `function(*arguments)` and charge its CPU time; return None and drop the matcher if it raises."""
        started_s, result = time.thread_time(), None
        try:
            result = function(*arguments)
        except GrammarError as error:
            self._matcher = None
            logger.warning("a request ends because of its grammar: %s", error)
        except Exception:
            self._matcher = None
            logger.exception("a request ends because its grammar cannot be matched")
        elapsed_s = time.thread_time() - started_s
        self._cpu_s, self._longest_call_s = self._cpu_s + elapsed_s, max(self._longest_call_s, elapsed_s)
        return result


class GrammarTable:
    """The positions of running requests in their grammars, by table row.

    If matching a grammar fails, the logits of its request become NaN, so that only this request ends, with an error. If
    a grammar takes too much CPU time, `is_slow` is True for its request, and the first rank of the group that runs the
    request should end it. Only that rank decides, because ranks measure different times.
    """

    def __init__(self, vocab: int, create_matcher: MatcherFactory, apply_bitmask: ApplyTokenBitmask) -> None:
        self._vocab, self._create_matcher, self._apply_bitmask = vocab, create_matcher, apply_bitmask
        self._positions: dict[int, GrammarPosition] = {}

    @property
    def has_fused_bitmask(self) -> bool:
        """Whether the bitmasks are applied in C, in one pass without temporaries. Then it is no use to split the rows
        into blocks.
        """
        return isinstance(self._apply_bitmask, CTokenBitmask)

    def preload(self, grammar: str) -> None:
        """Do in advance the slow part of admitting a request with `grammar`. Any thread may call it.

        Raises:
            GrammarError: `grammar` is not a compiled grammar for this model.
        """
        self._create_matcher.preload(grammar)

    def prepare(self) -> None:
        """Do in advance the work that is needed once, before the first grammar. Any thread may call it.

        Raises:
            ConfigError: no grammar can be matched over this model's tokens.
        """
        self._create_matcher.prepare()

    def is_slow(self, row: int) -> bool:
        """Return whether the grammar of the request in `row` takes so much CPU time that others wait too long."""
        position = self._positions.get(row)
        return position is not None and position.is_slow

    def put(self, step_input: StepInput) -> None:
        """Give each newly admitted request a position at the end of its tokens, if it has a grammar. Drop the positions
        of earlier requests in the same table rows.
        """
        for sampling in step_input.samplings:
            self._positions.pop(sampling.row, None)
        for constraint in step_input.constraints:
            self._positions[constraint.row] = GrammarPosition(constraint, self._create_matcher)

    def commit(self, rows: Tensor, tokens: Tensor, lens: Tensor) -> None:
        """Advance the grammars of `rows` `[B]` by the first `lens` `[B]` of `tokens` `[B, n]`."""
        host_call(self._commit, rows, tokens, lens)

    def _commit(self, rows: Tensor, tokens: Tensor, lens: Tensor) -> None:
        for row, row_tokens, count in zip(rows.tolist(), tokens.tolist(), lens.tolist(), strict=True):
            if row in self._positions:
                self._positions[row].accept(row_tokens[:count])

    def forced_tokens(self, row: int, path: Sequence[int], max_tokens: int) -> list[int]:
        """Return at most `max_tokens` tokens that the grammar of the request in `row` forces after `path`. The list is
        empty if the request has no grammar.
        """
        position = self._positions.get(row)
        return [] if position is None else position.forced_tokens(path, max_tokens)

    def apply(self, logits: Tensor, rows: Tensor, path: Tensor, ids: Tensor | None) -> Tensor:
        """Return logits `[R, n, v]` of the requests in `rows` `[R]` with disallowed tokens masked out, in float32 at
        least. If a request's grammar failed, its logits become NaN. `path` `[R, n, D]` are the uncommitted tokens
        before each row, padded with -1. `ids` is as in `LogitsProcessor.apply`.
        """
        masks = self.masks(rows, path)
        return self._apply_bitmask(logits.flatten(0, 1), masks.flatten(0, 1), ids).view(logits.shape)

    def masks(self, rows: Tensor, path: Tensor) -> Tensor:
        """Return the token bitmasks of the requests in `rows` `[R]` after `path` `[R, n, D]`: int32 `[R, n, words]`.

        A request without a grammar has all bits set; a request whose grammar failed has none.
        """
        masks = host_call(self._masks, rows, path)
        assert masks is not None
        return masks

    def _masks(self, rows: Tensor, paths: Tensor) -> Tensor:
        """Return what `masks` returns, in host memory."""
        masks = np.empty((*paths.shape[:2], -(-self._vocab // TOKENS_PER_WORD)), np.int32)
        for row, row_paths, row_masks in zip(rows.tolist(), paths.tolist(), masks, strict=True):
            position = self._positions.get(row)
            if position is None:
                row_masks.fill(-1)
            else:
                position.fill(row_paths, row_masks)
        return torch.from_numpy(masks)
