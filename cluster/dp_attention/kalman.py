"""A Kalman filter (R. E. Kalman, 1960) for a state of few numbers. Each observation is one weighted sum of the state.

It only adds, multiplies and divides Python's floats, always in the same order. So ranks that observe the same values
get the same bits for every estimate, whatever machine they run on. The product of two matrices in a library, a power,
or `sum` do not promise that.
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
            [deviation * deviation if i == j else 0.0 for j in range(len(mean))]
            for i, deviation in enumerate(deviations)
        ]
        self._first_variances = [deviation * deviation for deviation in deviations]

    def drift(self, variances: Sequence[float], times: int) -> None:
        """Let time pass, `times` times: number i of the state may have changed by an unknown amount of variance
        `variances[i]` each time. Nothing gets more uncertain than it was at the beginning.
        """
        for i, variance in enumerate(variances):
            row, limit = self.covariance[i], self._first_variances[i]
            row[i] = max(row[i], min(limit, row[i] + times * variance))

    def expected(self, weights: Weights) -> float:
        """Return the expected value of a weighted sum of the state."""
        total = 0.0
        for i, weight in weights:
            total += weight * self.mean[i]
        return total

    def variance(self, weights: Weights) -> float:
        """Return the variance of the error of `expected(weights)`."""
        total = 0.0
        for i, a in weights:
            row = self.covariance[i]
            for j, b in weights:
                total += a * b * row[j]
        return max(0.0, total)

    def observe(self, weights: Weights, surprise: float, noise: float) -> None:
        """Learn from an observation of a weighted sum of the state. `surprise` is the observed value minus
        `expected(weights)`. `noise` is the variance of the observation itself, above 0.
        """
        shared = [0.0] * len(self.mean)
        for i, weight in weights:
            shared = [value + weight * other for value, other in zip(shared, self.covariance[i], strict=True)]
        total = noise
        for i, weight in weights:
            total += weight * shared[i]
        gains = [value / total for value in shared]
        self.mean = [value + gain * surprise for value, gain in zip(self.mean, gains, strict=True)]
        self.covariance = [
            [value - gain * other for value, other in zip(row, shared, strict=True)]
            for row, gain in zip(self.covariance, gains, strict=True)
        ]
