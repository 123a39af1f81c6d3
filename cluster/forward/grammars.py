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

from cluster.batch import Constraint, Order
from cluster.forward.adjustments import BANNED
from cluster.forward.noise import at_least_float32
from cluster.grammar.asked import GrammarError
from cluster.tape import opaque

logger = logging.getLogger(__name__)

Mask = NDArray[np.int32]

BARRED = 2 * BANNED
"""Added to the logit of a token that the grammar does not have; below what is banned, so that a grammar prevails."""
WORD = 32  # tokens in a word of a mask
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


class Place:
    """Where a request in a row of the tables is in its grammar: without a matcher if that has failed."""

    def __init__(self, constraint: Constraint, make: Make) -> None:
        self._matcher: Matcher | None = None
        self._spent = self._longest = 0.0  # seconds of the processor beyond its share, and those of one call in them
        with self._failing():
            self._matcher = make(constraint.grammar)
        self.accept(constraint.tokens)
        self._spent = self._longest = 0.0

    @property
    def failed(self) -> bool:
        """Whether the grammar has failed."""
        return self._matcher is None

    @property
    def slow(self) -> bool:
        """Whether the grammar takes more of the processor than others can wait for."""
        return self._spent - self._longest > BURST_S

    def accept(self, tokens: Sequence[int]) -> None:
        """These tokens have come, in a step."""
        with self._failing():
            if self._matcher is not None:
                self._matcher.accept(tokens)
        self._spent, self._longest = max(0.0, self._spent - SHARE_S), max(0.0, self._longest - SHARE_S)

    def fill(self, paths: Sequence[Sequence[int]], out: Mask) -> None:
        """Write the masks after paths, which -1 fills up, into `out` `[n, words]`."""
        with self._failing():
            for path, mask in zip(paths, out, strict=True):
                if self._matcher is not None:
                    self._matcher.fill([token for token in path if token >= 0], mask)

    def forced(self, path: Sequence[int], most: int) -> list[int]:
        """As that of the matcher; nothing if it has failed."""
        run: list[int] = []
        with self._failing():
            if self._matcher is not None:
                run = self._matcher.forced(path, most)
        return run

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Note it if the grammar fails, and what it takes."""
        began = time.thread_time()
        try:
            yield
        except GrammarError as error:
            self._matcher = None
            logger.warning("a request ends because of its grammar: %s", error)
        except Exception:
            self._matcher = None
            logger.exception("a request ends because its grammar cannot be matched")
        took = time.thread_time() - began
        self._spent, self._longest = self._spent + took, max(self._longest, took)


class GrammarTable:
    """The places of running requests in their grammars, by row. A request whose grammar fails gets no finite logits any
    more, and so ends with an error, alone. One whose grammar takes too long is `slow`: it stays in its grammar, and
    ought to be ended by the leader of its group, since the ranks of a group do not measure the same.
    """

    def __init__(self, vocab: int, make: Make) -> None:
        self._vocab, self._make = vocab, make
        self._places: dict[int, Place] = {}
        self._bars: Tensor | None = None  # of each byte of a mask, what it adds to the logits of its eight tokens

    def read(self, grammar: str) -> None:
        """Do beforehand, in any thread, what takes long when a request with this grammar is admitted.

        Raises:
            GrammarError: it is no compiled grammar for this model.
        """
        self._make.read(grammar)

    def slow(self, row: int) -> bool:
        """Whether the grammar of the request in `row` takes more of the processor than others can wait for."""
        place = self._places.get(row)
        return place is not None and place.slow

    def put(self, order: Order) -> None:
        """Requests are admitted: those with a constraint get their place, rows of others lose theirs."""
        for each in order.samplings:
            self._places.pop(each.row, None)
        for constraint in order.constraints:
            self._places[constraint.row] = Place(constraint, self._make)

    def commit(self, rows: Tensor, tokens: Tensor, lens: Tensor) -> None:
        """The first `lens` `[B]` of `tokens` `[B, n]` were generated for `rows` `[B]`."""
        opaque(self._commit, rows, tokens, lens)

    def _commit(self, rows: Tensor, tokens: Tensor, lens: Tensor) -> None:
        for row, run, count in zip(rows.tolist(), tokens.tolist(), lens.tolist(), strict=True):
            if row in self._places:
                self._places[row].accept(run[:count])

    def forced(self, row: int, path: Sequence[int], most: int) -> list[int]:
        """Tokens that the grammar of the request in `row` forces after a path; none if it has no grammar."""
        place = self._places.get(row)
        return [] if place is None else place.forced(path, most)

    def apply(self, logits: Tensor, rows: Tensor, path: Tensor, ids: Tensor | None) -> Tensor:
        """Logits `[R, n, V]` of requests in `rows` `[R]`, after tokens `path` `[R, n, D]` that are not accepted yet (-1
        beyond them), with what may not come barred, in float32 at least. `ids` as in `Adjust.apply`.
        """
        return opaque(self._apply, logits, rows, path, ids)

    def _apply(self, logits: Tensor, rows: Tensor, path: Tensor, ids: Tensor | None) -> Tensor:
        wide, own = logits.to(at_least_float32(logits.dtype)), rows.tolist()
        which = {i: self._places[row] for i, row in enumerate(own) if row in self._places}
        if not which:
            return wide
        lines = path.tolist()
        masks = np.zeros((len(which), path.shape[1], -(-self._vocab // WORD)), np.int32)
        for (i, place), mask in zip(which.items(), masks, strict=True):
            place.fill(lines[i], mask)
        bars = self._bars_of(masks, wide)
        if ids is not None:
            bars = bars.index_select(2, ids)
        for at, place in enumerate(which.values()):
            if place.failed:
                bars[at] = float("nan")
        if len(which) == len(own):
            return wide + bars
        return wide.index_add(0, torch.tensor(list(which), device=logits.device), bars)

    def _bars_of(self, masks: Mask, like: Tensor) -> Tensor:
        """What masks `[r, n, words]` add to logits, `[r, n, V]`."""
        if self._bars is None or self._bars.dtype != like.dtype:
            bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
            self._bars = torch.from_numpy(bits == 0).to(like) * BARRED
        octets = torch.from_numpy(masks.view(np.uint8)).to(like.device)
        bars = self._bars.index_select(0, octets.flatten().int())
        return bars.view(*masks.shape[:2], -1)[..., : self._vocab]
