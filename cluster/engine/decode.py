"""Schedules decoding: which requests decode in the next step, their pages, and the depth of their trees.

- Every running request whose prompt is computed decodes in every step, unless the steps in flight are certain to end it
  by max_tokens.
- Before a step, each decoding request gets pages for all that it may write: the most tokens that it may have committed
  by then, and a window of W slots after them. Decoding requests get their pages before prompts do.
- When pages run out, the request admitted last is retracted: it loses its pages and goes back to the front of the
  queue. So the oldest request always makes progress.
- The rank votes for the trees of the step: for the largest one that `speculative_batch_tiers` and the limits of its
  decoding requests allow, and, if trees are adaptive, with what its requests are expected to gain (`tree_outlook.py`).
"""

from collections import deque

from cluster.config.resolved import ResolvedSettings
from cluster.dp_attention.facts import TreeVote
from cluster.engine.request_state import RequestState
from cluster.engine.schedule import Schedule
from cluster.engine.tree_outlook import TreeOutlook
from cluster.kv.cache import KVCache


class DecodeScheduler:
    """Keeps the running requests of one rank, in order of admission. Retracted requests go to `waiting`."""

    def __init__(self, resolved: ResolvedSettings, cache: KVCache, window: int, waiting: deque[RequestState]) -> None:
        """`window` is W, the slots beyond its committed tokens that a decoding request may write in a step."""
        self.running: list[RequestState] = []
        self.waiting, self._resolved, self._cache, self._window = waiting, resolved, cache, window
        self._shape = resolved.forced_shape
        self.outlook: TreeOutlook | None = None
        """Estimates how many tokens each tree gives. None if trees are fixed, and until their costs are measured."""

    def schedule(self, schedule: Schedule) -> None:
        """Add the requests that decode to `schedule`, with pages for their windows."""
        while True:
            schedule.decodes = [
                (request, request.lease)
                for request in self.running
                if request.lease is not None and not (request.prefilling or request.will_end)
            ]
            # The results of steps in flight are not known yet, so `max_committed` counts the most that they can commit.
            needed_tokens = [
                min(request.max_committed, request.max_running_tokens) + self.window_of(request)
                for request, _ in schedule.decodes
            ]
            if self._cache.grow([lease for _, lease in schedule.decodes], needed_tokens):
                for (_, lease), tokens in zip(schedule.decodes, needed_tokens, strict=True):
                    self._cache.cover(lease, tokens)
                break
            self._retract(self.running[-1])
            schedule.retracted_count += 1
        limits = [request.request.params.max_draft_tokens for request, _ in schedule.decodes]
        largest_limit = max((limit for limit in limits if limit is not None), default=None)
        max_tier = self._resolved.max_tier(len(schedule.decodes), None if None in limits else largest_limit)
        schedule.vote = TreeVote(max_tier) if self.outlook is None else self.outlook.vote(schedule.decodes, max_tier)

    def publish(self) -> None:
        """Put all pages that have become full into the radix tree, where other requests find them."""
        for sequence in self.running:
            if sequence.lease is not None:
                self._cache.publish(sequence.lease, sequence.tokens, sequence.committed)

    def stop(self, sequence: RequestState, shared_tokens: int) -> None:
        """Stop a running request and give up its pages. Other requests may read the KV of its first `shared_tokens`
        tokens; full pages of these stay in the radix tree.
        """
        assert sequence.lease is not None, "only a running request has a lease"
        self.running.remove(sequence)
        self._cache.close(sequence.lease, sequence.tokens, shared_tokens)
        sequence.detach()

    def window_of(self, sequence: RequestState) -> int:
        """W for this request. With a grammar, its trees may also have nodes for tokens that the grammar forces, which
        need more slots.
        """
        return self._window if sequence.request.params.grammar is None else max(self._window, self._shape.window)

    def max_new_pages(self, sequence: RequestState) -> int:
        """The most new pages that a running request can need for the step after the one that now begins. The step that
        now begins commits at most S + 1 tokens, and a request that still runs has at most `max_running_tokens`
        committed tokens.
        """
        assert sequence.lease is not None, "only running requests grow"
        if sequence.prefilling:
            max_tokens = len(sequence.tokens)
        else:
            max_tokens = min(sequence.max_committed + sequence.max_new_tokens(self._shape), sequence.max_running_tokens)
        return max(0, self._cache.pages_for(max_tokens + self.window_of(sequence)) - sequence.lease.page_count)

    def _retract(self, sequence: RequestState) -> None:
        self.stop(sequence, sequence.committed)
        self.waiting.appendleft(sequence)
