"""`max_draft_tokens`: a step accepts no more drafted tokens for a request than it allows, and no token changes."""

from dataclasses import replace
from itertools import cycle

import pytest

from cluster.config import EngineConfig
from cluster.engine import Engine, build_engine
from cluster.request import Request
from tests.parity.harness import config_of, grid_requests, plain_run, plain_texts, run, speculative_engine, tiny_pair
from tests.parity.trees import adaptive, engine_with_random_trees, engine_with_trees

LIMITS = (0, None, 1, 2, None, 9)


def limited(requests: list[Request], limits: tuple[int | None, ...]) -> list[Request]:
    """Return the requests with these limits in turn, and with the verified trees in their outputs."""
    return [
        replace(request, params=replace(request.params, max_draft_tokens=limit, return_tree=trees))
        for request, limit, trees in zip(requests, cycle(limits), cycle((True, False, True)), strict=False)
    ]


def engine_of(config: EngineConfig, sampling: str, trees: str) -> Engine:
    def build() -> Engine:
        return speculative_engine(adaptive(config) if trees == "adaptive" else config, "oracle", plain_texts(sampling))

    return engine_with_random_trees(build, seed=5) if trees == "adaptive" else build()


@pytest.mark.parametrize("trees", ["fixed", "adaptive"])
@pytest.mark.parametrize(("topk", "sampling"), [(1, "greedy"), (3, "0.8"), (3, "filtered")])
def test_steps_accept_no_more_drafted_tokens_than_allowed(topk: int, sampling: str, trees: str) -> None:
    requests = limited(grid_requests(sampling, 8), LIMITS)
    result = run(engine_of(config_of(*tiny_pair(), topk, 4), sampling, trees), requests)
    assert result.completions == plain_run(sampling).completions
    longest: dict[int | None, int] = {}
    for request in requests:
        limit = request.params.max_draft_tokens
        for output in result.outputs[request.request_id]:
            longest[limit] = max(longest.get(limit, 0), len(output.token_ids))
            if output.tree is not None and limit is not None:
                depths = [0]
                for parent in output.tree.parents[1:]:
                    depths.append(depths[parent] + 1)
                assert max(depths) <= limit, "a returned tree has the nodes that may be accepted"
    assert longest[0] == 1 and longest[1] == 2 and longest[2] == 3 and longest[None] > 3


@pytest.mark.parametrize("mode", ["fixed", "adaptive"])
def test_nothing_is_drafted_if_all_requests_turn_speculation_off(mode: str) -> None:
    config = config_of(*tiny_pair(), 1, 3, speculative_mode=mode)
    engine = build_engine(config)
    result = run(engine, limited(grid_requests("greedy", 4), (0,)))
    assert result.completions == {
        name: end for name, end in plain_run("greedy").completions.items() if name in result.completions
    }
    assert all(last.speculation is None for last in result.last.values())


def reasons_of(engine: Engine, requests: list[Request]) -> list[str | None]:
    """Run the requests to their end; return why each step that decoded drafted nothing, None for one that drafted."""
    for request in requests:
        engine.submit(request)
    reasons = []
    while engine.has_work:
        stats = engine.step().stats
        if stats.decode_requests:
            reasons.append(stats.undrafted)
    return reasons


def test_statistics_say_why_a_step_drafted_nothing() -> None:
    config = config_of(*tiny_pair(), 1, 3)
    requests = grid_requests("greedy", 2)
    engine = engine_with_trees(lambda: build_engine(adaptive(config)), [0, 0, 0])
    assert reasons_of(engine, requests)[:5] == ["cost", "cost", "cost", "waking", None]
    for mode in ("fixed", "adaptive"):
        engine = build_engine(config.model_copy(update={"speculative_mode": mode}))
        assert set(reasons_of(engine, limited(requests, (0,)))) == {"limit"}
    assert set(reasons_of(build_engine(config), requests)) == {None}
    assert set(reasons_of(build_engine(config_of(tiny_pair()[0])), requests)) == {None}, "nothing could be drafted"
