"""A Kalman filter (R. E. Kalman, 1960) for a state of few numbers, of which single numbers are observed one at a time.

It computes with Python's floats alone: additions, multiplications and divisions give the same bits on every machine, so
ranks that observe the same values agree on every estimate. The product of two matrices in a library does not promise
that.
"""

from collections.abc import Sequence

Weights = Sequence[tuple[int, float]]
"""A weighted sum of the state: for each summand, its index in the state and its weight."""


class KalmanFilter:
    """Estimates of N numbers (the state), with their covariance.

    `mean` are the N estimates. `covariance` are N rows of N numbers: how uncertain the estimates are, and how much the
    errors of two of them go together.
    """

    def __init__(self, mean: Sequence[float], deviations: Sequence[float]) -> None:
        """Begin with the estimates `mean`, whose errors have the standard deviations `deviations`."""
        self.mean = list(mean)
        self.covariance = [
            [deviation**2 if i == j else 0.0 for j in range(len(mean))] for i, deviation in enumerate(deviations)
        ]

    def drift(self, variances: Sequence[float]) -> None:
        """Let time pass: number i of the state may have changed by an unknown amount of variance `variances[i]`."""
        for i, variance in enumerate(variances):
            self.covariance[i][i] += variance

    def expected(self, weights: Weights) -> float:
        """Return the expected value of a weighted sum of the state."""
        return sum(weight * self.mean[i] for i, weight in weights)

    def variance(self, weights: Weights) -> float:
        """Return the variance of the error of `expected(weights)`; at least 0."""
        covariance = self.covariance
        return max(0.0, sum(a * b * covariance[i][j] for i, a in weights for j, b in weights))

    def observe(self, weights: Weights, surprise: float, noise: float) -> None:
        """Learn from an observation of a weighted sum of the state. `surprise` is the observed value minus
        `expected(weights)`. `noise` is the variance of the observation itself, above 0.
        """
        rows = [(self.covariance[i], weight) for i, weight in weights]
        shared = [sum(weight * row[j] for row, weight in rows) for j in range(len(self.mean))]
        scale = 1 / (sum(weight * shared[i] for i, weight in weights) + noise)
        gains = [value * scale for value in shared]
        self.mean = [value + gain * surprise for value, gain in zip(self.mean, gains, strict=True)]
        for row, gain in zip(self.covariance, gains, strict=True):
            if gain:
                row[:] = [value - gain * other for value, other in zip(row, shared, strict=True)]
