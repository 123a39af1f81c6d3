"""Tests of `cluster.bench.ranks`: the rank processes that benchmarks measure run a case of requests."""

import pytest

from cluster.bench.ranks import GangCase, RankProcesses, RankRequest
from tests.support.tiny_checkpoints import draft_folder, target_folder


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_bench_ranks_run_a_case_to_its_end(world: int) -> None:
    """Real processes communicate over gloo. A request with `resubmit` is repeated until the request `last_request` has
    ended. All ranks take the same number of steps.
    """
    target = target_folder()
    settings = {
        "model_path": target, "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": draft_folder(target),
        "dtype": "float64", "device": "cpu", "max_total_tokens": 512, "num_threads": 1,
        "tp_size": world, "attn_dp_size": world,
    }  # fmt: skip
    requests = [
        RankRequest("a", 0, [3, 4, 5], 6, resubmit=True),
        RankRequest("b", world - 1, [6, 7], 9),
        RankRequest("long", world - 1, list(range(1, 60)), 30, wait_until_idle=world > 1),
        RankRequest("after", world - 1, [8, 9], 50),
        RankRequest("last", world - 1, [8, 9], 5, after_request="b"),
    ]
    with RankProcesses(world) as processes:
        rank_runs = processes.run(GangCase(settings, requests, last_request="long"))
        second_runs = processes.run(GangCase(settings, [request for request in requests if not request.resubmit]))
        with pytest.raises(RuntimeError, match="failed: ConfigError"):
            processes.run(GangCase({**settings, "model_path": "/nowhere"}, requests))
    assert len({len(rank_run.steps) for rank_run in rank_runs}) == 1
    tokens = {request_id: token_ids for rank_run in rank_runs for request_id, token_ids in rank_run.tokens.items()}
    assert any(request_id.startswith("a#") for request_id in tokens)
    assert (len(tokens["b"]), len(tokens["long"])) == (9, 30)
    tokens_of_second_run = {
        request_id: token_ids for rank_run in second_runs for request_id, token_ids in rank_run.tokens.items()
    }
    assert (tokens_of_second_run["b"], tokens_of_second_run["long"]) == (tokens["b"], tokens["long"])
    for request_id in ("b", "last"):
        assert request_id in rank_runs[world - 1].output_times
    assert rank_runs[world - 1].submitted_at["last"] >= rank_runs[world - 1].output_times["b"][-1], (
        "request last waits until request b has ended"
    )
    if world > 1:
        assert rank_runs[1].submitted_at["long"] >= rank_runs[1].output_times["b"][-1], (
            "request long waits until b has ended"
        )
        assert rank_runs[1].submitted_at["after"] > rank_runs[1].submitted_at["long"], "request after waits behind long"
