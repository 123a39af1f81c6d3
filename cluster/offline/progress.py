"""The progress bar of a batch: finished prompts, tokens per second and accept length."""

import time
from typing import Self

from tqdm.auto import tqdm

from cluster.offline.outputs import GrowingAnswer


class Progress:
    """A context manager that draws a bar on stderr, or a widget in a notebook."""

    def __init__(self, prompts: int, shown: bool) -> None:
        """`prompts` is the number of prompts; if `shown` is false, nothing is drawn."""
        self._bar = tqdm(total=prompts, desc="prompts", unit="prompt", disable=not shown, dynamic_ncols=True)
        self._began, self._tokens, self._steps, self._accepted = time.perf_counter(), 0, 0, 0

    def gave(self, tokens: int) -> None:
        """Add a step's token count."""
        self._tokens += tokens

    def done(self, answer: GrowingAnswer) -> None:
        """Count one prompt as finished, and update tokens per second and accept length."""
        for choice in answer.choices:
            if choice.speculation is not None:
                self._steps += choice.speculation.steps
                self._accepted += choice.speculation.accepted_tokens
        pace = f"{self._tokens / (time.perf_counter() - self._began):.1f} tokens/s"
        length = f", accept length {1 + self._accepted / self._steps:.2f}" if self._steps else ""
        self._bar.set_postfix_str(pace + length, refresh=False)
        self._bar.update()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()
