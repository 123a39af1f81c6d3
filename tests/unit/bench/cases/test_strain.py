import os
from dataclasses import replace

from cluster.bench.cases import crowd, strain
from cluster.bench.processes import alive, tree_of
from cluster.bench.streams import ClientStream, Prompt


def test_pauses_count_from_the_first_token_on() -> None:
    stream = ClientStream(Prompt("p"), started=100.0)
    watch = strain.Pauses(1)
    for tokens, now in ((0, 130.0), (1, 140.0), (1, 141.0), (3, 142.5), (4, 143.0)):
        stream.token_ids, stream.ended = [0] * tokens, now
        watch.look([stream])
    assert watch.longest_s == 2.5


def test_a_round_fails_by_a_loss_nobody_caused_and_by_none_where_one_was_due() -> None:
    well = strain.StrainRound("nothing", answered=9, asked=9)
    assert not well.failed
    assert replace(well, losses=1).failed
    assert replace(well, answered=8).failed
    frozen = strain.StrainRound("freeze rank 0", answered=9, asked=9, losses=1)
    assert not frozen.failed
    assert replace(frozen, losses=0).failed


def test_busy_loops_end_with_their_block() -> None:
    before = set(tree_of(os.getpid()))
    with strain.busy_loops(2):
        loops = set(tree_of(os.getpid())) - before
        assert len(loops) == 2
    assert not alive(loops)


def test_the_tables_say_what_was_seen() -> None:
    rounds = [strain.StrainRound("nothing", answered=9, asked=9, longest_pause_s=1.5)]
    text = strain.show(
        {"rounds": [{n: getattr(r, n) for n in strain.StrainRound.__slots__} for r in rounds], "start_s": 9.0}
    )
    assert "nothing" in text and "1.5" in text
    kill = crowd.KillRound("rank 0", open=116, resumed=116, healthy_s=12.0, resumed_s=0.25, cut=0, different=0)
    assert not kill.failed and replace(kill, resumed=115).failed
    assert replace(kill, open=0, resumed=0, healthy_s=None).failed, "nobody was killed"
    assert "0.25" in crowd.show({"rounds": [{n: getattr(kill, n) for n in crowd.KillRound.__slots__}]})
