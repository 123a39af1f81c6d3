"""Declares every metric once, and fills the metrics; `cluster.observability.exposition` turns them into a page.

A rank fills `EngineMetrics` once per step; a replica with REST routes fills `ServingMetrics` once per chunk that it
sends. Rank and replica serialise their registries to JSON, and `merge` makes one page of the samples of all ranks and
replicas, so `/metrics` is the same on every replica. None of these metrics is a ratio: a reader adds up sums over ranks
and then divides them. (Only vLLM's KV usage, which `merge` computes, is a ratio.) A series whose labels are known in
advance is exported at 0 before its first event, because Prometheus sees no increase in a series whose first sample is
1.
"""

import importlib.metadata
import platform
import time
from bisect import bisect_left
from collections.abc import Iterable
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cluster import __version__
from cluster.observability.exposition import ProcessFacts, serialize
from cluster.observability.exposition import merge as merge
from cluster.observability.step_stats import PHASES, UNDRAFTED, StepStats
from cluster.request import FinishReason
from cluster.status import EngineStatus

Outcome = Literal["stop", "length", "abort", "error", "overloaded", "invalid"]
OUTCOMES: tuple[Outcome, ...] = ("stop", "length", "abort", "error", "overloaded", "invalid")
PAGE_STATES = ("free", "used", "cached")
LOSS_KINDS = ("died", "frozen", "failed", "out_of_step")  # those of `cluster.actors.messages.LossKind`
# The usual statuses; the series of another status appears with its first response.
STATUSES = (200, 400, 401, 403, 404, 408, 413, 415, 499, 500, 503)


def _version(package: str) -> str:
    """Return the version of a package without importing it; empty if it is not installed, as may be true of Ray."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


BUILD = {
    "version": __version__,
    "torch": _version("torch"),
    "ray": _version("ray"),
    "python": platform.python_version(),
}

_MS = 0.001
PHASE_BUCKETS = tuple(_MS * t for t in (0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096))
ITL_BUCKETS = (*(_MS * t for t in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512)), 1, 2.5, 10, 30, 60)
TTFT_BUCKETS = (*(_MS * t for t in (1, 5, 10, 20, 40, 60, 80, 100, 250, 500, 750)), 1, 2.5, 5, 10, 20, 40, 60)
TTFT_BUCKETS += (120, 240, 480, 960)
E2E_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0)
RESTART_BUCKETS = (0.5, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
TOKEN_BUCKETS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
# Up to 16 drafted or looked-up tokens and the bonus token. More are possible only if a grammar forces tokens.
ACCEPT_LEN_BUCKETS = tuple(float(n) for n in range(1, 18))


class BulkHistogram(Histogram):
    """A histogram that adds many equal values at about the cost of one."""

    def add(self, value: float, count: int = 1) -> None:
        """Observe `value` `count` times."""
        self._sum.inc(value * count)
        self._buckets[bisect_left(self._upper_bounds, value)].inc(count)

    def add_all(self, values: list[int]) -> None:
        """Observe every value of the list. The list should have few distinct values: it is scanned once for each."""
        self._sum.inc(sum(values))
        for value in set(values):
            self._buckets[bisect_left(self._upper_bounds, value)].inc(values.count(value))


# By field of StepStats: the name and the help text of the counter that sums this field over steps.
SUMS = {
    "own_seconds": ("aerie_own_seconds", "Time of steps outside collectives; greatest on a slow rank"),
    "waited_seconds": ("aerie_wait_seconds", "Time spent in collectives, waiting for peers"),
    "decode_requests": ("aerie_decode_requests", "Decoding requests, summed over steps"),
    "prompt_rows": ("aerie_prompt_rows", "Prompt rows computed"),
    "padded_rows": ("aerie_padded_rows", "Padding rows, computed to reach the planned size"),
    "target_rows": ("aerie_target_rows", "Rows of the target phase that belong to requests"),
    "drafts": ("aerie_drafts", "Trees verified"),
    "verified_nodes": ("aerie_verified_nodes", "Tree nodes verified, roots not counted"),
    "forced_nodes": ("aerie_forced_nodes", "Verified tree nodes that a grammar forced"),
    "looked_up_tokens": ("aerie_accepted_lookups", "Accepted tree nodes that were looked up, and not drafted"),
    "committed_tokens": ("aerie_generated_tokens", "Tokens committed to requests"),
    "cached_tokens": ("aerie_cached_tokens", "Prompt tokens found in KV pages, cached or of running requests"),
    "prompt_tokens": ("aerie_prompt_tokens", "Prompt tokens of admitted requests, cached ones included"),
    "admitted": ("aerie_admitted_requests", "Requests admitted, each counted once"),
    "retracted": ("aerie_retractions", "Requests sent back to the queue because pages ran out"),
    "nonfinite": ("aerie_nonfinite_requests", "Requests that ended because their logits were not finite"),
    "eager_fallbacks": ("aerie_launched_anew", "Steps not replayed, as a plan was unlike the captured one"),
    "expected_tokens": ("aerie_expected_tree_tokens", "Tokens that adaptive trees were expected to give, with bonus"),
    "explored": ("aerie_explored_steps", "Steps with another tree, only to learn what it gives or how long it takes"),
    "woken": ("aerie_woken_drafts", "Steps in which a draft that rested read what it had missed"),
}
# By field of EngineStatus: the name and the help text of its gauge.
STATES = {
    "running": ("aerie_running_requests", "Requests that hold slots"),
    "waiting": ("aerie_waiting_requests", "Requests queued for slots"),
    "queued_tokens": ("aerie_queued_tokens", "Prompt tokens not yet computed, of requests queued and running"),
}
STAGES = {
    "aerie_queue_seconds": "Submission to a rank to first admission to a step",
    "aerie_prefill_seconds": "First admission to first token",
    "aerie_decode_seconds": "First token to last token",
}


class EngineMetrics:
    """The metrics of one rank. Only the engine loop writes; any thread may serialise."""

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        *,
        model_name: str,
        rank: int = 0,
        depths: int = 0,
        trees: Iterable[tuple[int, int, int]] = (),
    ) -> None:
        """`depths` is the number of tree levels for which a series is created at once, 0 without speculation. `trees`
        are the labels (`TreeShape.label`) of the trees that steps may use.
        """
        self.registry = registry if registry is not None else CollectorRegistry()
        self.rank = rank
        names = ("model_name", "rank")
        own_labels = {"model_name": model_name, "rank": str(rank)}

        def counter(name: str, help_text: str, *extra: str) -> Counter:
            return Counter(name, help_text, (*names, *extra), registry=self.registry)

        def gauge(name: str, help_text: str, *extra: str) -> Gauge:
            return Gauge(name, help_text, (*names, *extra), registry=self.registry)

        def histogram(name: str, help_text: str, buckets: tuple[float, ...], *extra: str) -> BulkHistogram:
            return BulkHistogram(name, help_text, (*names, *extra), buckets=buckets, registry=self.registry)

        phase = histogram("aerie_step_phase_seconds", "Time of one phase of one step", PHASE_BUCKETS, "phase")
        pages = gauge("aerie_kv_pages", "KV pages by state; the three add up to the pool", "state")
        window_pages = gauge("aerie_kv_window_pages", "Pages of layers with a sliding window, by state", "state")
        accept = histogram("aerie_accept_length", "Tokens committed per tree, bonus included", ACCEPT_LEN_BUCKETS)
        tree_labels = "levels", "nodes", "looked_up"
        tree_steps = counter("aerie_tree_steps", "Steps that decode, by the tree of each request", *tree_labels)
        self._trees = {
            tree: tree_steps.labels(**own_labels, **dict(zip(tree_labels, map(str, tree), strict=True)))
            for tree in trees
        }
        undrafted = counter("aerie_undrafted_steps", "Steps that decode and draft nothing, by reason", "reason")
        self._undrafted = {reason: undrafted.labels(**own_labels, reason=reason) for reason in UNDRAFTED}
        self._depth = counter("aerie_accepted_by_depth", "Draft tokens accepted at a depth of the tree", "depth")
        self._own_labels = own_labels
        self._depths = [self._depth.labels(**own_labels, depth=str(level + 1)) for level in range(depths)]
        self.registry.register(ProcessFacts({**own_labels, "process": "rank"}))
        self._phases = {name: phase.labels(**own_labels, phase=name) for name in PHASES}
        self._accept = accept.labels(**own_labels)
        self._steps = counter("aerie_steps", "Steps taken").labels(**own_labels)
        finished = counter("aerie_finished_requests", "Requests that ended at a rank, by reason", "finished_reason")
        self._finished = {
            reason: finished.labels(**own_labels, finished_reason=reason) for reason in get_args(FinishReason)
        }
        self._stages = [
            histogram(name, help_text, E2E_BUCKETS).labels(**own_labels) for name, help_text in STAGES.items()
        ]
        self._sums = [(name, counter(*spec).labels(**own_labels)) for name, spec in SUMS.items()]
        self._accepted = counter("aerie_accepted_draft_tokens", "Draft tokens accepted").labels(**own_labels)
        self._latest = EngineStatus()
        for name, spec in STATES.items():
            self._export_status_field(gauge(*spec).labels(**own_labels), name)
        for state in PAGE_STATES:
            self._export_status_field(pages.labels(**own_labels, state=state), f"pages_{state}")
            self._export_status_field(window_pages.labels(**own_labels, state=state), f"window_pages_{state}")

    def _export_status_field(self, gauge: Gauge, name: str) -> None:
        """Make a gauge read field `name` of the latest status at each scrape, so that a step has no cost for it."""
        gauge.set_function(lambda: float(getattr(self._latest, name)))

    def observe_step(self, stats: StepStats) -> None:
        """Add the statistics of one step of this rank.

        Raises:
            ValueError: the statistics belong to another rank.
            KeyError: a phase is not in `PHASES`, the tree is not one of `trees`, or `undrafted` is not in `UNDRAFTED`.
        """
        if stats.rank != self.rank:
            raise ValueError(f"stats of rank {stats.rank} given to the metrics of rank {self.rank}")
        self._steps.inc()
        for phase, seconds in stats.phase_seconds.items():
            self._phases[phase].add(seconds)
        for name, counter in self._sums:
            if amount := getattr(stats, name):
                counter.inc(amount)
        if stats.accept_lens:
            self._accept.add_all(stats.accept_lens)
            self._accepted.inc(sum(stats.accepted_by_depth))
        if stats.tree is not None:
            self._trees[stats.tree].inc()
        if stats.undrafted is not None:
            self._undrafted[stats.undrafted].inc()
        for depth, count in enumerate(stats.accepted_by_depth):
            if depth == len(self._depths):
                self._depths.append(self._depth.labels(**self._own_labels, depth=str(depth + 1)))
            if count:
                self._depths[depth].inc(count)
        self._latest = stats.status

    def on_finished(
        self, reason: FinishReason, queue_s: float | None, prefill_s: float | None, decode_s: float | None
    ) -> None:
        """Count a request that ended, with its seconds in the queue, in prefill and in decoding. The seconds are None
        for a part that the request has not completed.
        """
        self._finished[reason].inc()
        for stage, seconds in zip(self._stages, (queue_s, prefill_s, decode_s), strict=True):
            if seconds is not None:
                stage.add(seconds)

    def serialize(self) -> bytes:
        """Return all series of this rank as JSON, for `merge`."""
        return serialize(self.registry)


class ServingMetrics:
    """The metrics of one Serve replica: its requests and answers, and the losses of its gang.

    Each output sequence of a call is a request of its own, with its own `RequestTimer`.
    """

    def __init__(self, registry: CollectorRegistry | None = None, *, model_name: str, replica: str = "") -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self._served_as, self._replica = model_name, replica
        names = ("model_name",)

        def counter(name: str, help_text: str, *extra: str) -> Counter:
            return Counter(name, help_text, (*names, *extra), registry=self.registry)

        def gauge(name: str, help_text: str, *extra: str) -> Gauge:
            return Gauge(name, help_text, (*names, *extra), registry=self.registry)

        def histogram(name: str, help_text: str, buckets: tuple[float, ...]) -> BulkHistogram:
            metric = BulkHistogram(name, help_text, names, buckets=buckets, registry=self.registry)
            return metric.labels(model_name=model_name)

        requests = counter("aerie_requests", "Requests ended, by outcome", "outcome")
        self.outcomes = {name: requests.labels(model_name=model_name, outcome=name) for name in OUTCOMES}
        open_requests = gauge("aerie_open_requests", "Requests at REST replicas, by state", "state")
        self.waiting = open_requests.labels(model_name=model_name, state="waiting")
        self.streaming = open_requests.labels(model_name=model_name, state="streaming")
        self.ttft = histogram("aerie_ttft_seconds", "Arrival to first token", TTFT_BUCKETS)
        self.itl = histogram("aerie_itl_seconds", "Time per token after the first", ITL_BUCKETS)
        self.e2e = histogram("aerie_e2e_seconds", "Arrival to the end of the request", E2E_BUCKETS)
        self.prompt_tokens = histogram("aerie_request_prompt_tokens", "Prompt tokens of a request", TOKEN_BUCKETS)
        self.generation_tokens = histogram("aerie_request_generation_tokens", "Tokens sent", TOKEN_BUCKETS)
        self._losses = counter("aerie_rank_losses", "Times that a gang was lost, by the rank to blame", "rank", "kind")
        help_of_responses = "Responses begun, by route and HTTP status; 499: the client left before"
        self._responses = counter("aerie_http_responses", help_of_responses, "route", "status")
        builds = gauge("aerie_build_info", "Always 1; the labels are versions", *BUILD)
        builds.labels(model_name=model_name, **BUILD).set(1)
        self.registry.register(ProcessFacts({"model_name": model_name, "rank": "", "process": "replica"}))
        restarts = counter("aerie_gang_restarts", "Gangs that served again after a loss")
        self._restarts = restarts.labels(model_name=model_name)
        self._restart_seconds = histogram("aerie_gang_restart_seconds", "Loss to serving again", RESTART_BUCKETS)
        resumed = counter("aerie_resumed_streams", "Streams submitted again after a loss")
        self._resumed = resumed.labels(model_name=model_name)

    def expect_ranks(self, world: int) -> None:
        """Create the loss series for a gang of `world` ranks, at 0."""
        for rank in range(world):
            for kind in LOSS_KINDS:
                self._losses.labels(model_name=self._served_as, rank=str(rank), kind=kind)

    def on_loss(self, rank: int, kind: str) -> None:
        """Count a loss of the gang; `rank` is the rank to blame, `kind` one of `LOSS_KINDS`."""
        self._losses.labels(model_name=self._served_as, rank=str(rank), kind=kind).inc()

    def expect_routes(self, routes: Iterable[str]) -> None:
        """Create the response series for these routes and the usual statuses, at 0."""
        for route in routes:
            for status in STATUSES:
                self._responses.labels(model_name=self._served_as, route=route, status=str(status))

    def on_response(self, route: str, status: int, times: int = 1) -> None:
        """Count `times` responses that began. `route` is the declared path, never the path of the request."""
        self._responses.labels(model_name=self._served_as, route=route, status=str(status)).inc(times)

    def on_restart(self, seconds: float) -> None:
        """Count a restart of the gang, which serves again `seconds` after the loss was noticed."""
        self._restarts.inc()
        self._restart_seconds.add(seconds)

    def on_resumed(self) -> None:
        """Count a stream that was submitted again, with the tokens that its client already has."""
        self._resumed.inc()

    def on_start(self, now: float | None = None) -> "RequestTimer":
        """Return the timer of a request that begins; call its `on_tokens` per chunk and `on_finish` at the end."""
        return RequestTimer(self, time.perf_counter() if now is None else now)

    def on_refused(self, outcome: Literal["overloaded", "invalid"], times: int = 1) -> None:
        """Count requests that were refused before they began: because of overload (503), or as invalid (4xx)."""
        self.outcomes[outcome].inc(times)

    def serialize(self) -> bytes:
        """Return all series of this replica as JSON for `merge`, with the clients' model name and the replica's id."""
        return serialize(self.registry, self._served_as, self._replica)


class RequestTimer:
    """Measures one request with `time.perf_counter`; a caller may pass a time of its own as `now` instead."""

    __slots__ = ("_arrived", "_last", "_metrics", "first_token_s", "outcome", "tokens")

    def __init__(self, metrics: ServingMetrics, now: float) -> None:
        self._metrics = metrics
        self._arrived = now
        self._last: float | None = None
        self.tokens = 0
        self.first_token_s: float | None = None  # since arrival
        self.outcome: Outcome | None = None  # None while the request is open
        metrics.waiting.inc()

    def on_tokens(self, count: int, now: float | None = None) -> None:
        """Record a chunk of `count` tokens. The tokens of a later chunk share the time since the previous chunk
        equally.
        """
        if count <= 0 or self.outcome is not None:
            return
        now = time.perf_counter() if now is None else now
        if self._last is None:
            self.first_token_s = now - self._arrived
            self._metrics.ttft.add(self.first_token_s)
            self._metrics.waiting.dec()
            self._metrics.streaming.inc()
            if count > 1:  # the other tokens of the first chunk came with the first one
                self._metrics.itl.add(0.0, count - 1)
        else:
            self._metrics.itl.add((now - self._last) / count, count)
        self._last = now
        self.tokens += count

    def on_finish(self, outcome: Outcome, prompt_tokens: int, now: float | None = None) -> None:
        """Record the end of the request. Later calls change nothing: an abort and the usual end may both call this."""
        if self.outcome is not None:
            return
        self.outcome = outcome
        metrics = self._metrics
        (metrics.waiting if self._last is None else metrics.streaming).dec()
        metrics.outcomes[outcome].inc()
        if outcome in ("overloaded", "invalid"):  # refused at once: not a latency of the service
            return
        metrics.e2e.add((time.perf_counter() if now is None else now) - self._arrived)
        metrics.prompt_tokens.add(prompt_tokens)
        metrics.generation_tokens.add(self.tokens)
