"""Tests of `cluster.bench.ranks` and `steady_runs`: the rank processes that benchmarks measure run requests."""

import pytest

from cluster.bench import steady_rank
from cluster.bench.ranks import GangCase, RankProcesses, RankRequest
from cluster.bench.steady_runs import Gangs, SingleRanks, run_together
from cluster.config import EngineConfig
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


@pytest.mark.slow
def test_gangs_generate_the_tokens_of_single_ranks() -> None:
    """Contenders take turns after a few steps. Ranks have different numbers of requests, and one rank may have none."""
    target = target_folder()
    settings = {
        "model_path": target, "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": draft_folder(target),
        "dtype": "float64", "device": "cpu", "max_total_tokens": 512, "num_threads": 1, "random_seed": 0,
    }  # fmt: skip
    configs = {mode: EngineConfig.from_kwargs({**settings, "speculative_mode": mode}) for mode in ("fixed", "adaptive")}
    of_ranks = {"tp_size": 2, "attn_dp_size": 2}
    prompts = [[3, 4, 5], list(range(1, 40)), [6, 7]]
    single = SingleRanks(configs)
    with RankProcesses(2, steady_rank.__name__) as processes:
        gangs = Gangs({name: config.model_copy(update=of_ranks) for name, config in configs.items()}, processes)
        for batch in (prompts, prompts[:1], prompts):
            runs, expected_runs = (run_together(c, c.names, batch, 0.0, 8) for c in (gangs, single))
            for name, run in runs.items():
                assert run.steady_tokens >= 8 and run.seconds > 0
                assert [len(tokens) > 0 for tokens in run.tokens] == [True] * len(batch)
                for own, other in zip(run.tokens, expected_runs[name].tokens, strict=True):
                    length = min(len(own), len(other))
                    assert own[:length] == other[:length]
        with pytest.raises(RuntimeError, match="failed: KeyError"):
            gangs.begin("unknown", prompts, 0.0, 8)
