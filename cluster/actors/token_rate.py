"""Measures the tokens per second of a running request, and predicts them for other numbers of running requests."""

import math
from collections.abc import Callable, Sequence
from functools import cache

from cluster.observability.step_times import StepTimes

TAU_S = 5.0  # time constant of the mean in seconds: older tokens count less and less
MIN_MEASURED_TOKENS = 8  # tokens per running request after which the measured rate is used
DEFAULT_TOKENS_PER_S = 10.0  # tokens per second, assumed before `MIN_MEASURED_TOKENS` if step times were not measured


class TokenRate:
    """The tokens per second of a running request: an exponential mean over the time in which requests ran."""

    def __init__(self, num_steps: int, groups: int) -> None:
        """`num_steps` is the depth of a drafted tree; requests are spread over `groups` attention groups."""
        self._num_steps, self._groups = num_steps, groups
        self._tokens = self._request_s = self._seconds = 0.0
        self._total_tokens = 0  # all tokens since the start

    def on_tokens(self, tokens: int) -> None:
        """Record that running requests got `tokens` tokens."""
        self._tokens += tokens
        self._total_tokens += tokens

    def on_time_passed(self, seconds: float, running: int) -> None:
        """Record that `running` requests ran for `seconds`. If it is 0, nothing changes: the time does not count."""
        if not running:
            return
        decay = math.exp(-seconds / TAU_S)
        self._tokens *= decay
        self._request_s = self._request_s * decay + seconds * running
        self._seconds = self._seconds * decay + seconds

    def rates_by_running(
        self, running: Sequence[int], longest: int, step_times: StepTimes | None
    ) -> Callable[[int], float]:
        """Return a function that maps the number of running requests in a group to the tokens per second of each of
        them. The longest request is assumed to have `longest` tokens. `running` holds the lengths in tokens of the
        gang's running requests. `step_times` holds the measured step times, or is None if steps are not measured.
        """
        is_measured = self._tokens and self._total_tokens >= MIN_MEASURED_TOKENS * max(1, len(running))
        if step_times is None:
            tokens_per_s = self._tokens / self._request_s if is_measured else DEFAULT_TOKENS_PER_S
            return lambda count: tokens_per_s

        def step_s(count: int, length: int) -> float:
            return 1e-6 * step_times.decoding((length,) * count)

        # Tokens per second = tokens per step / seconds per step. The tokens per step are the measured rate times the
        # seconds of a step with the usual number of requests per group; without a measured rate they are a guess.
        if is_measured:
            usual_count = max(1, round(self._request_s / self._seconds / self._groups))
            tokens = self._tokens / self._request_s * step_s(usual_count, max(running, default=longest))
        else:  # guess: half of a tree's levels are accepted, and prompts take `step_times.share` of the time
            tokens = (1 + self._num_steps / 2) * (1 - step_times.share)
        return cache(lambda count: tokens / step_s(count, longest))
