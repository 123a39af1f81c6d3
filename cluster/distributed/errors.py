"""How a gang is lost: the errors that say so, and the farewells by which ranks that leave tell the others why.

A farewell lies in the gang's store. Where rank 0, which keeps the store, stands still, every call to it blocks, so all
that is asked here has a time limit.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

EXIT_REASON_S = 0.5  # how long a rank that lost a peer waits for the reasons of the others
ALARM = "alarm"  # the key that is set when a rank leaves for a reason


class GangError(RuntimeError):
    """The gang cannot go on. `rank` is the one to blame as far as known, `step` and `phase` where it was noticed."""

    def __init__(self, message: str, rank: int | None, step: int, phase: str) -> None:
        super().__init__(message)
        self.rank, self.step, self.phase = rank, step, phase


class PeerLostError(GangError):
    """A peer is gone or silent."""


class OutOfStepError(GangError):
    """Ranks disagree on what comes next; raised before any tensor moves."""


class StuckDeviceError(GangError):
    """The device of this rank does nothing any more."""


class ExitReason(NamedTuple):
    """Why a rank left, empty if by agreement. `blames` is the rank at fault, itself or a peer; None: not known."""

    blames: int | None
    reason: str


class ExitReasons:
    """The farewells of a gang, as one rank says and reads them. `store` is a connection that nothing else waits on."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store, self.rank, self.world = store, rank, world

    def say(self, exit_reason: ExitReason, rank: int | None = None) -> None:
        """Tell the peers why this rank leaves, or `rank`, which cannot say it any more; the first farewell stays."""
        bounded(lambda: self._say(exit_reason, self.rank if rank is None else rank), EXIT_REASON_S)

    def _say(self, exit_reason: ExitReason, rank: int) -> None:
        try:
            kept = self._store.compare_set(f"left/{rank}", "", json.dumps(exit_reason))
            if ExitReason(*json.loads(kept)).reason:
                self._store.set(ALARM, "1")
        except RuntimeError:
            return  # rank 0 is gone, and the store with it

    def heard(self) -> dict[int, ExitReason]:
        """The farewells with a reason that were said so far, by rank."""
        said = [rank for rank in range(self.world) if self._store.check([f"left/{rank}"])]
        every = {rank: ExitReason(*json.loads(self._store.get(f"left/{rank}"))) for rank in said}
        return {rank: exit_reason for rank, exit_reason in every.items() if exit_reason.reason}

    def explain(self, cause: str, step: int, phase: str, fresh: Callable[[int], bool] | None = None) -> PeerLostError:
        """The error to raise for `cause`, which a peer that left has brought about; says farewell, and waits a moment
        for the others' reasons. Who says nothing meanwhile is dead, unless it is `fresh`.
        """
        found: list[PeerLostError] = []
        bounded(lambda: found.append(self._explain(cause, step, phase, fresh)), 2 * EXIT_REASON_S)
        return (
            found[0] if found else PeerLostError(f"rank 0 does not answer (step {step}, phase {phase})", 0, step, phase)
        )

    def _explain(self, cause: str, step: int, phase: str, fresh: Callable[[int], bool] | None) -> PeerLostError:
        self._say(ExitReason(None, cause), self.rank)
        silent = list(range(self.world))
        until = time.monotonic() + EXIT_REASON_S
        try:
            while silent and time.monotonic() < until:
                heard = self.heard()
                if named := believed(heard):
                    return PeerLostError(named.reason, named.blames, step, phase)
                silent = [rank for rank in silent if rank not in heard]
                time.sleep(0.01)
        except RuntimeError:
            silent, fresh = [0], None  # the store went with rank 0
        gone = [rank for rank in silent if fresh is None or not fresh(rank)]
        if not gone:
            return PeerLostError(f"a peer closed its connection: {cause}", None, step, phase)
        names = " and ".join(str(rank) for rank in gone)
        return PeerLostError(f"rank {names} is gone (step {step}, phase {phase})", gone[0], step, phase)

    def bereaved(self, step: int, phase: str) -> PeerLostError | None:
        """The error to raise if a peer has left for a reason of its own, None if none has; waits a moment for it."""
        found: list[PeerLostError] = []

        def look() -> None:
            until = time.monotonic() + EXIT_REASON_S
            try:
                while time.monotonic() < until:
                    if (named := believed(self.heard())) and named.blames != self.rank:
                        found.append(PeerLostError(named.reason, named.blames, step, phase))
                        return
                    time.sleep(0.01)
            except RuntimeError:
                found.append(PeerLostError("rank 0 is gone", 0, step, phase))

        bounded(look, 2 * EXIT_REASON_S)
        return found[0] if found else None


def believed(heard: dict[int, ExitReason]) -> ExitReason | None:
    """Who is to blame by these farewells, and why, in words that name the rank: one that left for a reason of its own;
    else the one that most others blame.
    """
    for rank, exit_reason in heard.items():
        if exit_reason.blames == rank:
            return ExitReason(rank, f"rank {rank} left: {exit_reason.reason}")
    blamed = Counter(exit_reason.blames for exit_reason in heard.values() if exit_reason.blames is not None)
    if not blamed:
        return None
    worst = blamed.most_common(1)[0][0]
    by, told = next((rank, told) for rank, told in heard.items() if told.blames == worst)
    return ExitReason(worst, f"{told.reason} (so rank {by})")


def bounded(call: Callable[[], object], seconds: float) -> bool:
    """Make a call that may block for good; returns after `seconds` at the latest, and whether it has ended by then."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()
