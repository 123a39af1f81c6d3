"""A cell whose ratios miss the goal is measured again with more repeats, and these count."""

from typing import Any

from cluster.bench.cases import adaptive
from cluster.bench.cases.adaptive import ADAPTIVE, LoadCell, Size
from cluster.bench.steady_runs import SteadyRun

SIZE = Size(sweeps=1, repeats=2, more_repeats=5)


class SimulatedContenders:
    """Plain decoding generates 100 tokens a second, and a chain 50. Run i with adaptive trees generates
    `adaptive_speeds[i]` tokens a second; runs after the last of these speeds repeat it.
    """

    def __init__(self, adaptive_speeds: list[float]) -> None:
        self.names = ["plain", "chain of 3", ADAPTIVE]
        self._speeds = {"plain": [100.0], "chain of 3": [50.0], ADAPTIVE: adaptive_speeds}
        self._runs = dict.fromkeys(self.names, 0)

    def begin(self, name: str, prompts: Any, temperature: float, new_tokens: int) -> None:
        pass

    def advance(self, name: str, steps: int) -> bool:
        return True

    def finish(self, name: str) -> SteadyRun:
        speeds = self._speeds[name]
        speed = speeds[min(self._runs[name], len(speeds) - 1)]
        self._runs[name] += 1
        return SteadyRun([[1, 2]], int(speed), 1.0)


def measure_cell(adaptive_speeds: list[float]) -> dict[str, Any]:
    return adaptive._measure_cell(LoadCell("code", 0.0, 1), SimulatedContenders(adaptive_speeds), [[1]], SIZE)


def test_a_cell_that_misses_the_goal_is_measured_again() -> None:
    # The first two runs are the warm-up and the sweep, so the measurement begins with the third speed.
    missed = measure_cell([100.0, 100.0, 90.0, 90.0, 99.0])
    assert (missed["of_plain"], missed["repeats"]) == (0.99, 5)
    assert missed["first_ratios"] == {"of_plain": 0.9, "of_best_fixed": 0.9}
    assert missed["best_fixed"] == "plain" and missed["tokens_per_second"][ADAPTIVE] == 99.0


def test_a_second_measurement_counts_also_if_it_is_worse() -> None:
    missed = measure_cell([100.0, 100.0, 97.0, 97.0, 80.0])
    assert (missed["of_plain"], missed["repeats"]) == (0.8, 5)


def test_a_cell_that_holds_the_goal_is_measured_once() -> None:
    held = measure_cell([100.0, 100.0, 110.0, 110.0, 1.0])
    assert (held["of_plain"], held["repeats"]) == (1.1, 2)
    assert held["first_ratios"] == {"of_plain": 1.1, "of_best_fixed": 1.1}
