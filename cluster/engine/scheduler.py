"""The scheduler of one rank: decides what runs in the next step.

It knows pages (through the cache), but no tensors and no models. `prefill.py` decides which prompts get
rows and which waiting requests are admitted, `decode.py` which requests decode and which are retracted.
"""

from collections import deque

from cluster.config.resolved import ResolvedSettings
from cluster.engine.decode import DecodeScheduler
from cluster.engine.prefill import PrefillScheduler
from cluster.engine.request_state import RequestState
from cluster.engine.schedule import Schedule
from cluster.kv.cache import KVCache
from cluster.observability.step_times import StepTimes


class Scheduler:
    """The waiting queue and the running list of one rank."""

    def __init__(
        self,
        resolved: ResolvedSettings,
        cache: KVCache,
        window: int,
        pace: StepTimes | None = None,
        chunk_sizes: tuple[int, ...] = (),
    ) -> None:
        """`window` as in `DecodeScheduler`, `pace` and `chunk_sizes` as in `PrefillScheduler`."""
        self.waiting: deque[RequestState] = deque()
        self._cache = cache
        self.decode = DecodeScheduler(resolved, cache, window, self.waiting)
        self.prefill = PrefillScheduler(resolved, cache, self.decode, pace, chunk_sizes)
        self.running, self.learn, self.correction = self.decode.running, self.prefill.learn, self.prefill.correction

    @property
    def queued_tokens(self) -> int:
        """How many tokens of waiting and running requests are still to be computed as prompt rows. After a retraction
        these include tokens of the output.
        """
        running = sum(len(request.tokens) - request.max_committed for request in self.running if request.prefilling)
        return running + sum(len(request.tokens) for request in self.waiting)

    def schedule(self, max_decode_us: int = 0, prefilling_groups: int = 0) -> Schedule:
        """Return the work of the next step, and give the requests the pages that they need for it. `max_decode_us` and
        `prefilling_groups` describe the other groups, as in `PrefillScheduler.schedule`.
        """
        schedule = Schedule()
        self.decode.publish()  # first, so that requests admitted now find the pages of the last step
        self.decode.schedule(schedule)
        self.prefill.schedule(schedule, max_decode_us, prefilling_groups)
        if self.decode.outlook is not None:
            for request in schedule.admitted:
                self.decode.outlook.admit(request.row, not request.request.params.greedy)
        schedule.vote = schedule.vote._replace(prompt_us=int(schedule.prompt_us))
        schedule.copies = self._cache.take_copies()
        return schedule

    def release(self, sequence: RequestState) -> None:
        """Drop a request, waiting or running. Of a running request, the full pages with committed tokens go to the
        radix tree.
        """
        if sequence.lease is None:
            self.waiting.remove(sequence)
        else:
            self.decode.stop(sequence, sequence.committed)

    def discard(self, sequence: RequestState) -> None:
        """Drop a running request and its KV: no page that it still owns enters the radix tree."""
        self.decode.stop(sequence, 0)
