"""The grammars of running requests: which tokens may come after each node of a tree.

A grammar is matched on the host, so a step with such a request waits for its device: for the tokens of each level of
the draft, of the tree, and for those accepted. All ranks of a group match the same tokens and bar the same.
Legend: R requests, n rows of each, V token ids, D tokens of a path.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.batch import Order
from cluster.forward.adjustments import BANNED
from cluster.forward.noise import at_least_float32
from cluster.grammar.asked import GrammarError

logger = logging.getLogger(__name__)

BARRED = 2 * BANNED
"""Added to the logit of a token that the grammar does not have; below what is banned, so that a grammar prevails."""
WORD = 32  # tokens in a word of a mask
BURST_S, SHARE_S = 0.1, 0.01
"""A request may take so much of the processor for its grammar at once, and so much in each step."""


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


class GrammarTable:
    """The matchers of running requests, by row. A request whose grammar fails gets no finite logits any more, and so
    ends with an error, alone. One whose grammar takes too long is `slow`: it stays in its grammar, and ought to be
    ended by the leader of its group, since the ranks of a group do not measure the same.
    """

    def __init__(self, vocab: int, make: Make) -> None:
        self._vocab, self._make = vocab, make
        self._matchers: dict[int, Matcher | None] = {}  # None: it has failed
        self._spent: dict[int, float] = {}  # seconds of the processor beyond its share, by row

    def read(self, grammar: str) -> None:
        """Do beforehand, in any thread, what takes long when a request with this grammar is admitted.

        Raises:
            GrammarError: it is no compiled grammar for this model.
        """
        self._make.read(grammar)

    def slow(self, row: int) -> bool:
        """Whether the grammar of the request in `row` takes more of the processor than others can wait for."""
        return self._spent.get(row, 0.0) > BURST_S

    def put(self, order: Order) -> None:
        """Requests are admitted: those with a constraint get their matcher, rows of others lose theirs."""
        for each in order.samplings:
            self._matchers.pop(each.row, None)
            self._spent.pop(each.row, None)
        for constraint in order.constraints:
            self._matchers[constraint.row] = None
            with self._failing(constraint.row):
                self._matchers[constraint.row] = self._make(constraint.grammar)
            self._accept(constraint.row, constraint.tokens)
            self._spent[constraint.row] = 0.0

    def commit(self, rows: Tensor, tokens: Tensor, lens: Tensor) -> None:
        """The first `lens` `[B]` of `tokens` `[B, n]` were generated for `rows` `[B]`."""
        for row, run, count in zip(rows.tolist(), tokens.tolist(), lens.tolist(), strict=True):
            self._accept(row, run[:count])
            if row in self._spent:
                self._spent[row] = max(0.0, self._spent[row] - SHARE_S)

    def forced(self, row: int, path: Sequence[int], most: int) -> list[int]:
        """Tokens that the grammar of the request in `row` forces after a path; none if it has no grammar."""
        matcher = self._matchers.get(row)
        run: list[int] = []
        if matcher is not None:
            with self._failing(row):
                run = matcher.forced(path, most)
        return run

    def apply(self, logits: Tensor, rows: Tensor, path: Tensor, ids: Tensor | None) -> Tensor:
        """Logits `[R, n, V]` of requests in `rows` `[R]`, after tokens `path` `[R, n, D]` that are not accepted yet (-1
        beyond them), with what may not come barred, in float32 at least. `ids` as in `Adjust.apply`.
        """
        wide = logits.to(at_least_float32(logits.dtype))
        which = [(i, row) for i, row in enumerate(rows.tolist()) if row in self._matchers]
        if not which:
            return wide
        lines = path.tolist()
        filled = np.zeros((len(which), path.shape[1], -(-self._vocab // WORD)), np.int32)
        for (i, row), own in zip(which, filled, strict=True):
            matcher = self._matchers[row]
            with self._failing(row):
                for line, out in zip(lines[i], own, strict=True):
                    if matcher is not None:
                        matcher.fill([token for token in line if token >= 0], out)
        masks = torch.from_numpy(filled).to(logits.device)
        places = torch.arange(WORD, dtype=torch.int32, device=logits.device)
        barred = (masks[..., None] >> places).bitwise_and_(1).flatten(2)[..., : self._vocab] == 0
        if ids is not None:
            barred = barred.index_select(2, ids)
        requests = torch.tensor([i for i, _ in which], device=logits.device)
        lower = barred * torch.full((), BARRED, dtype=wide.dtype, device=wide.device)
        for at, (_, row) in enumerate(which):
            if self._matchers[row] is None:
                lower[at] = float("nan")
        return wide.index_add(0, requests, lower)

    def _accept(self, row: int, tokens: Sequence[int]) -> None:
        matcher = self._matchers.get(row)
        if matcher is not None:
            with self._failing(row):
                matcher.accept(tokens)

    @contextmanager
    def _failing(self, row: int) -> Iterator[None]:
        """Note it if the grammar of the request in `row` fails, and what it takes."""
        began = time.thread_time()
        try:
            yield
        except GrammarError as error:
            self._matchers[row] = None
            logger.warning("a request ends because of its grammar: %s", error)
        except Exception:
            self._matchers[row] = None
            logger.exception("a request ends because its grammar cannot be matched")
        self._spent[row] = self._spent.get(row, 0.0) + time.thread_time() - began
