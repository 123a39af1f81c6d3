"""The grammars of running requests: which tokens may come after each node of a tree.

A grammar is matched on the host, so a step with such a request waits for its device: for the tokens of each level of
the draft, of the tree, and for those accepted. All ranks of a group match the same tokens and bar the same.
Legend: R requests, n rows of each, V token ids, D tokens of a path.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
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


class Matcher(Protocol):
    """One request's place in its grammar. Methods raise `GrammarError` where it cannot be told, as when the grammar is
    too ambiguous to be matched in time.
    """

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


class GrammarTable:
    """The matchers of running requests, by row. A request whose grammar fails gets no finite logits any more, and so
    ends with an error, alone.
    """

    def __init__(self, vocab: int, make: Callable[[str], Matcher]) -> None:
        """`make` gives the matcher of a compiled grammar at its beginning."""
        self._vocab, self._make = vocab, make
        self._matchers: dict[int, Matcher | None] = {}  # None: it has failed

    def put(self, order: Order) -> None:
        """Requests are admitted: those with a constraint get their matcher, rows of others lose theirs."""
        for each in order.samplings:
            self._matchers.pop(each.row, None)
        for constraint in order.constraints:
            self._matchers[constraint.row] = self._make(constraint.grammar)
            self._accept(constraint.row, constraint.tokens)

    def commit(self, rows: Tensor, tokens: Tensor, lens: Tensor) -> None:
        """The first `lens` `[B]` of `tokens` `[B, n]` were generated for `rows` `[B]`."""
        for row, run, count in zip(rows.tolist(), tokens.tolist(), lens.tolist(), strict=True):
            self._accept(row, run[:count])

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
        """Note it if the grammar of the request in `row` fails."""
        try:
            yield
        except GrammarError as error:
            self._matchers[row] = None
            logger.warning("a request ends because of its grammar: %s", error)
