"""Notices a draft that the target hardly ever accepts: it costs time, and nothing else shows that it is wrong."""

import logging

logger = logging.getLogger(__name__)

TREES = 200  # verified trees after which a draft is judged
LEAST = 0.05  # share of trees with an accepted token: a working draft has several times as many, chance alone has fewer
REASONS = (
    "the draft was trained for another target, another tokenizer or another kind of text; its vocabulary map (d2t) is "
    "wrong; or its config is misread: which layers of the target it reads (aux_numbering), or another of "
    "speculative_draft_overrides"
)


class DraftWatch:
    """Counts the verified trees of one rank, and says in the log, once, when a draft is hardly ever accepted."""

    def __init__(self, rank: int, doubts: tuple[str, ...] = ()) -> None:
        """`doubts` are what was noted when the draft was read (`DraftInfo.doubts`)."""
        self._rank = rank
        self._doubts = doubts
        self._trees = self._accepted = 0
        self._told = False

    @property
    def rejected(self) -> bool:
        """Whether enough trees were verified, and hardly any of them had an accepted token."""
        return self._trees >= TREES and self._accepted < LEAST * self._trees

    def saw(self, accepted: int) -> None:
        """Note a verified tree of which so many drafted tokens were accepted. Trees with nodes that a grammar forces do
        not count: those are accepted whatever the draft says.
        """
        self._trees += 1
        self._accepted += accepted > 0
        if self.rejected and not self._told:
            self._told = True
            noted = "".join(f" Noted when it was read: {doubt}." for doubt in self._doubts)
            logger.warning(
                "rank %d: the draft was accepted in %d of %d trees, so it only costs time. Likely reasons: %s.%s "
                "Check it with `aerie inspect TARGET --draft DRAFT` and `aerie probe-draft DRAFT --target TARGET`",
                *(self._rank, self._accepted, self._trees, REASONS, noted),
            )
