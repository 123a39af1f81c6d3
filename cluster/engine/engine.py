"""The engine: takes requests, runs one step after another, returns their outputs. Not thread-safe: one loop owns it."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from cluster.arch.resolve import ResolvedConfig
from cluster.config.tree_shape import TreeShape
from cluster.device.timing import Spans
from cluster.engine.draft_sample import take_sample
from cluster.engine.draft_watch import DraftWatch
from cluster.engine.finish import FinishCheck
from cluster.engine.lockstep import Lockstep
from cluster.engine.rank import Rank, ReadStep, StepInFlight, StepResult
from cluster.engine.request_times import RequestTimes
from cluster.engine.scheduler import Chunk, Schedule, Scheduler
from cluster.engine.sequence import RequestState
from cluster.kv.cache import KVCache, Lease
from cluster.observability.metrics import EngineMetrics, StepStats
from cluster.request import ErrorCode, Request, Seeds, SequenceOutput, TokenLogprob
from cluster.sampling.sampler import Logprobs
from cluster.spec.inputs import EagleDraftInput
from cluster.spec.result import StepDecisions
from cluster.status import EngineStatus, RankInfo
from cluster.tokenizer.tokenizer import TextTokenizer

NOT_FINITE = (
    "request {name} ended after {at} tokens: the model's numbers for it are not finite (NaN or infinite). Other "
    "requests continue; if this recurs, the checkpoint is damaged or overflows in dtype {dtype}"
)

NOT_MATCHED = (
    "request {name} ended after {at} tokens: its grammar cannot be matched, or the model's numbers for it are not "
    "finite (dtype {dtype}); the log has the cause. Other requests continue"
)
TOO_SLOW = (
    "request {name} ended after {at} tokens: its grammar is so ambiguous that matching it would keep other requests "
    "waiting; make it simpler"
)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of an `Engine`; `cluster.engine.build` makes them."""

    resolved: ResolvedConfig
    cache: KVCache
    scheduler: Scheduler
    lockstep: Lockstep
    watch: Spans
    tokenizer: TextTokenizer | None
    metrics: EngineMetrics
    info: RankInfo


class Engine(Rank):
    """The engine of a rank that takes requests: the leader of an attention group, which may have no other rank."""

    def __init__(self, parts: EngineParts) -> None:
        super().__init__(parts.lockstep, parts.metrics, parts.info)
        self.config, self.tokenizer = parts.resolved.settings, parts.tokenizer
        self._p = parts
        self._sequences: dict[str, RequestState] = {}
        self._seeds = Seeds(self.config.random_seed)
        self._over: list[SequenceOutput] = []  # outputs of requests that ended at once in `submit`
        self._trees = self._tree_tokens = self._anew = 0
        # By the last plan: the largest `decode_us` of other groups, and how many other groups ran prompt rows.
        self._busiest = self._prefilling = self._submitted = 0
        draft = parts.info.draft
        self._draft_watch = DraftWatch(parts.info.rank, () if draft is None else draft.doubts)

    @property
    def has_work(self) -> bool:
        """Whether this rank has requests, outputs to return, or steps in flight."""
        return bool(self._sequences or self._over or self._flights)

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
        vote = p.resolved.levels_at(len(schedule.decodes))
        ran = p.lockstep.run(order, len(self._sequences), vote, schedule.decode_us)
        own_group = p.lockstep.mesh.dp_rank
        self._busiest = max((us for g, us in enumerate(ran.plan.decode_us) if g != own_group), default=0)
        self._prefilling = sum(rows > 0 for g, rows in enumerate(ran.plan.prompt_rows) if g != own_group)
        if ran.output is not None:  # otherwise nothing ran: the page table's changes stay unsent
            p.cache.table.sent()
            schedule.begin(ran.shape)
        seconds = {"schedule": scheduled - began, "agree": ran.agreed}
        landed = self._begin(StepInFlight(schedule, ran, began, seconds, p.watch.split()))
        outputs, self._over = self._over, []
        if landed is not None:
            return self._landed(landed, outputs)
        stats = StepStats(rank=p.lockstep.mesh.rank, status=self.status())
        if ran.output is None:
            self.metrics.observe_step(stats)
        return StepResult(tuple(outputs), stats)

    def _landed(self, landed: ReadStep, outputs: list[SequenceOutput]) -> StepResult:
        """Commit a step whose results were read. Return `outputs`, followed by the outputs of this step."""
        schedule, ran = landed.flight.schedule, landed.flight.ran
        began = time.perf_counter()
        committed, trees = self._commit(schedule, landed.given, ran.shape)
        seconds = landed.flight.seconds | landed.given.seconds | {"commit": time.perf_counter() - began}
        # The pace (`StepTimes`) predicts the time of a step with its commit, but without its scheduling.
        took_us = 1e6 * (landed.took + seconds["commit"] - seconds["schedule"])
        self._p.scheduler.learn(schedule, max(ran.plan.decode_us), max(ran.plan.prompt_rows), took_us)
        outputs = outputs + committed
        stats = self._stats(landed, trees, seconds, outputs)
        self.metrics.observe_step(stats)
        return StepResult(tuple(outputs), stats)

    def status(self) -> EngineStatus:
        """The current load and progress."""
        cache, scheduler = self._p.cache, self._p.scheduler
        return EngineStatus(
            steps=self._steps,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            queued_tokens=scheduler.queued_tokens,
            pages_free=cache.free,
            pages_used=cache.used,
            pages_cached=cache.cached,
            accept_length=self._tree_tokens / self._trees if self._trees else 0.0,
            draft_rejected=self._draft_watch.rejected,
            padded_rows=self._padded_rows,
            own_seconds=self._own_seconds,
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

    def _commit(
        self, schedule: Schedule, given: StepDecisions, shape: TreeShape
    ) -> tuple[list[SequenceOutput], list[tuple[int, int]]]:
        """Commit the results of a step. Return its outputs, and for each verified tree the number of tokens that it
        gave and the number of its nodes, the root not counted.

        The order of `schedule.chunks` is the order by length in which `Schedule.order` sorted them. Idle entries are
        padding.

            list of `given`                          entries, in order
            tokens, accept_len, finite, nodes, trees schedule.decodes, idle requests
            sound                                    idle prompt rows, the rows of each chunk
            first                                    final chunks, idle entries
            scores                                   the first `scored` rows of each chunk
            logprobs                                 S + 1 rows per entry of `tokens`, one row per entry of `first`
        """
        width, nodes = shape.num_steps + 1, shape.num_draft_tokens - 1
        outputs: list[SequenceOutput] = []
        trees: list[tuple[int, int]] = []
        for i, (sequence, lease) in enumerate(schedule.decodes):
            if sequence.lease is not lease:  # ended, aborted or retracted since the step began
                continue
            count = given.accept_len[i]
            sound = min(count, given.finite[i])  # the tokens with finite logits; tokens after them are not returned
            sequence.accepted_run(count, shape)  # the device committed all `count`, sound or not
            output = self._extend(sequence, given.tokens[i][:sound], given, i * width)
            if nodes and output.token_ids:
                verified = len(output.token_ids), nodes if given.nodes is None else given.nodes[i]
                sequence.count(*verified)
                trees.append(verified)
                if sequence.request.params.grammar is None:  # forced nodes are accepted whatever the draft says
                    self._draft_watch.saw(len(output.token_ids) - 1)
            if sequence.request.params.return_tree and output.token_ids:
                assert given.trees is not None
                tree = given.trees.read(i, given.tokens[i][:sound], shape.drafted.num_draft_tokens)
                output = replace(output, tree=tree)
            outputs += self._settled(sequence, output, self._fault(sequence, lease, sound == count))
        finals = scored = 0
        for chunk, whole in zip(schedule.chunks, self._sound_chunks(schedule, given), strict=True):
            sequence, run = chunk.sequence, []
            first, finals = finals, finals + chunk.final
            row, scored = scored, scored + chunk.scored
            if sequence.lease is not chunk.lease:  # ended, aborted or retracted; skip the entries of this chunk
                continue
            sequence.prefilled(chunk.stop, chunk.final)
            whole = whole and _score(chunk, given, row)
            if chunk.final:
                run = [given.first[first]] if whole else []
            if chunk.final or not whole:
                output = self._extend(sequence, run, given, len(given.tokens) * width + first)
                outputs += self._settled(sequence, output, self._fault(sequence, chunk.lease, whole))
        return outputs, trees

    @staticmethod
    def _sound_chunks(schedule: Schedule, given: StepDecisions) -> list[bool]:
        """Return for each chunk whether all its rows are finite. The rows of idle chunks come first and are skipped."""
        rows = given.sound
        idle = len(rows) - schedule.prompt_rows
        ends = list(accumulate((chunk.stop - chunk.start for chunk in schedule.chunks), initial=idle))
        return [all(rows[start:end]) for start, end in pairwise(ends)]

    def _extend(self, sequence: RequestState, run: list[int], given: StepDecisions, row: int) -> SequenceOutput:
        """Append the tokens `run` to a request, up to the token that ends it, and return its output. Row `row` of
        `given.logprobs` is that of the first token.
        """
        cut = sequence.finish.cut(run, sequence.room)
        kept = run[: cut.kept]
        sequence.extend(kept)
        if kept:
            sequence.times.give_tokens(time.perf_counter())
        wanted = sequence.request.params.logprobs
        logprobs: tuple[TokenLogprob, ...] = ()
        if wanted is not None and kept:  # without tokens the step may have computed no log-probabilities
            logprobs = tuple(_logprobs(given.logprobs, row, kept, wanted))
        return SequenceOutput(
            request_id=sequence.request.request_id,
            token_ids=tuple(kept),
            logprobs=logprobs,
            finish_reason=cut.reason,
            stop_reason=cut.stop_reason,
            cached_tokens=sequence.cached_tokens or 0,
            prompt_logprobs=sequence.tell_scores() if sequence.scores else (),
        )

    def _fault(self, sequence: RequestState, lease: Lease, sound: bool) -> tuple[ErrorCode, str] | None:
        """Return the error code and message if a request cannot go on, or None. `sound` says whether all its numbers in
        this step are finite; if its grammar failed, they are NaN.
        """
        constrained = sequence.request.params.grammar is not None
        if not sound:
            return "nonfinite_logits", NOT_MATCHED if constrained else NOT_FINITE
        return ("slow_grammar", TOO_SLOW) if constrained and self._p.lockstep.grammars.slow(lease.row) else None

    def _settled(
        self, sequence: RequestState, output: SequenceOutput, fault: tuple[ErrorCode, str] | None
    ) -> list[SequenceOutput]:
        """Return the outputs of one request in a step. If the request ends, by `output` or by a `fault`, release the
        request; its last output then has the speculation counts and the error.
        """
        if output.finish_reason is None and fault is None:
            return [output]
        del self._sequences[output.request_id]
        counts = sequence.speculation()
        sequence.times.finish(self.metrics, output.finish_reason or "error")
        if output.finish_reason is not None or fault is None:
            self._p.scheduler.release(sequence)
            return [replace(output, speculation=counts)]
        self._p.scheduler.discard(sequence)  # not `release`: KV that may hold NaN must not be shared
        name, cached = output.request_id, output.cached_tokens
        code, words = fault
        error = words.format(name=name, at=len(sequence.tokens), dtype=self._p.info.dtype)
        end = SequenceOutput(name, (), (), "error", None, cached, counts, error, code)
        return [output, end] if output.token_ids else [end]

    def _stats(
        self, landed: ReadStep, trees: list[tuple[int, int]], seconds: dict[str, float], outputs: list[SequenceOutput]
    ) -> StepStats:
        lens = [accepted for accepted, _ in trees]
        self._trees += len(lens)
        self._tree_tokens += sum(lens)
        schedule, ran = landed.flight.schedule, landed.flight.ran
        shape, fresh, decodes = ran.shape, schedule.fresh, len(schedule.decodes)
        anew, self._anew = self._lockstep.programs.launched_anew - self._anew, self._lockstep.programs.launched_anew
        return StepStats(
            phase_seconds=seconds,
            waited_seconds=landed.waited,
            own_seconds=landed.own,
            forward_seconds=landed.flight.forwards.take(),
            padded_rows=self._idle_rows(ran),
            decode_requests=decodes,
            prompt_rows=schedule.prompt_rows,
            target_rows=decodes * shape.num_draft_tokens + schedule.prompt_rows,
            accept_lens=lens,
            accepted_by_depth=[sum(n > d for n in lens) for d in range(1, shape.num_steps + 1)],
            drafts=len(lens),
            verified_nodes=sum(nodes for _, nodes in trees),
            committed_tokens=sum(len(o.token_ids) for o in outputs),
            cached_tokens=sum(s.cached_tokens or 0 for s in fresh),
            prompt_tokens=sum(s.prompt_len for s in fresh),
            admitted=len(fresh),
            retracted=schedule.retracted,
            nonfinite=sum(o.error_code == "nonfinite_logits" for o in outputs),
            launched_anew=anew,
            rank=self._lockstep.mesh.rank,
            status=self.status(),
        )


def _score(chunk: Chunk, given: StepDecisions, row: int) -> bool:
    """Store a chunk's prompt log-probabilities, from row `row` of `given.scores` on; return whether all are finite."""
    sequence, wanted = chunk.sequence, chunk.sequence.request.params.prompt_logprobs
    if not chunk.scored or wanted is None or given.scores is None:
        return True
    skipped = len(sequence.scores) - chunk.start  # rows that were scored already, before a retraction
    lines = slice(row + skipped, row + chunk.scored)
    tokens = sequence.tokens[chunk.start + skipped + 1 : chunk.start + chunk.scored + 1]
    found, ranks = given.scores.logprobs, given.scores.ranks[lines].tolist()
    sequence.scores += _logprobs(found, lines.start, tokens, wanted, ranks)
    return bool(found.values[lines, 0].isfinite().all())


def _logprobs(
    found: Logprobs | None, row: int, tokens: list[int], top: int, ranks: list[int] | None = None
) -> Iterable[TokenLogprob]:
    """Yield the log-probabilities of `tokens`, from row `row` of `found` on, each with the `top` likeliest."""
    assert found is not None, "they were asked for"
    lines = slice(row, row + len(tokens))
    all_ids, all_values = found.ids[lines, :top].tolist(), found.values[lines, :top].tolist()
    own, placed = found.chosen[lines].tolist(), [0] * len(tokens) if ranks is None else ranks
    for token, logprob, ids, values, rank in zip(tokens, own, all_ids, all_values, placed, strict=True):
        yield TokenLogprob(token, logprob, tuple(zip(ids, values, strict=True)), rank)
