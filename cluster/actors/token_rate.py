"""How many tokens a second a running request gets: measured, and scaled to other numbers of running requests."""

import math
from collections.abc import Callable, Sequence
from functools import cache

from cluster.observability.step_times import StepTimes

TAU_S = 5.0  # time constant of the mean: after a burst it is the present rate again within so many seconds
KNOWN_TOKENS = 8  # for each running request, after which the measured rate is used
GUESSED_PER_S = 10.0  # tokens a second, assumed until then where steps were not measured


class TokenRate:
    """An exponential mean over the time in which requests ran."""

    def __init__(self, num_steps: int, groups: int) -> None:
        """`num_steps` are the levels of a drafted tree; the running requests are spread over `groups`."""
        self._num_steps, self._groups = num_steps, groups
        self._tokens = self._request_s = self._seconds = 0.0
        self._ever = 0  # tokens

    def given(self, tokens: int) -> None:
        """Running requests were given tokens."""
        self._tokens += tokens
        self._ever += tokens

    def passed(self, seconds: float, running: int) -> None:
        """`running` requests ran for so long."""
        if not running:
            return
        kept = math.exp(-seconds / TAU_S)
        self._tokens *= kept
        self._request_s = self._request_s * kept + seconds * running
        self._seconds = self._seconds * kept + seconds

    def by_running(self, running: Sequence[int], longest: int, pace: StepTimes | None) -> Callable[[int], float]:
        """Tokens a second of each running request, by how many of them a group runs; the longest has `longest` tokens.
        `running` are the lengths of those that the gang runs at present, and steps take what `pace` says.
        """
        known = self._tokens and self._ever >= KNOWN_TOKENS * max(1, len(running))
        if pace is None:
            per_s = self._tokens / self._request_s if known else GUESSED_PER_S
            return lambda count: per_s

        def step_s(count: int, length: int) -> float:
            return 1e-6 * pace.decoding((length,) * count)

        if known:
            usual = max(1, round(self._request_s / self._seconds / self._groups))
            tokens = self._tokens / self._request_s * step_s(usual, max(running, default=longest))
        else:  # prompts are computed beside them, and half of what a tree can give is accepted
            tokens = (1 + self._num_steps / 2) * (1 - pace.share)
        return cache(lambda count: tokens / step_s(count, longest))
