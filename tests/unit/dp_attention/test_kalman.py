"""The Kalman filter gives the same estimates as a least-squares fit of all observations."""

from random import Random

import numpy as np
import pytest

from cluster.dp_attention.kalman import KalmanFilter, Weights


def test_without_drift_it_equals_regularised_least_squares() -> None:
    """Observations weigh by their noise. What is expected at the beginning counts like one more observation of each
    number of the state.
    """
    random, mean, deviations = Random(0), [1.0, 0.0, 0.5], [0.2, 0.5, 0.1]
    kalman = KalmanFilter(mean, deviations)
    precision = np.diag([1 / deviation**2 for deviation in deviations])
    total = precision @ np.array(mean)
    for _ in range(50):
        weights: Weights = ((0, random.uniform(1, 2)), (random.choice((1, 2)), random.uniform(-1, 1)))
        value, noise = random.gauss(1.5, 1), random.uniform(0.1, 0.5)
        kalman.observe(weights, value - kalman.expected(weights), noise)
        row = np.zeros(3)
        for i, weight in weights:
            row[i] = weight
        precision += np.outer(row, row) / noise
        total += row * value / noise
    assert kalman.mean == pytest.approx(np.linalg.solve(precision, total))
    assert np.array(kalman.covariance) == pytest.approx(np.linalg.inv(precision))
    assert kalman.variance(((0, 1.0), (1, -2.0))) == pytest.approx(
        np.array([1, -2, 0]) @ np.linalg.inv(precision) @ np.array([1, -2, 0])
    )


def test_what_may_have_changed_is_learned_anew() -> None:
    kalman = KalmanFilter([0.0, 0.0], [1.0, 1.0])
    for _ in range(100):
        kalman.observe(((0, 1.0), (1, 1.0)), 2 - kalman.expected(((0, 1.0), (1, 1.0))), 0.01)
    assert kalman.mean == pytest.approx([1, 1], abs=0.01), "nothing tells the two apart"
    for _ in range(200):
        kalman.drift((0.01, 0.0), 1)
        kalman.observe(((0, 1.0), (1, 1.0)), 5 - kalman.expected(((0, 1.0), (1, 1.0))), 0.01)
    assert kalman.mean == pytest.approx([4, 1], abs=0.3), "only the first number may have changed"
    kalman.drift((0.01, 0.01), 1000)
    assert [row[i] for i, row in enumerate(kalman.covariance)] == [1, 1], "as uncertain as at the beginning, not more"
