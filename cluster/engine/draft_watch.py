"""Detects a draft that the target hardly ever accepts. Such a draft only costs time, and has no other symptom."""

import logging

logger = logging.getLogger(__name__)

MIN_TREES = 200  # verified trees after which a draft is judged
MIN_ACCEPTED_SHARE = (
    0.05  # lowest share of trees with an accepted token; working drafts reach several times this, chance does not
)
REASONS = (
    "the draft was trained for another target, another tokenizer or another kind of text; its vocabulary map (d2t) is "
    "wrong; or its config is misread: which layers of the target it reads (aux_numbering), or another of "
    "speculative_draft_overrides"
)


class DraftWatch:
    """Counts the verified trees of one rank, and logs one warning if the draft is hardly ever accepted."""

    def __init__(self, rank: int, doubts: tuple[str, ...] = ()) -> None:
        """`doubts` are the oddities found when the draft was read (`DraftInfo.doubts`)."""
        self._rank = rank
        self._doubts = doubts
        self._trees = self._accepted = 0
        self._warned = False

    @property
    def rejected(self) -> bool:
        """Whether at least `MIN_TREES` trees were verified, and hardly any of them had an accepted token."""
        return self._trees >= MIN_TREES and self._accepted < MIN_ACCEPTED_SHARE * self._trees

    def count_tree(self, accepted: int) -> None:
        """Count one verified tree, of which `accepted` drafted tokens were accepted. Trees of requests with a grammar
        must not be counted: forced nodes are accepted whatever the draft proposes.
        """
        self._trees += 1
        self._accepted += accepted > 0
        if self.rejected and not self._warned:
            self._warned = True
            doubts_text = "".join(f" Noted when it was read: {doubt}." for doubt in self._doubts)
            logger.warning(
                "rank %d: the draft was accepted in %d of %d trees, so it only costs time. Likely reasons: %s.%s "
                "Check it with `aerie inspect TARGET --draft DRAFT` and `aerie probe-draft DRAFT --target TARGET`",
                *(self._rank, self._accepted, self._trees, REASONS, doubts_text),
            )
