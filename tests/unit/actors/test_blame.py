"""Who is blamed, from what is known of every rank."""

import pytest

from cluster.actors.blame import RankEvidence, judge
from cluster.actors.messages import Failure, Heartbeat

LIMIT = 3.0


def beat(
    rank: int,
    step: int = 10,
    phase: str = "target",
    age_s: float = 0.0,
    busy: bool = True,
    waits: bool = False,
    unmarked_s: float = 0.0,
) -> Heartbeat:
    return Heartbeat(rank, step, busy, age_s, step, phase, since_mark_s=unmarked_s, is_waiting=waits)


def well(count: int) -> list[RankEvidence]:
    return [RankEvidence(beat(rank)) for rank in range(count)]


def lost(by: int, rank: int | None, step: int = 11, phase: str = "draft") -> RankEvidence:
    return RankEvidence(beat(by), failure=Failure(by, "lost", rank, step, phase, f"rank {rank} is gone"))


def own(by: int, kind: str = "failed", rank: int | None = None) -> RankEvidence:
    failure = Failure(by, kind, by if rank is None else rank, 12, "extend", f"{kind} by {by}")  # type: ignore[arg-type]
    return RankEvidence(beat(by), failure=failure)


def test_healthy_gang_has_no_verdict() -> None:
    assert judge(well(3), LIMIT) is None
    assert judge([RankEvidence()], LIMIT) is None
    assert judge([RankEvidence(beat(0, age_s=100.0, busy=False))], LIMIT) is None


def test_dead_rank_is_blamed_at_the_step_reported_by_its_peers() -> None:
    verdict = judge([lost(0, 1), RankEvidence(beat(1, 9, "plan"), death="the process died"), lost(2, None)], LIMIT)
    assert verdict is not None
    assert (verdict.rank, verdict.kind, verdict.step, verdict.phase) == (1, "died", 11, "draft")
    assert verdict.reason == "the process died" and verdict.final and verdict.certain


def test_verdict_uses_the_latest_heartbeat_when_no_peer_reports_the_loss() -> None:
    verdict = judge([RankEvidence(beat(0, 11, "draft")), RankEvidence(beat(1, 9, "plan"), death="gone")], LIMIT)
    assert verdict is not None and not verdict.certain
    assert (verdict.rank, verdict.step, verdict.phase) == (1, 11, "draft")


def test_first_of_several_dead_ranks_is_the_rank_reported_lost_by_peers() -> None:
    verdict = judge([RankEvidence(death="aborted"), RankEvidence(death="killed"), lost(2, 1), lost(3, 1)], LIMIT)
    assert verdict is not None and (verdict.rank, verdict.reason) == (1, "killed")


@pytest.mark.parametrize("kind", ["failed", "out_of_step"])
def test_rank_with_its_own_failure_is_blamed_before_ranks_that_lost_a_peer(kind: str) -> None:
    verdict = judge([lost(0, 2), lost(1, None), own(2, kind)], LIMIT)
    assert verdict is not None and verdict.certain
    assert (verdict.rank, verdict.kind, verdict.step, verdict.phase) == (2, kind, 12, "extend")
    early = judge([lost(0, 2), RankEvidence(beat(1)), own(2, kind)], LIMIT)
    assert early is not None and not early.certain and early.rank == 2


def test_out_of_step_verdict_follows_the_majority_of_ranks() -> None:
    signs = [own(0, "out_of_step", 2), own(1, "out_of_step", 2), own(2, "out_of_step", 0)]
    verdict = judge(signs, LIMIT)
    assert verdict is not None and (verdict.rank, verdict.kind) == (2, "out_of_step")


def test_peer_reports_alone_are_enough_to_blame_a_rank() -> None:
    verdict = judge([lost(0, 1), RankEvidence(beat(1))], LIMIT)
    assert verdict is not None
    assert (verdict.rank, verdict.kind, verdict.final, verdict.certain) == (1, "died", True, False)
    nameless = judge([lost(0, None), RankEvidence(beat(1)), lost(2, None)], LIMIT)
    assert nameless is not None and nameless.rank == 1
    both = judge([lost(0, 1), lost(1, 0)], LIMIT)
    assert both is not None and (both.kind, both.certain) == ("failed", True)
    cut = judge([lost(0, 1), RankEvidence(beat(1), silence_s=2.0)], LIMIT)
    assert cut is not None and cut.kind == "died"  # a frozen one would keep its connections


@pytest.mark.parametrize(("silence", "final"), [(3.1, False), (5.9, False), (6.1, True)])
def test_silent_rank_is_blamed_before_a_rank_without_progress(silence: float, final: bool) -> None:
    signs = [RankEvidence(beat(0, 12, "plan", age_s=silence)), RankEvidence(beat(1, 11, "extend"), silence_s=silence)]
    verdict = judge(signs, LIMIT)
    assert verdict is not None and (verdict.rank, verdict.kind, verdict.final) == (1, "frozen", final)
    assert (verdict.step, verdict.phase) == (12, "plan")  # where its peer waits for it


def test_stall_is_blamed_on_a_silent_rank_below_the_silence_limit() -> None:
    verdict = judge([RankEvidence(beat(0, age_s=3.1)), RankEvidence(beat(1), silence_s=2.4)], LIMIT)
    assert verdict is not None and verdict.rank == 1 and not verdict.final


@pytest.mark.parametrize(("age", "final"), [(3.1, False), (8.9, False), (9.1, True)])
def test_answering_rank_without_progress_has_a_longer_limit(age: float, final: bool) -> None:
    verdict = judge(
        [RankEvidence(beat(0, 12, "plan", age_s=age)), RankEvidence(beat(1, 11, "extend", age_s=age))], LIMIT
    )
    assert verdict is not None
    assert (verdict.rank, verdict.kind, verdict.step, verdict.phase) == (1, "frozen", 11, "extend")
    assert verdict.final is final and "did nothing" in verdict.reason


def test_rank_that_waits_for_a_working_rank_is_never_blamed() -> None:
    signs = [
        RankEvidence(beat(0, age_s=500.0, waits=True)),
        RankEvidence(beat(1, unmarked_s=200.0)),
        RankEvidence(beat(2, age_s=1000.0, busy=False)),
    ]
    assert judge(signs, LIMIT) is None


def test_rank_without_progress_is_blamed_before_a_rank_that_waits() -> None:
    verdict = judge([RankEvidence(beat(0, 11, age_s=50.0, waits=True)), RankEvidence(beat(1, 12, age_s=4.0))], LIMIT)
    assert verdict is not None and (verdict.rank, verdict.final) == (1, False)


@pytest.mark.parametrize(("age", "final"), [(3.1, False), (9.1, True)])
def test_rank_furthest_behind_is_blamed_when_all_ranks_wait(age: float, final: bool) -> None:
    signs = [
        RankEvidence(beat(0, 12, age_s=50.0, waits=True)),
        RankEvidence(beat(1, 11, "draft", age_s=age, waits=True)),
    ]
    verdict = judge(signs, LIMIT)
    assert verdict is not None and (verdict.rank, verdict.phase, verdict.final) == (1, "draft", final)
    assert "all ranks have waited" in verdict.reason
    asleep = [RankEvidence(beat(0, 12, age_s=50.0, waits=True)), RankEvidence(beat(1, 12, age_s=age, busy=False))]
    verdict = judge(asleep, LIMIT)
    assert verdict is not None and verdict.rank == 1
    unheard = [RankEvidence(beat(0, 12, age_s=50.0, waits=True)), RankEvidence()]
    assert judge(unheard, LIMIT) is None


@pytest.mark.parametrize(("unmarked", "frozen"), [(299.0, False), (301.0, True)])
def test_rank_computing_without_progress_marks_is_frozen_after_a_hundred_limits(unmarked: float, frozen: bool) -> None:
    verdict = judge(
        [RankEvidence(beat(0, age_s=0.1, unmarked_s=unmarked)), RankEvidence(beat(1, waits=True, unmarked_s=900.0))],
        LIMIT,
    )
    assert (verdict is not None) is frozen
    if verdict is not None:
        assert (verdict.rank, verdict.final) == (0, True) and "stuck in one part of the step" in verdict.reason


def test_verdict_text_names_rank_step_and_phase() -> None:
    assert (
        str(judge([lost(0, 1), RankEvidence(beat(1), death="gone")], LIMIT))
        == "rank 1 died at step 11, phase draft: gone"
    )
