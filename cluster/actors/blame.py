"""Decides which rank of a gang is at fault, from the evidence of all ranks. Pure functions; no clock.
`gang.Gang.watch` acts on the verdict: it kills and restarts the gang.

When one rank is gone, all others soon report that they lost a peer, or stop making progress; they are not at fault. The
rank at fault is the first of these that exists: a rank that Ray reports dead, a rank whose own step raised, a rank out
of step, the rank that the others report lost, a rank that does not answer, a rank that answers but makes no progress.

A step has no time limit. A rank that makes progress, however slowly, is healthy; so are the ranks that wait for that
rank in a collective. A waiting rank is at fault only if no rank at all makes progress.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.actors.messages import Blame, Failure, Heartbeat, LossKind

# The four factors below are multiples of the watchdog's limit (`watchdog_timeout_s`).
FATAL_SILENCE_FACTOR = 2.0  # a rank that has not answered for this long is given up
FATAL_STALL_FACTOR = 3.0  # a rank that answers but has made no progress for this long is given up
# A rank that computes for this long without reaching another part of the step is in an endless loop.
ENDLESS_LOOP_FACTOR = 100.0
SUSPICIOUS_SILENCE_FACTOR = 0.5  # if the gang stalls, a rank silent for this long is blamed before a rank that answers


@dataclass(frozen=True, slots=True)
class RankEvidence:
    """The evidence on one rank. `heartbeat` is its last heartbeat, or None before the first. `silence_s` is the time
    since its last answer if a heartbeat call is unanswered, and 0.0 otherwise. `death` is Ray's report of the rank's
    death, or empty. `failure` is the rank's own report of why its loop ended, or None.
    """

    heartbeat: Heartbeat | None = None
    silence_s: float = 0.0
    death: str = ""
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Verdict(Blame):
    """Why a gang is unhealthy. If `final`, the incarnation is over; otherwise the rank may recover. If `certain`, later
    evidence will hardly change which rank is blamed.
    """

    final: bool = True
    certain: bool = True


def judge(evidence: Sequence[RankEvidence], limit_s: float) -> Verdict | None:
    """Return the verdict on a gang, or None if the gang is healthy. `evidence` holds the evidence on each rank,
    `limit_s` is the watchdog's limit.
    """
    dead = [rank for rank, rank_evidence in enumerate(evidence) if rank_evidence.death]
    reports = [rank_evidence.failure for rank_evidence in evidence if rank_evidence.failure is not None]
    if dead:
        votes = Counter(r.rank for r in reports if r.rank in dead)
        rank = votes.most_common(1)[0][0] if votes else dead[0]
        assert rank is not None
        return Verdict(
            rank,
            "died",
            *_position_of_loss(evidence, rank),
            evidence[rank].death,
            certain=bool(votes) or len(evidence) == 1,
        )
    if reports:
        return _verdict_on_reports(evidence, reports)
    return _verdict_without_reports(evidence, limit_s)


def _verdict_on_reports(evidence: Sequence[RankEvidence], reports: list[Failure]) -> Verdict:
    """Return the verdict if some ranks reported why their loops ended, and no rank is known to be dead."""
    is_complete = len(reports) == len(evidence)
    own_kinds: tuple[LossKind, ...] = ("failed", "out_of_step")
    for kind in own_kinds:
        if matching := [r for r in reports if r.kind == kind]:
            blamed_ranks = [r.rank for r in matching if r.rank is not None]
            rank = Counter(blamed_ranks).most_common(1)[0][0] if blamed_ranks else matching[0].reported_by
            first = next((r for r in matching if r.rank == rank), matching[0])
            return Verdict(rank, kind, first.step, first.phase, first.reason, certain=is_complete)
    votes = Counter(r.rank for r in reports if r.rank is not None)
    silent_ranks = [rank for rank, rank_evidence in enumerate(evidence) if rank_evidence.failure is None]
    rank = votes.most_common(1)[0][0] if votes else (silent_ranks or [reports[0].reported_by])[0]
    # The others lost their connections to this rank, and a frozen process keeps its connections. So the rank died, even
    # if Ray has not reported that: Ray may report the death of a node much later.
    kind = "failed" if evidence[rank].failure is not None else "died"
    return Verdict(rank, kind, *_position_of_loss(evidence, rank), reports[0].reason, certain=is_complete)


def _verdict_without_reports(evidence: Sequence[RankEvidence], limit_s: float) -> Verdict | None:
    """Return the verdict if no rank is dead and none reported a failure. A rank may still be silent or stuck; return
    None if none is.
    """
    # The longest silence; ranks are negated, so that the lowest of several equally silent ranks is taken.
    silence_s, negated_rank = max((rank_evidence.silence_s, -rank) for rank, rank_evidence in enumerate(evidence))
    stuck = _verdict_on_progress(evidence, limit_s)
    if silence_s > limit_s or (stuck is not None and silence_s > SUSPICIOUS_SILENCE_FACTOR * limit_s):
        reason = f"no heartbeat for {silence_s:.1f} s (the limit is {limit_s:g} s)"
        return Verdict(
            -negated_rank,
            "frozen",
            *_position_of_loss(evidence, -negated_rank),
            reason,
            final=silence_s > FATAL_SILENCE_FACTOR * limit_s,
        )
    return stuck


def _verdict_on_progress(evidence: Sequence[RankEvidence], limit_s: float) -> Verdict | None:
    """Return the verdict on ranks that answer heartbeats, or None if these ranks are healthy. They are unhealthy in
    three cases: a rank that does not wait makes no progress; a rank is in an endless loop; all ranks wait for each
    other.
    """
    heartbeats = [
        (rank_evidence.heartbeat.step, rank, rank_evidence.heartbeat)
        for rank, rank_evidence in enumerate(evidence)
        if rank_evidence.heartbeat is not None
    ]
    busy = [entry for entry in heartbeats if entry[2].busy]
    stalled = [entry for entry in busy if not entry[2].is_waiting and entry[2].idle_s > limit_s]
    looping = [
        entry for entry in busy if not entry[2].is_waiting and entry[2].since_mark_s > ENDLESS_LOOP_FACTOR * limit_s
    ]
    if stalled:
        _, rank, heartbeat = min(stalled, key=lambda entry: entry[:2])  # the rank furthest behind holds up the others
        reason = f"did nothing for {heartbeat.idle_s:.1f} s (the limit is {limit_s:g} s)"
        return Verdict(
            rank,
            "frozen",
            heartbeat.step,
            heartbeat.phase,
            reason,
            final=heartbeat.idle_s > FATAL_STALL_FACTOR * limit_s,
        )
    if looping:
        _, rank, heartbeat = min(looping, key=lambda entry: entry[:2])
        reason = (
            f"stuck in one part of the step for {heartbeat.since_mark_s:.0f} s (the limit is {ENDLESS_LOOP_FACTOR:g} x "
            f"{limit_s:g} s)"
        )
        return Verdict(rank, "frozen", heartbeat.step, heartbeat.phase, reason)
    waiting = [entry for entry in busy if entry[2].is_waiting]
    idle_s = min((heartbeat.idle_s for _, _, heartbeat in heartbeats), default=0.0)
    if not waiting or len(heartbeats) < len(evidence) or idle_s <= limit_s:
        return None
    sleeping = [
        entry for entry in heartbeats if not entry[2].busy
    ]  # ranks that still sleep although another rank has work and called `wake_ranks`
    _, rank, heartbeat = min(sleeping or waiting, key=lambda entry: entry[:2])
    reason = f"all ranks have waited for each other for {idle_s:.1f} s (the limit is {limit_s:g} s)"
    return Verdict(rank, "frozen", heartbeat.step, heartbeat.phase, reason, final=idle_s > FATAL_STALL_FACTOR * limit_s)


def _position_of_loss(evidence: Sequence[RankEvidence], rank: int) -> tuple[int, str]:
    """Return the (step, phase) at which `rank` was lost. A lost rank cannot report this itself, so return the
    (step, phase) at which another rank noticed the loss. If no rank noticed it, return the latest (step, phase) of all
    heartbeats, or (0, "start") if there are none.
    """
    for rank_evidence in evidence:
        if rank_evidence.failure is not None and rank_evidence.failure.rank in (rank, None):
            return rank_evidence.failure.step, rank_evidence.failure.phase
    heartbeats = [rank_evidence.heartbeat for rank_evidence in evidence if rank_evidence.heartbeat is not None]
    own_heartbeat = evidence[rank].heartbeat
    latest = max(heartbeats, key=lambda heartbeat: (heartbeat.step, heartbeat is own_heartbeat), default=None)
    return (0, "start") if latest is None else (latest.step, latest.phase)
