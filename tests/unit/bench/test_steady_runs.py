"""The run of a gang is timed while all requests of all its ranks decode."""

import pytest

from cluster.bench.steady_runs import RankSteps, joined


def test_a_run_is_timed_from_the_last_begin_to_the_first_end() -> None:
    ranks = [
        RankSteps(7, {0: [1, 2], 2: [3]}, [1.0, 1.5, 2.0, 2.5], [2, 4, 9, 9], begin=0, end=2),
        RankSteps(7, {1: [4, 5]}, [1.1, 1.6, 2.1, 2.6], [0, 1, 3, 8], begin=1, end=3),
        RankSteps(7, {}, [1.2, 1.7, 2.2, 2.7], [0, 0, 0, 0]),
    ]
    run = joined(ranks)
    assert run.tokens == [[1, 2], [4, 5], [3]]
    assert (run.steady_tokens, run.seconds) == (5 + 2, 0.5)
    assert run.tokens_per_second == 14.0


def test_ranks_that_began_with_different_steps_are_not_joined() -> None:
    ranks = [RankSteps(first_step, {0: [1]}, [1.0], [1], end=0) for first_step in (4, 5)]
    with pytest.raises(ValueError, match="different steps"):
        joined(ranks)
