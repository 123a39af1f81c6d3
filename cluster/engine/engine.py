"""The engine: takes requests, runs one step after another, returns their outputs. It is not thread-safe: one thread
uses it, except for the methods that `StepLoop` allows to any thread.

It has three parts. The scheduler decides what runs in a step. The step loop runs the step on this rank, in lockstep
with the gang (the ranks of one replica). The committer takes the results of the step into the requests.
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
from cluster.observability.step_stats import StepStats
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
        """The `Lockstep` of the step loop: it runs this rank's steps together with the other ranks of the gang."""
        return self.loop.lockstep


class Engine:
    """The engine of a rank that takes requests: the leader of an attention group, which may have no other rank."""

    def __init__(self, parts: EngineParts) -> None:
        loop = parts.loop
        self.config, self.tokenizer, self.metrics = parts.resolved.settings, parts.tokenizer, loop.metrics
        self._parts, self._loop, self.lockstep = parts, loop, loop.lockstep
        self._sequences: dict[str, RequestState] = {}
        self._committer = Committer(self._sequences, parts.scheduler, loop)
        self._seeds = Seeds(self.config.random_seed)
        self._immediate_outputs: list[SequenceOutput] = []  # outputs of requests that ended at once in `submit`
        # By the last plan: the largest `decode_us` of other groups, and how many other groups ran prompt rows.
        self._max_decode_us = self._prefilling_groups = self._submitted = 0
        self._on_admitted: Callable[[tuple[str, ...]], None] = lambda ids: None
        # The step loop does all that an engine does as a member of its gang.
        self.sleep, self.wake_ranks, self.leave, self.close = loop.sleep, loop.wake_ranks, loop.leave, loop.close
        self.info, self.prepare_grammars, self.read_grammar = loop.info, loop.prepare_grammars, loop.read_grammar

    @property
    def has_work(self) -> bool:
        """Whether this rank has requests, outputs to return, or steps in flight."""
        return bool(self._sequences or self._immediate_outputs or self._loop.in_flight)

    @property
    def is_idle(self) -> bool:
        """Whether this rank has no work, and no rank had requests in the last step. In a gang of one rank the last step
        does not matter.
        """
        return (self._loop.is_idle or self.lockstep.mesh.world.size == 1) and not self.has_work

    @property
    def has_ended(self) -> bool:
        """As `StepLoop.has_ended`."""
        return self._loop.has_ended

    @property
    def position(self) -> tuple[int, str]:
        """As `StepLoop.position`."""
        return self._loop.position

    @property
    def progress(self) -> tuple[int, bool]:
        """As `StepLoop.progress`."""
        return self._loop.progress

    def on_admitted(self, callback: Callable[[tuple[str, ...]], None]) -> None:
        """Set `callback`: before each step that admits requests, the engine calls it with the ids of these requests."""
        self._on_admitted = callback

    def check(self, request: Request) -> None:
        """Raise if a request could never be served.

        Raises:
            ValueError: the message names the field and the limit.
        """
        parts, params = self._parts, request.params
        prompt_len = len(request.prompt_token_ids) - request.resumed_tokens
        if prompt_len < 1:
            raise ValueError("prompt must hold at least one token")
        vocab_size, context_length = parts.resolved.target.vocab_size, parts.resolved.context_length
        invalid_tokens = [token for token in request.prompt_token_ids if not 0 <= token < vocab_size]
        if invalid_tokens:
            raise ValueError(f"prompt holds token id {invalid_tokens[0]}, outside the vocabulary of {vocab_size}")
        adjusted_tokens = () if params.adjustments is None else params.adjustments.token_ids()
        if (
            invalid_token := next((token for token in adjusted_tokens if not 0 <= token < vocab_size), None)
        ) is not None:
            raise ValueError(f"adjustments name token id {invalid_token}, outside the vocabulary of {vocab_size}")
        if prompt_len + params.max_tokens > context_length:
            raise ValueError(
                f"prompt of {prompt_len} tokens plus max_tokens {params.max_tokens} exceeds the context length of "
                f"{context_length} tokens; shorten the prompt or lower max_tokens"
            )
        shape = parts.resolved.shape if params.grammar is None else parts.resolved.forced_shape
        # The window counts too: a step may write W slots beyond the last committed token.
        if parts.cache.pages_for(prompt_len + params.max_tokens + shape.window) > parts.cache.total_pages:
            raise ValueError(
                f"prompt of {prompt_len} tokens plus max_tokens {params.max_tokens} does not fit the KV cache of "
                f"{parts.cache.total_pages * parts.cache.page_size} tokens; lower max_tokens or give the KV cache more "
                "memory"
            )
        if params.grammar is not None and parts.resolved.settings.synthetic_acceptance:
            raise ValueError(
                "a grammar cannot be followed while synthetic_acceptance is set, as it makes up the output; send no "
                "grammar, or unset it"
            )
        if params.stop and parts.tokenizer is None:
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
        parts, params, token_ids = self._parts, request.params, request.prompt_token_ids
        prompt_len = len(token_ids) - request.resumed_tokens
        target = parts.resolved.target
        finish = FinishCheck(params, target.eos_token_ids, target.vocab_size, parts.tokenizer, token_ids[:prompt_len])
        if request.resumed_tokens:  # the output that the client has may already end the request
            cut = finish.cut(token_ids[prompt_len:], params.max_tokens)
            if cut.reason is not None:
                self._immediate_outputs.append(SequenceOutput(request.request_id, (), (), cut.reason, cut.stop_reason))
                RequestTimes().finish(self.metrics, cut.reason)
                return
        request = self._seeds.fill(request)
        shape = parts.resolved.shape if params.grammar is None else parts.resolved.forced_shape
        sequence = RequestState(request, finish, list(token_ids), prompt_len, [0] * (shape.num_steps + 1))
        self._sequences[request.request_id] = sequence
        parts.scheduler.waiting.append(sequence)

    def abort(self, request_id: str) -> None:
        """Drop a request, and let other requests use its pages. Unknown ids are ignored."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._parts.scheduler.release(sequence)
            sequence.times.finish(self.metrics, "abort")

    def step(self) -> StepResult:
        """Begin the next step of the gang: schedule, agree with the other ranks, draft -> target -> extend. Then commit
        the step whose results are due: this step, or on a GPU with `overlap` the step before it. Return the outputs of
        the committed step, and those of requests that ended in `submit`.

        Raises:
            GangError: a peer is gone, or ranks are out of step.
        """
        parts, started = self._parts, time.perf_counter()
        # What other groups decode is known from the last plan only: agreement comes after scheduling.
        schedule = parts.scheduler.schedule(self._max_decode_us, self._prefilling_groups)
        if schedule.admitted:  # before the step runs: if it crashes, the replica suspects these requests
            self._on_admitted(tuple(sequence.request.request_id for sequence in schedule.admitted))
        step_input = schedule.to_step_input(parts.cache.table, parts.resolved.looks_up_tokens)
        scheduled = time.perf_counter()
        for sequence in schedule.first_admitted:
            sequence.times.admit(scheduled)
        # Each group votes by its own load. The largest tree that a step may use is that of the lowest vote.
        step = self._loop.begin(step_input, schedule, len(self._sequences))
        step.started_at, step.seconds["schedule"] = started, scheduled - started
        plan, own_group = step.plan, self.lockstep.mesh.dp_rank
        self._max_decode_us = max(
            (group_us for group, group_us in enumerate(plan.decode_us) if group != own_group), default=0
        )
        self._prefilling_groups = sum(rows > 0 for group, rows in enumerate(plan.prompt_rows) if group != own_group)
        if step.output is not None:  # otherwise nothing ran: the page table's changes stay unsent
            parts.cache.table.mark_sent()
            schedule.begin(step.shape)
        ran_nothing, finished = step.output is None, self._loop.read_due(step)
        outputs, self._immediate_outputs = self._immediate_outputs, []
        if finished is not None:
            committed_outputs, stats = self._committer.commit(finished, self.status)
            outputs = outputs + committed_outputs
        else:
            stats = StepStats(rank=self.lockstep.mesh.rank, status=self.status())
        if finished is not None or ran_nothing:
            self.metrics.observe_step(stats)
        return StepResult(tuple(outputs), stats)

    def skip_time(self, seconds: float) -> None:
        """Say that the caller has done other things for `seconds` since the last step, although requests were running.
        This time does not count as overhead of the next step.
        """
        self._committer.skip_time(seconds)

    def status(self) -> EngineStatus:
        """The current load and progress."""
        cache, scheduler = self._parts.cache, self._parts.scheduler
        return EngineStatus(
            steps=self._loop.steps,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            queued_tokens=scheduler.queued_tokens,
            pages_free=cache.free_pages,
            pages_used=cache.used_pages,
            pages_cached=cache.evictable_pages,
            window_pages_free=0 if cache.window is None else cache.window.free,
            window_pages_used=0 if cache.window is None else cache.window.used,
            window_pages_cached=0 if cache.window is None else cache.window.evictable,
            accept_length=self._committer.accept_length,
            draft_rejected=self._committer.draft_watch.rejected,
            padded_rows=self._loop.padded_rows,
            own_seconds=self._loop.own_seconds,
            decode_drift=scheduler.correction.decode_drift.value,
            prompt_drift=scheduler.correction.prompt_drift.value,
            prefill_drift=scheduler.correction.prefill_drift.value,
            submitted=self._submitted,
        )

    def sample_draft(self, tokens: tuple[int, ...]) -> EagleDraftInput:
        """Run `tokens` as a prompt on an engine without requests. Return the output of the draft's extend phase."""
        assert not self.has_work, "requests are running"
        draft_output = take_sample(tokens, self._parts.lockstep, self._parts.cache)
        assert draft_output is not None, "an engine leads"
        return draft_output

    def check_pages(self) -> None:
        """Assert that every page has exactly one owner."""
        self._parts.cache.check()


Rank = Engine | StepLoop
"""A rank of a gang: the leader of an attention group, or a follower."""
