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

# All four are multiples of the watchdog's limit.
SILENT_FOR_GOOD = 2.0  # a rank that has not answered for this long is given up
STUCK_FOR_GOOD = 3.0  # a rank that answers but has made no progress for this long is given up
ENDLESS = 100.0  # a rank that computes for this long without reaching another part of the step is in an endless loop
SUSPICIOUS = 0.5  # if the gang stalls, a rank silent for this long is blamed before a rank that answers


@dataclass(frozen=True, slots=True)
class RankEvidence:
    """The evidence on one rank. `beat` is its last heartbeat. `silence_s` is the time since its last answer if a
    heartbeat call is open, and 0.0 otherwise. `death` is Ray's report of the rank's death, or empty. `failure` is the
    rank's own report of why its loop ended, or None.
    """

    beat: Heartbeat | None = None
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


def judge(signs: Sequence[RankEvidence], limit_s: float) -> Verdict | None:
    """Return the verdict on a gang, or None if the gang is healthy. `signs` holds the evidence on each rank, `limit_s`
    is the watchdog's limit.
    """
    dead = [rank for rank, sign in enumerate(signs) if sign.death]
    reports = [sign.failure for sign in signs if sign.failure is not None]
    if dead:
        named = Counter(r.rank for r in reports if r.rank in dead)
        rank = named.most_common(1)[0][0] if named else dead[0]
        assert rank is not None
        return Verdict(rank, "died", *_where(signs, rank), signs[rank].death, certain=bool(named) or len(signs) == 1)
    if reports:
        return _reported(signs, reports)
    return _still(signs, limit_s)


def _reported(signs: Sequence[RankEvidence], reports: list[Failure]) -> Verdict:
    """Return the verdict if some ranks reported why their loops ended, and no rank is known to be dead."""
    all_in = len(reports) == len(signs)
    own: tuple[LossKind, ...] = ("failed", "out_of_step")
    for kind in own:
        if told := [r for r in reports if r.kind == kind]:
            blamed = [r.rank for r in told if r.rank is not None]
            rank = Counter(blamed).most_common(1)[0][0] if blamed else told[0].by
            first = next((r for r in told if r.rank == rank), told[0])
            return Verdict(rank, kind, first.step, first.phase, first.reason, certain=all_in)
    named = Counter(r.rank for r in reports if r.rank is not None)
    quiet = [rank for rank, sign in enumerate(signs) if sign.failure is None]
    rank = named.most_common(1)[0][0] if named else (quiet or [reports[0].by])[0]
    # "died" and not "frozen", as a frozen process keeps its connections; Ray may report a node's death much later.
    kind = "failed" if signs[rank].failure is not None else "died"
    return Verdict(rank, kind, *_where(signs, rank), reports[0].reason, certain=all_in)


def _still(signs: Sequence[RankEvidence], limit_s: float) -> Verdict | None:
    """Return the verdict if no rank is dead and none reported a failure: a rank may be silent or stuck."""
    # The longest silence; ranks are negated, so that the lowest of several equally silent ranks is taken.
    silence, silent = max((sign.silence_s, -rank) for rank, sign in enumerate(signs))
    stuck = _stuck(signs, limit_s)
    if silence > limit_s or (stuck is not None and silence > SUSPICIOUS * limit_s):
        reason = f"no heartbeat for {silence:.1f} s (the limit is {limit_s:g} s)"
        return Verdict(-silent, "frozen", *_where(signs, -silent), reason, final=silence > SILENT_FOR_GOOD * limit_s)
    return stuck


def _stuck(signs: Sequence[RankEvidence], limit_s: float) -> Verdict | None:
    """Return the verdict on ranks that answer heartbeats, or None if these ranks are healthy. Either a rank that does
    not wait makes no progress, or all ranks wait for each other.
    """
    beats = [(sign.beat.step, rank, sign.beat) for rank, sign in enumerate(signs) if sign.beat is not None]
    busy = [entry for entry in beats if entry[2].busy]
    guilty = [entry for entry in busy if not entry[2].waits and entry[2].age_s > limit_s]
    endless = [entry for entry in busy if not entry[2].waits and entry[2].unmarked_s > ENDLESS * limit_s]
    if guilty:
        _, rank, beat = min(guilty, key=lambda entry: entry[:2])  # the rank furthest behind holds up the others
        reason = f"did nothing for {beat.age_s:.1f} s (the limit is {limit_s:g} s)"
        return Verdict(rank, "frozen", beat.step, beat.phase, reason, final=beat.age_s > STUCK_FOR_GOOD * limit_s)
    if endless:
        _, rank, beat = min(endless, key=lambda entry: entry[:2])
        reason = f"stuck in one part of the step for {beat.unmarked_s:.0f} s (the limit is {ENDLESS:g} x {limit_s:g} s)"
        return Verdict(rank, "frozen", beat.step, beat.phase, reason)
    waiting = [entry for entry in busy if entry[2].waits]
    still = min((beat.age_s for _, _, beat in beats), default=0.0)
    if not waiting or len(beats) < len(signs) or still <= limit_s:
        return None
    asleep = [entry for entry in beats if not entry[2].busy]  # its peers rang, but it did not wake
    _, rank, beat = min(asleep or waiting, key=lambda entry: entry[:2])
    reason = f"all ranks have waited for each other for {still:.1f} s (the limit is {limit_s:g} s)"
    return Verdict(rank, "frozen", beat.step, beat.phase, reason, final=still > STUCK_FOR_GOOD * limit_s)


def _where(signs: Sequence[RankEvidence], rank: int) -> tuple[int, str]:
    """Return the (step, phase) at which `rank`, which cannot report it, was lost: where a peer noticed the loss. If no
    peer noticed, return the latest (step, phase) of any rank.
    """
    for sign in signs:
        if sign.failure is not None and sign.failure.rank in (rank, None):
            return sign.failure.step, sign.failure.phase
    beats = [sign.beat for sign in signs if sign.beat is not None]
    own = signs[rank].beat
    latest = max(beats, key=lambda beat: (beat.step, beat is own), default=None)
    return (0, "start") if latest is None else (latest.step, latest.phase)
