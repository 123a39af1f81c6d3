"""The progress bar of a batch: finished prompts, tokens per second and accept length."""

import time
from typing import Self

from tqdm.auto import tqdm

from cluster.offline.outputs import PendingAnswer


class Progress:
    """A context manager that draws a progress bar on stderr, or as a widget in a notebook."""

    def __init__(self, prompts: int, visible: bool) -> None:
        """`prompts` is the number of prompts; if `visible` is false, nothing is drawn."""
        self._bar = tqdm(total=prompts, desc="prompts", unit="prompt", disable=not visible, dynamic_ncols=True)
        self._started_at, self._tokens, self._steps, self._accepted = time.perf_counter(), 0, 0, 0

    def add_tokens(self, tokens: int) -> None:
        """Add a number of generated tokens to the total."""
        self._tokens += tokens

    def add_finished(self, answer: PendingAnswer) -> None:
        """Count one prompt as finished, and update tokens per second and accept length."""
        for choice in answer.choices:
            if choice.speculation is not None:
                self._steps += choice.speculation.steps
                self._accepted += choice.speculation.accepted_tokens
        rate = f"{self._tokens / (time.perf_counter() - self._started_at):.1f} tokens/s"
        accept_length = f", accept length {1 + self._accepted / self._steps:.2f}" if self._steps else ""
        self._bar.set_postfix_str(rate + accept_length, refresh=False)
        self._bar.update()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()
