from dataclasses import replace

from cluster.bench.cases import crowd


def test_kill_round_fails_if_a_request_is_not_resumed_or_no_rank_was_killed() -> None:
    kill = crowd.KillRound("rank 0", open=116, resumed=116, healthy_s=12.0, resumed_s=0.25, cut=0, different=0)
    assert not kill.failed and replace(kill, resumed=115).failed
    assert replace(kill, open=0, resumed=0, healthy_s=None).failed, "no rank was killed"
    assert "0.25" in crowd.show({"rounds": [{n: getattr(kill, n) for n in crowd.KillRound.__slots__}]})
