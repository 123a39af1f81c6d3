"""The verdict of `judge`: which rank it blames for the loss of a gang, given the evidence on every rank."""

import pytest

from cluster.actors.blame import RankEvidence, judge
from cluster.actors.messages import Failure, Heartbeat

LIMIT = 3.0


def heartbeat(
    rank: int,
    step: int = 10,
    phase: str = "target",
    idle_s: float = 0.0,
    busy: bool = True,
    is_waiting: bool = False,
    since_mark_s: float = 0.0,
) -> Heartbeat:
    return Heartbeat(rank, step, busy, idle_s, step, phase, since_mark_s=since_mark_s, is_waiting=is_waiting)


def healthy_ranks(count: int) -> list[RankEvidence]:
    return [RankEvidence(heartbeat(rank)) for rank in range(count)]


def lost_peer(reporter: int, lost_rank: int | None, step: int = 11, phase: str = "draft") -> RankEvidence:
    return RankEvidence(
        heartbeat(reporter), failure=Failure(reporter, "lost", lost_rank, step, phase, f"rank {lost_rank} is gone")
    )


def own_failure(reporter: int, kind: str = "failed", blamed_rank: int | None = None) -> RankEvidence:
    failure = Failure(
        reporter, kind, reporter if blamed_rank is None else blamed_rank, 12, "extend", f"{kind} by {reporter}"
    )  # type: ignore[arg-type]
    return RankEvidence(heartbeat(reporter), failure=failure)


def test_healthy_gang_has_no_verdict() -> None:
    assert judge(healthy_ranks(3), LIMIT) is None
    assert judge([RankEvidence()], LIMIT) is None
    assert judge([RankEvidence(heartbeat(0, idle_s=100.0, busy=False))], LIMIT) is None


def test_dead_rank_is_blamed_at_the_step_reported_by_its_peers() -> None:
    verdict = judge(
        [lost_peer(0, 1), RankEvidence(heartbeat(1, 9, "plan"), death="the process died"), lost_peer(2, None)], LIMIT
    )
    assert verdict is not None
    assert (verdict.rank, verdict.kind, verdict.step, verdict.phase) == (1, "died", 11, "draft")
    assert verdict.reason == "the process died" and verdict.final and verdict.certain


def test_verdict_uses_the_latest_heartbeat_when_no_peer_reports_the_loss() -> None:
    verdict = judge(
        [RankEvidence(heartbeat(0, 11, "draft")), RankEvidence(heartbeat(1, 9, "plan"), death="gone")], LIMIT
    )
    assert verdict is not None and not verdict.certain
    assert (verdict.rank, verdict.step, verdict.phase) == (1, 11, "draft")


def test_first_of_several_dead_ranks_is_the_rank_reported_lost_by_peers() -> None:
    verdict = judge(
        [RankEvidence(death="aborted"), RankEvidence(death="killed"), lost_peer(2, 1), lost_peer(3, 1)], LIMIT
    )
    assert verdict is not None and (verdict.rank, verdict.reason) == (1, "killed")


@pytest.mark.parametrize("kind", ["failed", "out_of_step"])
def test_rank_with_its_own_failure_is_blamed_before_ranks_that_lost_a_peer(kind: str) -> None:
    verdict = judge([lost_peer(0, 2), lost_peer(1, None), own_failure(2, kind)], LIMIT)
    assert verdict is not None and verdict.certain
    assert (verdict.rank, verdict.kind, verdict.step, verdict.phase) == (2, kind, 12, "extend")
    early_verdict = judge([lost_peer(0, 2), RankEvidence(heartbeat(1)), own_failure(2, kind)], LIMIT)
    assert early_verdict is not None and not early_verdict.certain and early_verdict.rank == 2


def test_out_of_step_verdict_follows_the_majority_of_ranks() -> None:
    evidence = [own_failure(0, "out_of_step", 2), own_failure(1, "out_of_step", 2), own_failure(2, "out_of_step", 0)]
    verdict = judge(evidence, LIMIT)
    assert verdict is not None and (verdict.rank, verdict.kind) == (2, "out_of_step")


def test_peer_reports_alone_are_enough_to_blame_a_rank() -> None:
    verdict = judge([lost_peer(0, 1), RankEvidence(heartbeat(1))], LIMIT)
    assert verdict is not None
    assert (verdict.rank, verdict.kind, verdict.final, verdict.certain) == (1, "died", True, False)
    verdict_on_unnamed_loss = judge([lost_peer(0, None), RankEvidence(heartbeat(1)), lost_peer(2, None)], LIMIT)
    assert verdict_on_unnamed_loss is not None and verdict_on_unnamed_loss.rank == 1
    verdict_on_mutual_loss = judge([lost_peer(0, 1), lost_peer(1, 0)], LIMIT)
    assert verdict_on_mutual_loss is not None and (verdict_on_mutual_loss.kind, verdict_on_mutual_loss.certain) == (
        "failed",
        True,
    )
    verdict_on_silent_rank = judge([lost_peer(0, 1), RankEvidence(heartbeat(1), silence_s=2.0)], LIMIT)
    assert (
        verdict_on_silent_rank is not None and verdict_on_silent_rank.kind == "died"
    )  # a frozen rank would keep its connections


@pytest.mark.parametrize(("silence", "final"), [(3.1, False), (5.9, False), (6.1, True)])
def test_silent_rank_is_blamed_before_a_rank_without_progress(silence: float, final: bool) -> None:
    evidence = [
        RankEvidence(heartbeat(0, 12, "plan", idle_s=silence)),
        RankEvidence(heartbeat(1, 11, "extend"), silence_s=silence),
    ]
    verdict = judge(evidence, LIMIT)
    assert verdict is not None and (verdict.rank, verdict.kind, verdict.final) == (1, "frozen", final)
    assert (verdict.step, verdict.phase) == (12, "plan")  # the position of the rank that waits for rank 1


def test_stall_is_blamed_on_a_silent_rank_below_the_silence_limit() -> None:
    verdict = judge([RankEvidence(heartbeat(0, idle_s=3.1)), RankEvidence(heartbeat(1), silence_s=2.4)], LIMIT)
    assert verdict is not None and verdict.rank == 1 and not verdict.final


@pytest.mark.parametrize(("age", "final"), [(3.1, False), (8.9, False), (9.1, True)])
def test_answering_rank_without_progress_has_a_longer_limit(age: float, final: bool) -> None:
    verdict = judge(
        [RankEvidence(heartbeat(0, 12, "plan", idle_s=age)), RankEvidence(heartbeat(1, 11, "extend", idle_s=age))],
        LIMIT,
    )
    assert verdict is not None
    assert (verdict.rank, verdict.kind, verdict.step, verdict.phase) == (1, "frozen", 11, "extend")
    assert verdict.final is final and "did nothing" in verdict.reason


def test_rank_that_waits_for_a_working_rank_is_never_blamed() -> None:
    evidence = [
        RankEvidence(heartbeat(0, idle_s=500.0, is_waiting=True)),
        RankEvidence(heartbeat(1, since_mark_s=200.0)),
        RankEvidence(heartbeat(2, idle_s=1000.0, busy=False)),
    ]
    assert judge(evidence, LIMIT) is None


def test_rank_without_progress_is_blamed_before_a_rank_that_waits() -> None:
    verdict = judge(
        [RankEvidence(heartbeat(0, 11, idle_s=50.0, is_waiting=True)), RankEvidence(heartbeat(1, 12, idle_s=4.0))],
        LIMIT,
    )
    assert verdict is not None and (verdict.rank, verdict.final) == (1, False)


@pytest.mark.parametrize(("age", "final"), [(3.1, False), (9.1, True)])
def test_rank_furthest_behind_is_blamed_when_all_ranks_wait(age: float, final: bool) -> None:
    evidence = [
        RankEvidence(heartbeat(0, 12, idle_s=50.0, is_waiting=True)),
        RankEvidence(heartbeat(1, 11, "draft", idle_s=age, is_waiting=True)),
    ]
    verdict = judge(evidence, LIMIT)
    assert verdict is not None and (verdict.rank, verdict.phase, verdict.final) == (1, "draft", final)
    assert "all ranks have waited" in verdict.reason
    evidence_with_idle_rank = [
        RankEvidence(heartbeat(0, 12, idle_s=50.0, is_waiting=True)),
        RankEvidence(heartbeat(1, 12, idle_s=age, busy=False)),
    ]
    verdict = judge(evidence_with_idle_rank, LIMIT)
    assert verdict is not None and verdict.rank == 1
    evidence_without_heartbeat = [RankEvidence(heartbeat(0, 12, idle_s=50.0, is_waiting=True)), RankEvidence()]
    assert judge(evidence_without_heartbeat, LIMIT) is None


@pytest.mark.parametrize(("since_mark_s", "frozen"), [(299.0, False), (301.0, True)])
def test_rank_computing_without_progress_marks_is_frozen_after_a_hundred_limits(
    since_mark_s: float, frozen: bool
) -> None:
    verdict = judge(
        [
            RankEvidence(heartbeat(0, idle_s=0.1, since_mark_s=since_mark_s)),
            RankEvidence(heartbeat(1, is_waiting=True, since_mark_s=900.0)),
        ],
        LIMIT,
    )
    assert (verdict is not None) is frozen
    if verdict is not None:
        assert (verdict.rank, verdict.final) == (0, True) and "stuck in one part of the step" in verdict.reason


def test_verdict_text_names_rank_step_and_phase() -> None:
    assert (
        str(judge([lost_peer(0, 1), RankEvidence(heartbeat(1), death="gone")], LIMIT))
        == "rank 1 died at step 11, phase draft: gone"
    )
