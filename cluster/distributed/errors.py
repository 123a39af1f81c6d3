"""The errors of a lost gang, and the exit reasons by which ranks that leave tell the others why.

Exit reasons are kept in the gang's store, on rank 0. If rank 0 hangs, every call to the store blocks, so all calls here
have a time limit.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

EXIT_REASON_S = 0.5  # how long a rank that lost a peer waits for the exit reasons of the others
ALARM = "alarm"  # the store's key that is set when any rank leaves with a reason


class GangError(RuntimeError):
    """The gang cannot go on. `rank` is the rank at fault, None if unknown; `step` and `phase`: where it was noticed."""

    def __init__(self, message: str, rank: int | None, step: int, phase: str) -> None:
        super().__init__(message)
        self.rank, self.step, self.phase = rank, step, phase


class PeerLostError(GangError):
    """A peer is gone, or sends no heartbeats."""


class OutOfStepError(GangError):
    """Ranks disagree on what comes next; raised before any tensor moves."""


class StuckDeviceError(GangError):
    """The device of this rank makes no progress any more."""


class ExitReason(NamedTuple):
    """Why a rank left. `reason` is empty if all ranks agreed to end. `blames` is the rank at fault, the leaving rank or
    a peer; None if unknown.
    """

    blames: int | None
    reason: str


class ExitReasons:
    """Publishes one rank's exit reason and reads those of its peers. Nothing else blocks on the connection `store`."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store, self.rank, self.world = store, rank, world

    def say(self, exit_reason: ExitReason, rank: int | None = None) -> None:
        """Publish why this rank leaves, or why the dead `rank` did. A rank's first exit reason is never replaced."""
        bounded(lambda: self._say(exit_reason, self.rank if rank is None else rank), EXIT_REASON_S)

    def _say(self, exit_reason: ExitReason, rank: int) -> None:
        try:
            kept = self._store.compare_set(f"left/{rank}", "", json.dumps(exit_reason))
            if ExitReason(*json.loads(kept)).reason:
                self._store.set(ALARM, "1")
        except RuntimeError:
            return  # rank 0 is gone, and the store with it

    def heard(self) -> dict[int, ExitReason]:
        """Return the non-empty exit reasons published so far, by rank."""
        said = [rank for rank in range(self.world) if self._store.check([f"left/{rank}"])]
        every = {rank: ExitReason(*json.loads(self._store.get(f"left/{rank}"))) for rank in said}
        return {rank: exit_reason for rank, exit_reason in every.items() if exit_reason.reason}

    def explain(self, cause: str, step: int, phase: str, fresh: Callable[[int], bool] | None = None) -> PeerLostError:
        """Return the error to raise for `cause`, an error that the loss of a peer has caused here.

        Publish `cause` as this rank's exit reason, and wait up to `EXIT_REASON_S` for those of the others. A rank
        without one by then counts as dead, unless `fresh(rank)`: its heartbeats still come. If the store does not
        answer, rank 0 is at fault.
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
            silent, fresh = [0], None  # rank 0 is gone, and the store with it
        gone = [rank for rank in silent if fresh is None or not fresh(rank)]
        if not gone:
            return PeerLostError(f"a peer closed its connection: {cause}", None, step, phase)
        names = " and ".join(str(rank) for rank in gone)
        return PeerLostError(f"rank {names} is gone (step {step}, phase {phase})", gone[0], step, phase)

    def bereaved(self, step: int, phase: str) -> PeerLostError | None:
        """Wait up to `EXIT_REASON_S` for exit reasons that blame a peer; return the error to raise, None if none do."""
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
    """Return the rank at fault by these exit reasons, with a message that names it: a rank that blames itself, else the
    rank that most others blame. None if no rank is blamed.
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
    """Make a call that may block forever. Return after at most `seconds`: whether the call has ended."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()
