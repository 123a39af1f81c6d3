"""The grammars of running requests: which tokens may come after each node of a tree.

A grammar is matched on the host, so a step with such a request waits for its device: for the tokens of each level of
the draft, of the tree, and for those accepted. All ranks of a group match the same tokens and bar the same.
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
from cluster.capture.recorder import hosted
from cluster.grammar.asked import GrammarError
from cluster.sampling.token_bitmask import WORD, Bars, CTokenBitmask

logger = logging.getLogger(__name__)

Mask = NDArray[np.int32]
T = TypeVar("T")

BURST_S, SHARE_S = 0.1, 0.01
"""A request may take so much of the processor for its grammar at once, and so much in each step. The longest call is
not counted, because a pause of the process or of its machine is charged to whoever runs.
"""


class Matcher(Protocol):
    """One request's place in its grammar. A method that raises fails its request alone."""

    def accept(self, tokens: Sequence[int]) -> None:
        """These tokens have come."""
        ...

    def fill(self, path: Sequence[int], out: NDArray[np.int32]) -> None:
        """Write into `out` `[words]`, as bits, which tokens may come after this path; none of it has come yet. After a
        path that the grammar does not have it may be anything.
        """
        ...

    def forced(self, path: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens that most likely follow this path, because the grammar leaves no choice of the text."""
        ...


class Make(Protocol):
    """Gives the matcher of a compiled grammar at its beginning."""

    def __call__(self, grammar: str) -> Matcher:
        """Make the matcher; raises `GrammarError` for a text that is no compiled grammar."""
        ...

    def read(self, grammar: str) -> None:
        """Do beforehand, in any thread, what takes long in the making; raises as the making does."""
        ...

    def prepare(self) -> None:
        """Do beforehand, in any thread, what the first grammar would wait for; raises `ConfigError` where none can be
        matched.
        """
        ...


class GrammarPosition:
    """Where a request in a row of the tables is in its grammar: without a matcher if that has failed."""

    def __init__(self, constraint: RowGrammar, make: Make) -> None:
        self._matcher: Matcher | None = None
        self._spent = self._longest = 0.0  # seconds of the processor beyond its share, and those of one call in them
        self._matcher = self._tried(make, constraint.grammar)
        self.accept(constraint.tokens)
        self._spent = self._longest = 0.0

    @property
    def slow(self) -> bool:
        """Whether the grammar takes more of the processor than others can wait for."""
        return self._spent - self._longest > BURST_S

    def accept(self, tokens: Sequence[int]) -> None:
        """These tokens have come, in a step."""
        if self._matcher is not None:
            self._tried(self._matcher.accept, tokens)
        self._spent, self._longest = max(0.0, self._spent - SHARE_S), max(0.0, self._longest - SHARE_S)

    def fill(self, paths: Sequence[Sequence[int]], out: Mask) -> None:
        """Write the masks after paths, which -1 fills up, into `out` `[n, words]`; empty ones if it has failed."""
        if self._matcher is not None:
            self._tried(self._fill, self._matcher, paths, out)
        if self._matcher is None:
            out.fill(0)

    @staticmethod
    def _fill(matcher: Matcher, paths: Sequence[Sequence[int]], out: Mask) -> None:
        for path, mask in zip(paths, out, strict=True):
            matcher.fill([token for token in path if token >= 0], mask)

    def forced(self, path: Sequence[int], most: int) -> list[int]:
        """As that of the matcher; nothing if it has failed."""
        return (None if self._matcher is None else self._tried(self._matcher.forced, path, most)) or []

    def _tried(self, run: Callable[..., T], *given: Any) -> T | None:
        """`run(*given)`; None if the grammar fails. What it takes is noted."""
        began, found = time.thread_time(), None
        try:
            found = run(*given)
        except GrammarError as error:
            self._matcher = None
            logger.warning("a request ends because of its grammar: %s", error)
        except Exception:
            self._matcher = None
            logger.exception("a request ends because its grammar cannot be matched")
        took = time.thread_time() - began
        self._spent, self._longest = self._spent + took, max(self._longest, took)
        return found


class GrammarTable:
    """The places of running requests in their grammars, by row. A request whose grammar fails gets no finite logits any
    more, and so ends with an error, alone. One whose grammar takes too long is `slow`: it stays in its grammar, and
    ought to be ended by the leader of its group, since the ranks of a group do not measure the same.
    """

    def __init__(self, vocab: int, make: Make, bars: Bars) -> None:
        self._vocab, self._make, self._bars = vocab, make, bars
        self._places: dict[int, GrammarPosition] = {}

    @property
    def frugal(self) -> bool:
        """Whether `apply` takes no memory but for what it returns, so that blocks of rows would only cost a copy."""
        return isinstance(self._bars, CTokenBitmask)

    def read(self, grammar: str) -> None:
        """Do beforehand, in any thread, what takes long when a request with this grammar is admitted.

        Raises:
            GrammarError: it is no compiled grammar for this model.
        """
        self._make.read(grammar)

    def prepare(self) -> None:
        """Do beforehand, in any thread, what the first grammar would wait for.

        Raises:
            ConfigError: no grammar can be matched over this model's tokens.
        """
        self._make.prepare()

    def slow(self, row: int) -> bool:
        """Whether the grammar of the request in `row` takes more of the processor than others can wait for."""
        place = self._places.get(row)
        return place is not None and place.slow

    def put(self, order: StepInput) -> None:
        """Requests are admitted: those with a constraint get their place, rows of others lose theirs."""
        for each in order.samplings:
            self._places.pop(each.row, None)
        for constraint in order.constraints:
            self._places[constraint.row] = GrammarPosition(constraint, self._make)

    def commit(self, rows: Tensor, tokens: Tensor, lens: Tensor) -> None:
        """The first `lens` `[B]` of `tokens` `[B, n]` were generated for `rows` `[B]`."""
        hosted(self._commit, rows, tokens, lens)

    def _commit(self, rows: Tensor, tokens: Tensor, lens: Tensor) -> None:
        for row, run, count in zip(rows.tolist(), tokens.tolist(), lens.tolist(), strict=True):
            if row in self._places:
                self._places[row].accept(run[:count])

    def forced(self, row: int, path: Sequence[int], most: int) -> list[int]:
        """Tokens that the grammar of the request in `row` forces after a path; none if it has no grammar."""
        place = self._places.get(row)
        return [] if place is None else place.forced(path, most)

    def apply(self, logits: Tensor, rows: Tensor, path: Tensor, ids: Tensor | None) -> Tensor:
        """Logits `[R, n, v]` of requests in `rows` `[R]`, after tokens `path` `[R, n, D]` that are not accepted yet (-1
        beyond them), with what may not come barred, in float32 at least; NaN where the grammar has failed. `ids` as in
        `Adjust.apply`.
        """
        masks = self.masks(rows, path)
        return self._bars(logits.flatten(0, 1), masks.flatten(0, 1), ids).view(logits.shape)

    def masks(self, rows: Tensor, path: Tensor) -> Tensor:
        """Which tokens may come in requests in `rows` `[R]` after `path` `[R, n, D]`, int32 `[R, n, words]` with a bit
        for each token: all in a request without a grammar, none where the grammar has failed.
        """
        masks = hosted(self._masks, rows, path)
        assert masks is not None
        return masks

    def _masks(self, rows: Tensor, path: Tensor) -> Tensor:
        """The masks after paths, `[R, n, words]`; everything may come in a request without a grammar."""
        masks = np.empty((*path.shape[:2], -(-self._vocab // WORD)), np.int32)
        for row, paths, own in zip(rows.tolist(), path.tolist(), masks, strict=True):
            place = self._places.get(row)
            if place is None:
                own.fill(-1)
            else:
                place.fill(paths, own)
        return torch.from_numpy(masks)
