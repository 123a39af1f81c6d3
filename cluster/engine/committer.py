"""Takes the results of a step into its requests: tokens, ends, log-probabilities, pages, statistics."""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from cluster.engine.draft_watch import DraftWatch
from cluster.engine.lockstep import StepInFlight
from cluster.engine.request_state import RequestState
from cluster.engine.schedule import Chunk, Schedule
from cluster.engine.scheduler import Scheduler
from cluster.engine.step_loop import StepLoop
from cluster.kv.cache import Lease
from cluster.observability.metrics import StepStats
from cluster.request import ErrorCode, SequenceOutput, TokenLogprob
from cluster.sampling.sampler import Logprobs
from cluster.spec.result import StepOutput
from cluster.status import EngineStatus

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


class Committer:
    """Commits the steps of one rank, and counts what its drafts gave."""

    def __init__(self, sequences: dict[str, RequestState], scheduler: Scheduler, loop: StepLoop) -> None:
        """`sequences` are the requests by id; a request that ends is removed."""
        self._sequences, self._scheduler, self._loop = sequences, scheduler, loop
        info = loop.info()
        self.draft_watch = DraftWatch(info.rank, () if info.draft is None else info.draft.doubts)
        self._trees = self._tree_tokens = self._anew = 0

    @property
    def accept_length(self) -> float:
        """Mean number of tokens that a verified tree gave, bonus token included; 0.0 before the first tree."""
        return self._tree_tokens / self._trees if self._trees else 0.0

    def commit(self, step: StepInFlight, status: Callable[[], EngineStatus]) -> tuple[list[SequenceOutput], StepStats]:
        """Commit a step whose results were read. Return its outputs and statistics, with the `status` after it."""
        began = time.perf_counter()
        schedule, output, plan = step.schedule, step.output, step.plan
        assert output is not None, "only steps that ran are read"
        outputs, trees = self._decodes(step, output)
        outputs += self._prompts(schedule, output)
        step.seconds |= output.phases.seconds() | {"commit": time.perf_counter() - began}
        # The pace (`StepTimes`) predicts the time of a step with its commit, but without its scheduling.
        took_us = 1e6 * (step.took + step.seconds["commit"] - step.seconds["schedule"])
        self._scheduler.learn(schedule, max(plan.decode_us), max(plan.prompt_rows), took_us)
        self._trees += len(trees)
        self._tree_tokens += sum(accepted for accepted, _ in trees)
        return outputs, self._stats(step, trees, outputs, status())

    def _decodes(self, step: StepInFlight, given: StepOutput) -> tuple[list[SequenceOutput], list[tuple[int, int]]]:
        """Commit the trees. Return the outputs, and for each verified tree the number of tokens that it gave and the
        number of its nodes, the root not counted. Entry i of `given` is that of `schedule.decodes[i]`; idle requests
        come last. Each entry has S + 1 rows of log-probabilities.
        """
        shape, outputs, trees = step.shape, list[SequenceOutput](), list[tuple[int, int]]()
        for i, (sequence, lease) in enumerate(step.schedule.decodes):
            if sequence.lease is not lease:  # ended, aborted or retracted since the step began
                continue
            tokens, count, finite, nodes = given.decoded(i)
            sound = min(count, finite)  # the tokens with finite logits; tokens after them are not returned
            sequence.accepted_run(count, shape)  # the device committed all `count`, sound or not
            output = self._extend(sequence, tokens[:sound], given, i * given.width)
            if shape.num_draft_tokens > 1 and output.token_ids:
                verified = len(output.token_ids), shape.num_draft_tokens - 1 if nodes is None else nodes
                sequence.count(*verified)
                trees.append(verified)
                if sequence.request.params.grammar is None:  # forced nodes are accepted whatever the draft says
                    self.draft_watch.saw(len(output.token_ids) - 1)
            if sequence.request.params.return_tree and output.token_ids:
                assert given.trees is not None
                output = replace(output, tree=given.trees.read(i, tokens[:sound], shape.drafted.num_draft_tokens))
            outputs += self._settled(sequence, output, self._fault(sequence, lease, sound == count))
        return outputs, trees

    def _prompts(self, schedule: Schedule, given: StepOutput) -> list[SequenceOutput]:
        """Commit the prompt chunks, which `Schedule.order` sorted by length, and return their outputs.

        numbers of `given`  entries, in order
        sound               idle prompt rows, the rows of each chunk
        first               final chunks, idle entries
        scores              the first `scored` rows of each chunk
        logprobs            after those of decoding and idle requests, one row per entry of `first`
        """
        tokens, sound, _ = given.prompts
        outputs, first, row = list[SequenceOutput](), 0, 0
        start = len(sound) - schedule.prompt_rows
        for chunk in schedule.chunks:
            sequence, stop = chunk.sequence, start + chunk.stop - chunk.start
            if sequence.lease is chunk.lease:  # otherwise it has ended, was aborted or retracted
                sequence.prefilled(chunk.stop, chunk.final)
                whole = all(sound[start:stop]) and _score(chunk, given, row)
                if chunk.final or not whole:
                    run = [tokens[first]] if whole else []
                    output = self._extend(sequence, run, given, given.requests * given.width + first)
                    outputs += self._settled(sequence, output, self._fault(sequence, chunk.lease, whole))
            start, first, row = stop, first + chunk.final, row + chunk.scored
        return outputs

    def _extend(self, sequence: RequestState, run: list[int], given: StepOutput, row: int) -> SequenceOutput:
        """Append the tokens `run` to a request, up to the token that ends it, and return its output. Row `row` of
        `given.logprobs` is that of the first token.
        """
        cut = sequence.finish.cut(run, sequence.room)
        kept = run[: cut.kept]
        sequence.tokens += kept
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
        return ("slow_grammar", TOO_SLOW) if constrained and self._loop.lockstep.grammars.slow(lease.row) else None

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
        sequence.times.finish(self._loop.metrics, output.finish_reason or "error")
        if output.finish_reason is not None or fault is None:
            self._scheduler.release(sequence)
            return [replace(output, speculation=counts)]
        self._scheduler.discard(sequence)  # not `release`: KV that may hold NaN must not be shared
        name, cached = output.request_id, output.cached_tokens
        code, words = fault
        error = words.format(name=name, at=len(sequence.tokens), dtype=self._loop.info().dtype)
        end = SequenceOutput(name, (), (), "error", None, cached, counts, error, code)
        return [output, end] if output.token_ids else [end]

    def _stats(
        self, step: StepInFlight, trees: list[tuple[int, int]], outputs: list[SequenceOutput], status: EngineStatus
    ) -> StepStats:
        lens = [accepted for accepted, _ in trees]
        schedule, shape, lockstep = step.schedule, step.shape, self._loop.lockstep
        fresh, decodes = schedule.fresh, len(schedule.decodes)
        anew, self._anew = lockstep.programs.launched_anew - self._anew, lockstep.programs.launched_anew
        return StepStats(
            phase_seconds=step.seconds,
            waited_seconds=step.waited,
            own_seconds=step.own,
            forward_seconds=step.forwards.take(),
            padded_rows=self._loop.idle_rows(step),
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
            rank=lockstep.mesh.rank,
            status=status,
        )


def _score(chunk: Chunk, given: StepOutput, row: int) -> bool:
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
