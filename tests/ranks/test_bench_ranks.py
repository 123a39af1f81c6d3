"""The ranks that benchmarks measure: real processes that run a case of requests."""

import pytest

from cluster.bench.ranks import GangCase, RankProcesses, RankRequest
from tests.tiny import draft_folder, target_folder


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_bench_ranks_run_a_case_to_its_end(world: int) -> None:
    """Real processes over gloo: repeated requests go on until the awaited one has ended, the same on every rank."""
    target = target_folder()
    settings = {
        "model_path": target, "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": draft_folder(target),
        "dtype": "float64", "device": "cpu", "max_total_tokens": 512, "num_threads": 1,
        "tp_size": world, "attn_dp_size": world,
    }  # fmt: skip
    jobs = [
        RankRequest("a", 0, [3, 4, 5], 6, resubmit=True),
        RankRequest("b", world - 1, [6, 7], 9),
        RankRequest("long", world - 1, list(range(1, 60)), 30, wait_until_idle=world > 1),
        RankRequest("after", world - 1, [8, 9], 50),
        RankRequest("last", world - 1, [8, 9], 5, after_request="b"),
    ]
    with RankProcesses(world) as ranks:
        lives = ranks.run(GangCase(settings, jobs, last_request="long"))
        again = ranks.run(GangCase(settings, [job for job in jobs if not job.resubmit]))
        with pytest.raises(RuntimeError, match="failed: ConfigError"):
            ranks.run(GangCase({**settings, "model_path": "/nowhere"}, jobs))
    assert len({len(life.steps) for life in lives}) == 1
    tokens = {name: got for life in lives for name, got in life.tokens.items()}
    assert any(name.startswith("a#") for name in tokens)
    assert (len(tokens["b"]), len(tokens["long"])) == (9, 30)
    alone = {name: got for life in again for name, got in life.tokens.items()}
    assert (alone["b"], alone["long"]) == (tokens["b"], tokens["long"])
    for name in ("b", "last"):
        assert name in lives[world - 1].output_times
    assert lives[world - 1].submitted_at["last"] >= lives[world - 1].output_times["b"][-1], (
        "it waits until that one has ended"
    )
    if world > 1:
        assert lives[1].submitted_at["long"] >= lives[1].output_times["b"][-1], "it waits until nothing else runs"
        assert lives[1].submitted_at["after"] > lives[1].submitted_at["long"], "it waits behind the one that waits"
