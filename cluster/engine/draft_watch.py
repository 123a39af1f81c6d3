"""Notices a draft that the target never accepts: it costs time, and nothing else shows that something is wrong."""

import logging

logger = logging.getLogger(__name__)

TREES = 200  # verified trees; of so many even a poor draft has some token accepted
REASONS = (
    "the draft was trained for another target, or for another tokenizer; its vocabulary map (d2t) is wrong; or its "
    "config is misread: which layers of the target it reads (aux_numbering), or another of speculative_draft_overrides"
)


class DraftWatch:
    """Counts the verified trees of one rank, and says in the log when a draft was never accepted."""

    def __init__(self, rank: int, doubts: tuple[str, ...] = ()) -> None:
        """`doubts` are what was noted when the draft was read (`DraftInfo.doubts`)."""
        self._rank = rank
        self._doubts = doubts
        self._trees = self._accepted = 0
        self._told = False

    @property
    def never_accepted(self) -> bool:
        """Whether enough trees were verified and no drafted token was ever accepted."""
        return self._trees >= TREES and not self._accepted

    def saw(self, accepted: int) -> None:
        """Note a verified tree of which so many drafted tokens were accepted. Trees with nodes that a grammar forces do
        not count: those are accepted whatever the draft says.
        """
        self._trees += 1
        self._accepted += accepted
        if self.never_accepted and not self._told:
            self._told = True
            noted = "".join(f" Noted when it was read: {doubt}." for doubt in self._doubts)
            logger.warning(
                "rank %d: the draft was never accepted in %d trees, so it only costs time. Likely reasons: %s.%s "
                "Check it with `aerie inspect TARGET --draft DRAFT` and `aerie probe-draft DRAFT --target TARGET`",
                self._rank, self._trees, REASONS, noted,
            )  # fmt: skip
