"""The errors that end a gang (the ranks of one replica), and the exit reasons, by which a rank that leaves tells the
other ranks why.

Exit reasons are kept in the gang's store, on rank 0. If rank 0 hangs, every call to the store blocks, so all calls here
have a time limit.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

EXIT_REASON_TIMEOUT_S = 0.5  # how long a rank that lost a peer waits for the exit reasons of the others
ALARM_KEY = "alarm"  # the store's key that is set when any rank leaves with a reason


class GangError(RuntimeError):
    """The gang cannot go on. `rank` is the rank at fault, or None if unknown. The rank that raises this error noticed
    the problem in phase `phase` of step `step`.
    """

    def __init__(self, message: str, rank: int | None, step: int, phase: str) -> None:
        super().__init__(message)
        self.rank, self.step, self.phase = rank, step, phase


class PeerLostError(GangError):
    """A peer is gone, or sends no heartbeats."""


class OutOfStepError(GangError):
    """Ranks disagree on what comes next, or a rank does not do what all ranks have planned."""


class StuckDeviceError(GangError):
    """The device of this rank makes no progress any more."""


class ExitReason(NamedTuple):
    """Why a rank left. `reason` is empty if all ranks agreed to end. `blamed_rank` is the rank at fault, the leaving
    rank or a peer; None if unknown.
    """

    blamed_rank: int | None
    reason: str


class ExitReasons:
    """Publishes one rank's exit reason and reads those of its peers. `store` is a connection to the store on which no
    other code makes blocking calls.
    """

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store, self.rank, self.world = store, rank, world

    def publish(self, exit_reason: ExitReason, rank: int | None = None) -> None:
        """Publish why this rank leaves or, if `rank` is given, why rank `rank`, which is dead, has left. A rank's first
        exit reason is never replaced.
        """
        run_with_timeout(lambda: self._publish(exit_reason, self.rank if rank is None else rank), EXIT_REASON_TIMEOUT_S)

    def _publish(self, exit_reason: ExitReason, rank: int) -> None:
        try:
            stored = self._store.compare_set(f"left/{rank}", "", json.dumps(exit_reason))
            if ExitReason(*json.loads(stored)).reason:
                self._store.set(ALARM_KEY, "1")
        except RuntimeError:
            return  # rank 0 is gone, and the store with it

    def published_reasons(self) -> dict[int, ExitReason]:
        """Return the non-empty exit reasons published so far, by rank."""
        ranks = [rank for rank in range(self.world) if self._store.check([f"left/{rank}"])]
        exit_reasons = {rank: ExitReason(*json.loads(self._store.get(f"left/{rank}"))) for rank in ranks}
        return {rank: exit_reason for rank, exit_reason in exit_reasons.items() if exit_reason.reason}

    def explain(
        self, cause: str, step: int, phase: str, is_alive: Callable[[int], bool] | None = None
    ) -> PeerLostError:
        """Return the error to raise for `cause`, an error that the loss of a peer has caused here.

        Publish `cause` as this rank's exit reason, and wait up to `EXIT_REASON_TIMEOUT_S` for those of the others. A
        rank that has published none by then counts as dead, unless `is_alive(rank)` returns True because the rank still
        sends heartbeats (`is_alive` is None if there are no heartbeats). If the store does not answer, the error blames
        rank 0.
        """
        errors: list[PeerLostError] = []
        run_with_timeout(lambda: errors.append(self._explain(cause, step, phase, is_alive)), 2 * EXIT_REASON_TIMEOUT_S)
        return (
            errors[0]
            if errors
            else PeerLostError(f"rank 0 does not answer (step {step}, phase {phase})", 0, step, phase)
        )

    def _explain(self, cause: str, step: int, phase: str, is_alive: Callable[[int], bool] | None) -> PeerLostError:
        self._publish(ExitReason(None, cause), self.rank)
        silent = list(range(self.world))
        deadline = time.monotonic() + EXIT_REASON_TIMEOUT_S
        try:
            while silent and time.monotonic() < deadline:
                reasons = self.published_reasons()
                if fault := rank_at_fault(reasons):
                    return PeerLostError(fault.reason, fault.blamed_rank, step, phase)
                silent = [rank for rank in silent if rank not in reasons]
                time.sleep(0.01)
        except RuntimeError:
            silent, is_alive = [0], None  # rank 0 is gone, and the store with it
        dead_ranks = [rank for rank in silent if is_alive is None or not is_alive(rank)]
        if not dead_ranks:
            return PeerLostError(f"a peer closed its connection: {cause}", None, step, phase)
        names = " and ".join(str(rank) for rank in dead_ranks)
        return PeerLostError(f"rank {names} is gone (step {step}, phase {phase})", dead_ranks[0], step, phase)

    def blamed_peer(self, step: int, phase: str) -> PeerLostError | None:
        """Wait up to `EXIT_REASON_TIMEOUT_S` for an exit reason that blames a peer. Return the error to raise, or None
        if no exit reason does. If the store is gone, the error blames rank 0.
        """
        errors: list[PeerLostError] = []

        def poll() -> None:
            deadline = time.monotonic() + EXIT_REASON_TIMEOUT_S
            try:
                while time.monotonic() < deadline:
                    if (fault := rank_at_fault(self.published_reasons())) and fault.blamed_rank != self.rank:
                        errors.append(PeerLostError(fault.reason, fault.blamed_rank, step, phase))
                        return
                    time.sleep(0.01)
            except RuntimeError:
                errors.append(PeerLostError("rank 0 is gone", 0, step, phase))

        run_with_timeout(poll, 2 * EXIT_REASON_TIMEOUT_S)
        return errors[0] if errors else None


def rank_at_fault(reasons: dict[int, ExitReason]) -> ExitReason | None:
    """Return an `ExitReason` that names the rank at fault: a rank that blames itself, or else the rank that is blamed
    most often. Return None if no rank is blamed.
    """
    for rank, exit_reason in reasons.items():
        if exit_reason.blamed_rank == rank:
            return ExitReason(rank, f"rank {rank} left: {exit_reason.reason}")
    votes = Counter(exit_reason.blamed_rank for exit_reason in reasons.values() if exit_reason.blamed_rank is not None)
    if not votes:
        return None
    most_blamed = votes.most_common(1)[0][0]
    voter, vote = next((rank, vote) for rank, vote in reasons.items() if vote.blamed_rank == most_blamed)
    return ExitReason(most_blamed, f"{vote.reason} (so rank {voter})")


def run_with_timeout(call: Callable[[], object], timeout_s: float) -> bool:
    """Make `call`, which may block forever, in a thread. Wait for at most `timeout_s` seconds, and return whether the
    call has ended by then. A call that has not ended goes on in its thread.
    """
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()
