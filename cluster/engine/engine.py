"""The engine: takes requests, runs one step after another, returns their outputs. Not thread-safe: one loop owns it.

It is made of a scheduler (what runs in a step), a step loop (runs it on this rank, in lockstep with the gang) and a
committer (takes its results into the requests).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.arch.resolve import ResolvedConfig
from cluster.engine.committer import Committer
from cluster.engine.draft_sample import take_sample
from cluster.engine.finish import FinishCheck
from cluster.engine.lockstep import Lockstep
from cluster.engine.request_state import RequestState
from cluster.engine.request_times import RequestTimes
from cluster.engine.scheduler import Scheduler
from cluster.engine.step_loop import StepLoop, StepResult
from cluster.kv.cache import KVCache
from cluster.observability.metrics import StepStats
from cluster.request import Request, Seeds, SequenceOutput
from cluster.spec.inputs import EagleDraftInput
from cluster.status import EngineStatus
from cluster.tokenizer.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of an `Engine`; `cluster.engine.build` makes them."""

    resolved: ResolvedConfig
    cache: KVCache
    scheduler: Scheduler
    loop: StepLoop
    tokenizer: TextTokenizer | None

    @property
    def lockstep(self) -> Lockstep:
        """The step loop's side of the gang."""
        return self.loop.lockstep


class Engine:
    """The engine of a rank that takes requests: the leader of an attention group, which may have no other rank."""

    def __init__(self, parts: EngineParts) -> None:
        loop = parts.loop
        self.config, self.tokenizer, self.metrics = parts.resolved.settings, parts.tokenizer, loop.metrics
        self._p, self._loop, self.lockstep = parts, loop, loop.lockstep
        self._sequences: dict[str, RequestState] = {}
        self._committer = Committer(self._sequences, parts.scheduler, loop)
        self._seeds = Seeds(self.config.random_seed)
        self._over: list[SequenceOutput] = []  # outputs of requests that ended at once in `submit`
        # By the last plan: the largest `decode_us` of other groups, and how many other groups ran prompt rows.
        self._busiest = self._prefilling = self._submitted = 0
        self._begun: Callable[[tuple[str, ...]], None] = lambda ids: None
        # What an engine does as a member of its gang, its step loop does.
        self.sleep, self.ring, self.leave, self.close = loop.sleep, loop.ring, loop.leave, loop.close
        self.info, self.prepare_grammars, self.read_grammar = loop.info, loop.prepare_grammars, loop.read_grammar

    @property
    def has_work(self) -> bool:
        """Whether this rank has requests, outputs to return, or steps in flight."""
        return bool(self._sequences or self._over or self._loop.flights)

    @property
    def quiet(self) -> bool:
        """Whether no rank had requests in the last step (a rank alone ignores this), and this rank has no work."""
        return (self._loop.quiet or self.lockstep.mesh.world.size == 1) and not self.has_work

    @property
    def left(self) -> bool:
        """As `StepLoop.left`."""
        return self._loop.left

    @property
    def position(self) -> tuple[int, str]:
        """As `StepLoop.position`."""
        return self._loop.position

    @property
    def progress(self) -> tuple[int, bool]:
        """As `StepLoop.progress`."""
        return self._loop.progress

    def on_begun(self, call: Callable[[tuple[str, ...]], None]) -> None:
        """Have `call` called with the ids of the requests that a step admits, before that step runs."""
        self._begun = call

    def check(self, request: Request) -> None:
        """Raise if a request could never be served.

        Raises:
            ValueError: the message names the field and the limit.
        """
        p, params = self._p, request.params
        prompt = len(request.prompt_token_ids) - request.resumed_tokens
        if prompt < 1:
            raise ValueError("prompt must hold at least one token")
        vocab_size, context_length = p.resolved.target.vocab_size, p.resolved.context_length
        bad = [t for t in request.prompt_token_ids if not 0 <= t < vocab_size]
        if bad:
            raise ValueError(f"prompt holds token id {bad[0]}, outside the vocabulary of {vocab_size}")
        named = () if params.adjustments is None else params.adjustments.token_ids()
        if (other := next((t for t in named if not 0 <= t < vocab_size), None)) is not None:
            raise ValueError(f"adjustments name token id {other}, outside the vocabulary of {vocab_size}")
        if prompt + params.max_tokens > context_length:
            raise ValueError(
                f"prompt of {prompt} tokens plus max_tokens {params.max_tokens} exceeds the context length of "
                f"{context_length} tokens; shorten the prompt or lower max_tokens"
            )
        shape = p.resolved.shape if params.grammar is None else p.resolved.forced_shape
        # The window counts too: a step may write W slots beyond the last committed token.
        if p.cache.pages_for(prompt + params.max_tokens + shape.window) > p.cache.total:
            raise ValueError(
                f"prompt of {prompt} tokens plus max_tokens {params.max_tokens} does not fit the KV cache of "
                f"{p.cache.total * p.cache.page_size} tokens; lower max_tokens or give the KV cache more memory"
            )
        if params.stop and p.tokenizer is None:
            raise ValueError("stop needs a tokenizer, and the model folder has none; use stop_token_ids")

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: as `check`, or the request id is in use.
        """
        self._submitted += 1  # before the checks: routers count the requests that they sent, refused ones included
        self.check(request)
        if request.request_id in self._sequences:
            raise ValueError(f"request_id {request.request_id!r} is in use")
        p, params, ids = self._p, request.params, request.prompt_token_ids
        prompt_len = len(ids) - request.resumed_tokens
        target = p.resolved.target
        finish = FinishCheck(params, target.eos_token_ids, target.vocab_size, p.tokenizer, ids[:prompt_len])
        if request.resumed_tokens:  # the output that the client has may already end the request
            cut = finish.cut(ids[prompt_len:], params.max_tokens)
            if cut.reason is not None:
                self._over.append(SequenceOutput(request.request_id, (), (), cut.reason, cut.stop_reason))
                RequestTimes().finish(self.metrics, cut.reason)
                return
        request = self._seeds.fill(request)
        shape = p.resolved.shape if params.grammar is None else p.resolved.forced_shape
        sequence = RequestState(request, finish, list(ids), prompt_len, [0] * (shape.num_steps + 1))
        self._sequences[request.request_id] = sequence
        p.scheduler.waiting.append(sequence)

    def abort(self, request_id: str) -> None:
        """Drop a request and free its pages. Unknown ids are ignored."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._p.scheduler.release(sequence)
            sequence.times.finish(self.metrics, "abort")

    def step(self) -> StepResult:
        """Begin the next step of the gang: schedule, agree, draft -> target -> extend. Then commit the step whose
        results are due: this step, or on a GPU with `overlap` the step before it.

        Raises:
            GangError: a peer is gone, or ranks are out of step.
        """
        p, began = self._p, time.perf_counter()
        # What other groups decode is known from the last plan only: agreement comes after scheduling.
        schedule = p.scheduler.schedule(self._busiest, self._prefilling)
        if schedule.admitted:  # before the step runs: if it crashes, the replica suspects these requests
            self._begun(tuple(sequence.request.request_id for sequence in schedule.admitted))
        order = schedule.order(p.cache.table.unsent)
        scheduled = time.perf_counter()
        for sequence in schedule.fresh:
            sequence.times.admit(scheduled)
        # Each group votes for a tree depth by its own load; the plan takes the lowest vote.
        flight = self._loop.begin(order, schedule, len(self._sequences))
        flight.began, flight.seconds["schedule"] = began, scheduled - began
        plan, own_group = flight.plan, self.lockstep.mesh.dp_rank
        self._busiest = max((us for g, us in enumerate(plan.decode_us) if g != own_group), default=0)
        self._prefilling = sum(rows > 0 for g, rows in enumerate(plan.prompt_rows) if g != own_group)
        if flight.output is not None:  # otherwise nothing ran: the page table's changes stay unsent
            p.cache.table.sent()
            schedule.begin(flight.shape)
        idle, due = flight.output is None, self._loop.due(flight)
        outputs, self._over = self._over, []
        if due is not None:
            committed, stats = self._committer.commit(due, self.status)
            outputs = outputs + committed
        else:
            stats = StepStats(rank=self.lockstep.mesh.rank, status=self.status())
        if due is not None or idle:
            self.metrics.observe_step(stats)
        return StepResult(tuple(outputs), stats)

    def status(self) -> EngineStatus:
        """The current load and progress."""
        cache, scheduler = self._p.cache, self._p.scheduler
        return EngineStatus(
            steps=self._loop.steps,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            queued_tokens=scheduler.queued_tokens,
            pages_free=cache.free,
            pages_used=cache.used,
            pages_cached=cache.cached,
            accept_length=self._committer.accept_length,
            draft_rejected=self._committer.draft_watch.rejected,
            padded_rows=self._loop.padded_rows,
            own_seconds=self._loop.own_seconds,
            decode_drift=scheduler.correction.usual.value,
            prompt_drift=scheduler.correction.dearer.value,
            prefill_drift=scheduler.correction.alone.value,
            submitted=self._submitted,
        )

    def sample_draft(self, tokens: tuple[int, ...]) -> EagleDraftInput:
        """Return the output of the draft's extend after `tokens`. Only for an engine without requests."""
        assert not self.has_work, "requests are running"
        given = take_sample(tokens, self._p.lockstep, self._p.cache)
        assert given is not None, "an engine leads"
        return given

    def check_pages(self) -> None:
        """Assert that every page has exactly one owner."""
        self._p.cache.check()


Rank = Engine | StepLoop
"""A rank of a gang: the leader of an attention group, or a follower."""
