from cluster.bench.rank_counts import RankCounts, counter_growth, parse_counts
from cluster.observability.metrics import EngineMetrics, merge
from cluster.observability.step_stats import StepStats


def metrics_page(*steps: tuple[int, StepStats]) -> str:
    metrics = [EngineMetrics(model_name="m", rank=rank, trees=[(0, 1, 0), (3, 4, 0)]) for rank in (0, 1)]
    for rank, step in steps:
        metrics[rank].observe_step(step)
    return merge([m.serialize() for m in metrics]).decode()


TREES = StepStats(admitted=2, committed_tokens=7, drafts=2, accept_lens=[3, 4], accepted_by_depth=[2, 2, 1])
PADDED = StepStats(padded_rows=8, rank=1)


def test_counter_growth_gives_each_ranks_work_between_two_metrics_pages() -> None:
    before = parse_counts(metrics_page((0, TREES)))
    after = parse_counts(metrics_page((0, TREES), (0, TREES), (1, PADDED)))
    assert before == {0: RankCounts(2, 7, 2, 5, 0), 1: RankCounts()}
    assert counter_growth(before, after) == {0: RankCounts(2, 7, 2, 5, 0), 1: RankCounts(padded_rows=8)}
    assert counter_growth({}, after)[0] == RankCounts(4, 14, 4, 10, 0), "counts of a new rank grow from zero"


def test_tree_levels_are_the_mean_over_the_steps_that_decoded() -> None:
    steps = [(0, StepStats(tree=(3, 4, 0))), (0, StepStats(tree=(0, 1, 0))), (0, StepStats())]
    counts = parse_counts(metrics_page(*steps, steps[0]))
    assert counts[0].tree_levels == 2 and counts[1].tree_levels is None
