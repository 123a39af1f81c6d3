"""An event loop with simulated time: what it measures does not depend on how busy the machine is."""

import asyncio
import selectors


class SkippingSelector(selectors.SelectSelector):
    """A selector that never sleeps: its clock `now` shows that it did."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += max(timeout or 0.0, 1e-6)  # time passes also without waiting
        return super().select(0)


class SimulatedTimeLoop(asyncio.SelectorEventLoop):
    """An event loop in which waiting takes no real time."""

    def __init__(self) -> None:
        self._simulated_time = SkippingSelector()
        super().__init__(self._simulated_time)

    def time(self) -> float:
        return self._simulated_time.now
