"""The run of a gang is timed while all requests of all its ranks decode. Compared contenders take turns."""

import pytest

from cluster.bench import steady_runs
from cluster.bench.steady_runs import TURN_S, RankSteps, SteadyRun, joined, run_together


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


class TimedContenders:
    """Each contender has a number of steps to run, which take simulated time. `turns` records the turns."""

    def __init__(self, steps: dict[str, int], step_s: dict[str, float]) -> None:
        self.names, self._left, self._step_s = list(steps), dict(steps), step_s
        self.now, self.turns = 0.0, list[tuple[str, int]]()

    def perf_counter(self) -> float:
        return self.now

    def begin(self, name: str, prompts: object, temperature: float, new_tokens: int) -> None:
        pass

    def advance(self, name: str, steps: int) -> bool:
        self.turns.append((name, min(steps, self._left[name])))
        self.now += self._step_s[name] * steps
        self._left[name] -= steps
        return self._left[name] <= 0

    def finish(self, name: str) -> SteadyRun:
        return SteadyRun([], 1, 1.0)


def test_contenders_take_turns_of_equal_time_until_the_last_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    contenders = TimedContenders({"fast": 20, "slow": 4}, {"fast": TURN_S / 8, "slow": 2 * TURN_S})
    monkeypatch.setattr(steady_runs, "time", contenders)
    assert list(run_together(contenders, contenders.names, [[1]], 0.0, 8)) == ["fast", "slow"]
    fast, slow = ([steps for name, steps in contenders.turns if name == own] for own in contenders.names)
    assert fast == [1, 2, 4, 8, 5] and slow == [1, 1, 1, 1], "turns of the fast one grow to 8 steps"
    assert [name for name, _ in contenders.turns[:8]] == ["fast", "slow"] * 4
