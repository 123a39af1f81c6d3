"""Commits the results of a step to its requests: tokens, log-probabilities, ends of requests. Makes its statistics."""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from cluster.batch import ExtendMode
from cluster.dp_attention.facts import NO_TIER
from cluster.dp_attention.tree_choice import OUTLOOK_UNIT
from cluster.engine.draft_watch import DraftWatch
from cluster.engine.lockstep import StepInFlight
from cluster.engine.observed_step import ObservedStep
from cluster.engine.request_state import RequestState
from cluster.engine.schedule import Chunk, Schedule
from cluster.engine.scheduler import Scheduler
from cluster.engine.step_loop import StepLoop
from cluster.kv.cache import Lease
from cluster.observability.step_stats import StepStats
from cluster.request import ErrorCode, SequenceOutput, TokenLogprob
from cluster.sampling.sampler import Logprobs
from cluster.spec.result import StepOutput
from cluster.status import EngineStatus

NOT_FINITE = (
    "request {name} ended after {at} tokens: the model's numbers for it are not finite (NaN or infinite). Other "
    "requests continue; if this recurs, the checkpoint is damaged or overflows in dtype {dtype}"
)

GRAMMAR_FAILED = (
    "request {name} ended after {at} tokens: its grammar cannot be matched, or the model's numbers for it are not "
    "finite (dtype {dtype}); the log has the cause. Other requests continue"
)
SLOW_GRAMMAR = (
    "request {name} ended after {at} tokens: its grammar is so ambiguous that matching it would keep other requests "
    "waiting; make it simpler"
)


class TreeCounts(NamedTuple):
    """Counts of one verified tree. `tokens` are those that it gave to the output of its request, bonus token included.
    `nodes` are its verified nodes without the root. `looked_up` of these nodes were accepted although the draft had not
    proposed them: their tokens followed an earlier occurrence of the end of the text.
    """

    tokens: int
    nodes: int
    looked_up: int


class Committer:
    """Commits the steps of one rank, and keeps the mean number of tokens per verified tree."""

    def __init__(self, sequences: dict[str, RequestState], scheduler: Scheduler, loop: StepLoop) -> None:
        """`sequences` are the requests by id; a request that ends is removed."""
        self._sequences, self._scheduler, self._loop = sequences, scheduler, loop
        info = loop.info()
        self.draft_watch = DraftWatch(info.rank, () if info.draft is None else info.draft.doubts)
        self._last_committed = 0.0, -2  # when a step was committed last, and its number
        self._has_draft, self._can_draft = info.draft is not None, info.speculative_num_steps > 0
        self._trees = self._tree_tokens = self._counted_fallbacks = 0

    @property
    def accept_length(self) -> float:
        """Mean number of tokens that a verified tree yielded, bonus token included; 0.0 before the first tree."""
        return self._tree_tokens / self._trees if self._trees else 0.0

    def commit(self, step: StepInFlight, status: Callable[[], EngineStatus]) -> tuple[list[SequenceOutput], StepStats]:
        """Commit a step whose results were read. Return its outputs and statistics, with the `status` after it."""
        started = time.perf_counter()
        schedule, output, plan = step.schedule, step.output, step.plan
        assert output is not None, "only steps that ran are read"
        outputs, trees = self._commit_trees(step, output)
        outputs += self._commit_chunks(schedule, output)
        if self._scheduler.decode.outlook is not None:  # it keeps the output for some steps
            output.drop_tensors()
        step.seconds |= output.phases.seconds() | {"commit": time.perf_counter() - started}
        # The pace (`StepTimes`) predicts the time of a step with its commit, but without its scheduling.
        measured_us = 1e6 * (step.elapsed_s + step.seconds["commit"] - step.seconds["schedule"])
        self._scheduler.learn(schedule, max(plan.decode_us), max(plan.prompt_rows), measured_us)
        self._trees += len(trees)
        self._tree_tokens += sum(tree.tokens for tree in trees)
        return outputs, self._stats(step, trees, outputs, status())

    def _commit_trees(
        self, step: StepInFlight, step_output: StepOutput
    ) -> tuple[list[SequenceOutput], list[TreeCounts]]:
        """Commit the trees. Return the outputs, and the counts of each verified tree. Entry i of `step_output` is for
        request i of `schedule.decodes`; entries of idle requests (padding) come last. Each entry has S + 1 rows of
        log-probabilities.
        """
        shape, outputs, trees = step.shape, list[SequenceOutput](), list[TreeCounts]()
        entries = list[tuple[int, int, int]]()  # as in `ObservedStep`
        looked_up = 0  # nodes of a path that the draft had not proposed; 0 in steps without looked-up tokens
        for i, (sequence, lease) in enumerate(step.schedule.decodes):
            if sequence.lease is not lease:  # ended, aborted or retracted since the step began
                continue
            tokens, count, finite_prefix, nodes = step_output.decode_result(i)
            entries.append((i, lease.row, count))
            if shape.lookup_tokens:
                looked_up = count - 1 - step_output.accepted_tree(i, count).drafted
            finite_count = min(count, finite_prefix)  # tokens after the first non-finite logits are not returned
            sequence.commit_tree(count, shape)  # the device committed all `count`, finite or not
            output = self._append_tokens(sequence, tokens[:finite_count], step_output, i * step_output.path_length)
            if shape.num_draft_tokens > 1 and output.token_ids:
                node_count = shape.num_draft_tokens - 1 if nodes is None else nodes
                trees.append(TreeCounts(len(output.token_ids), node_count, looked_up))
                sequence.count_tree(len(output.token_ids), node_count)
                # Forced nodes are accepted whatever the draft says; n-gram speculation has no draft to misread.
                if sequence.request.params.grammar is None and self._has_draft:
                    self.draft_watch.count_tree(len(output.token_ids) - 1)
            if sequence.request.params.return_tree and output.token_ids:
                assert step_output.trees is not None
                unforced_nodes = shape.drafted_nodes - shape.forced_nodes
                output = replace(output, tree=step_output.trees.read(i, tokens[:finite_count], unforced_nodes))
            outputs += self._finish_if_ended(sequence, output, self._error_of(sequence, lease, finite_count == count))
        self._observe(step, step_output, entries)
        return outputs, trees

    def _observe(self, step: StepInFlight, step_output: StepOutput, entries: list[tuple[int, int, int]]) -> None:
        """Tell the choice of trees about a step, except if a grammar forced nodes: then it says little about the draft.
        `entries` are those of `ObservedStep`.
        """
        outlook, plan, now = self._scheduler.decode.outlook, step.plan, time.perf_counter()
        (last_committed_at, last_step), self._last_committed = self._last_committed, (now, plan.step)
        if outlook is not None and not plan.forced_nodes:
            since_last_s = now - last_committed_at if last_step == plan.step - 1 else None
            overlaps = self._loop.lockstep.max_in_flight > 0
            outlook.add(ObservedStep(step, step_output, entries, since_last_s, overlaps))

    def skip_time(self, seconds: float) -> None:
        """As `Engine.skip_time`."""
        committed_at, number = self._last_committed
        self._last_committed = committed_at + seconds, number
        self._loop.skip_time(seconds)

    def _commit_chunks(self, schedule: Schedule, step_output: StepOutput) -> list[SequenceOutput]:
        """Commit the prompt chunks, which `Schedule.to_step_input` sorted by length, and return their outputs.

        part of `step_output`  entries, in order
        finite_rows            idle prompt rows, the rows of each chunk
        first_tokens           final chunks, idle entries
        scores                 the first `scored` rows of each chunk
        logprobs               after those of decoding and idle requests, one row per entry of `first_tokens`
        """
        tokens, finite_rows, _ = step_output.prompt_results
        outputs, final_index, score_row = list[SequenceOutput](), 0, 0
        start = len(finite_rows) - schedule.prompt_rows
        for chunk in schedule.chunks:
            sequence, stop = chunk.sequence, start + chunk.stop - chunk.start
            if sequence.lease is chunk.lease:  # otherwise the request has ended, was aborted or retracted
                sequence.commit_prompt(chunk.stop, chunk.final)
                all_finite = all(finite_rows[start:stop]) and _store_prompt_scores(chunk, step_output, score_row)
                if chunk.final or not all_finite:
                    new_tokens = [tokens[final_index]] if all_finite else []
                    output = self._append_tokens(
                        sequence, new_tokens, step_output, step_output.requests * step_output.path_length + final_index
                    )
                    outputs += self._finish_if_ended(
                        sequence, output, self._error_of(sequence, chunk.lease, all_finite)
                    )
            start, final_index, score_row = stop, final_index + chunk.final, score_row + chunk.scored
        return outputs

    def _append_tokens(
        self, sequence: RequestState, new_tokens: list[int], step_output: StepOutput, row: int
    ) -> SequenceOutput:
        """Append the tokens `new_tokens` to a request, up to the token that ends the request. Return its output. Row
        `row` of `step_output.logprobs` is that of the first token.
        """
        cut = sequence.finish.cut(new_tokens, sequence.remaining_tokens)
        accepted_tokens = new_tokens[: cut.token_count]
        sequence.tokens += accepted_tokens
        if accepted_tokens:
            sequence.times.record_tokens(time.perf_counter())
        top_count = sequence.request.params.logprobs
        logprobs: tuple[TokenLogprob, ...] = ()
        if top_count is not None and accepted_tokens:  # without tokens the step may have computed no log-probabilities
            logprobs = tuple(_token_logprobs(step_output.logprobs, row, accepted_tokens, top_count))
        return SequenceOutput(
            request_id=sequence.request.request_id,
            token_ids=tuple(accepted_tokens),
            logprobs=logprobs,
            finish_reason=cut.reason,
            stop_reason=cut.stop_reason,
            cached_tokens=sequence.cached_tokens or 0,
            prompt_logprobs=sequence.take_scores() if sequence.scores else (),
        )

    def _error_of(self, sequence: RequestState, lease: Lease, all_finite: bool) -> tuple[ErrorCode, str] | None:
        """Return the error code and message if a request cannot go on, otherwise None. `all_finite` says whether the
        target's numbers for the request are all finite in this step. If its grammar failed, these numbers are NaN.
        """
        constrained = sequence.request.params.grammar is not None
        if not all_finite:
            return "nonfinite_logits", GRAMMAR_FAILED if constrained else NOT_FINITE
        return (
            ("slow_grammar", SLOW_GRAMMAR) if constrained and self._loop.lockstep.grammars.is_slow(lease.row) else None
        )

    def _finish_if_ended(
        self, sequence: RequestState, output: SequenceOutput, error_reason: tuple[ErrorCode, str] | None
    ) -> list[SequenceOutput]:
        """Return the outputs of one request in a step. If `output` has a finish reason or `error_reason` is not None,
        the request ends: release it, and add the speculation counts and any error to its last output.
        """
        if output.finish_reason is None and error_reason is None:
            return [output]
        del self._sequences[output.request_id]
        speculation_counts = sequence.speculation()
        sequence.times.finish(self._loop.metrics, output.finish_reason or "error")
        if output.finish_reason is not None or error_reason is None:
            self._scheduler.release(sequence)
            return [replace(output, speculation=speculation_counts)]
        self._scheduler.discard(sequence)  # not `release`: KV that may hold NaN must not be shared
        name, cached = output.request_id, output.cached_tokens
        code, template = error_reason
        error = template.format(name=name, at=len(sequence.tokens), dtype=self._loop.info().dtype)
        end = SequenceOutput(name, (), (), "error", None, cached, speculation_counts, error, code)
        return [output, end] if output.token_ids else [end]

    def _stats(
        self, step: StepInFlight, trees: list[TreeCounts], outputs: list[SequenceOutput], status: EngineStatus
    ) -> StepStats:
        accept_lens = [tree.tokens for tree in trees]
        schedule, shape, plan, lockstep = step.schedule, step.shape, step.plan, self._loop.lockstep
        unforced = shape.drafted_nodes - shape.forced_nodes
        measured_trees = bool(schedule.vote.outlook and plan.tier and not plan.forced_nodes)
        first_admitted, decode_count = schedule.first_admitted, len(schedule.decodes)
        eager_fallbacks, self._counted_fallbacks = (
            lockstep.programs.eager_fallbacks - self._counted_fallbacks,
            lockstep.programs.eager_fallbacks,
        )
        return StepStats(
            phase_seconds=step.seconds,
            waited_seconds=step.wait_s,
            own_seconds=step.own_s,
            forward_seconds=step.forwards.take(),
            padded_rows=self._loop.idle_rows(step),
            decode_requests=decode_count,
            prompt_rows=schedule.prompt_rows,
            target_rows=decode_count * shape.num_draft_tokens + schedule.prompt_rows,
            accept_lens=accept_lens,
            accepted_by_depth=[sum(n > d for n in accept_lens) for d in range(1, shape.num_steps + 1)],
            drafts=len(accept_lens),
            verified_nodes=sum(tree.nodes for tree in trees),
            committed_tokens=sum(len(o.token_ids) for o in outputs),
            cached_tokens=sum(s.cached_tokens or 0 for s in first_admitted),
            prompt_tokens=sum(s.prompt_len for s in first_admitted),
            admitted=len(first_admitted),
            retracted=schedule.retracted_count,
            nonfinite=sum(o.error_code == "nonfinite_logits" for o in outputs),
            eager_fallbacks=eager_fallbacks,
            tree=shape.label if decode_count else None,
            expected_tokens=schedule.vote.outlook[plan.tier] / OUTLOOK_UNIT if measured_trees else 0.0,
            explored=int(measured_trees and schedule.vote.explores != NO_TIER),
            woken=int(plan.extend_mode is ExtendMode.MISSED),
            forced_nodes=sum(max(0, tree.nodes - unforced + 1) for tree in trees if plan.forced_nodes),
            looked_up_tokens=sum(tree.looked_up for tree in trees),
            undrafted=_undrafted_reason(step) if decode_count and self._can_draft else None,
            rank=lockstep.mesh.rank,
            status=status,
        )


def _undrafted_reason(step: StepInFlight) -> str | None:
    """Return why a step that decodes drafted nothing: one of `UNDRAFTED`. Return None if it drafted."""
    if step.plan.tier:
        return None
    if step.plan.extend_mode is ExtendMode.MISSED:
        return "waking"
    return "cost" if step.schedule.vote.outlook and step.schedule.vote.max_tier else "limit"


def _store_prompt_scores(chunk: Chunk, step_output: StepOutput, row: int) -> bool:
    """Store a chunk's prompt log-probabilities, which begin at row `row` of `step_output.scores`. Return whether those
    stored by this call are all finite; True if there are none.
    """
    sequence, top_count = chunk.sequence, chunk.sequence.request.params.prompt_logprobs
    if not chunk.scored or top_count is None or step_output.scores is None:
        return True
    known_scores = len(sequence.scores) - chunk.start  # rows that were scored already, before a retraction
    rows = slice(row + known_scores, row + chunk.scored)
    tokens = sequence.tokens[chunk.start + known_scores + 1 : chunk.start + chunk.scored + 1]
    step_logprobs, ranks = step_output.scores.logprobs, step_output.scores.ranks[rows].tolist()
    sequence.scores += _token_logprobs(step_logprobs, rows.start, tokens, top_count, ranks)
    return bool(step_logprobs.values[rows, 0].isfinite().all())


def _token_logprobs(
    step_logprobs: Logprobs | None, row: int, tokens: list[int], top_count: int, ranks: list[int] | None = None
) -> Iterable[TokenLogprob]:
    """Yield the log-probabilities of `tokens`, from row `row` of `step_logprobs` on, each with those of the `top_count`
    likeliest tokens. `ranks` are the ranks of `tokens`; None stands for 0.
    """
    assert step_logprobs is not None, "the step computed log-probabilities"
    rows = slice(row, row + len(tokens))
    all_ids, all_values = step_logprobs.ids[rows, :top_count].tolist(), step_logprobs.values[rows, :top_count].tolist()
    logprobs, token_ranks = step_logprobs.chosen[rows].tolist(), [0] * len(tokens) if ranks is None else ranks
    for token, logprob, ids, values, rank in zip(tokens, logprobs, all_ids, all_values, token_ranks, strict=True):
        yield TokenLogprob(token, logprob, tuple(zip(ids, values, strict=True)), rank)
