"""The process of one rank: runs a case, and answers with one line of JSON."""

import os
import sys
import threading
import time
import traceback
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple
from random import Random
from typing import Any

from torch import Tensor

from cluster.batch import Batch
from cluster.config import ConfigError, EngineConfig
from cluster.distributed.mesh import Axis, GangError, Rendezvous, Store
from cluster.dp_attention.facts import NO_TIER
from cluster.engine import Engine, Rank, build_rank
from cluster.engine.lockstep import StepInFlight
from cluster.request import LogitAdjustments, Request, RequestParams, TokenLogprob
from cluster.spec import tree
from cluster.spec.tree import DraftTree
from tests.distributed.gang import RankFailure, RankReport, SleepRecord
from tests.distributed.plants import plant
from tests.distributed.process import serve, write_json_line
from tests.parity.automata import with_automata
from tests.support.backend import force_backend

LOGGED_COLLECTIVES = ("gather", "reduce_scatter", "broadcast", "all_reduce")
SENT_ROW_COUNTS = {"reduce_scatter": sum}
"""How many rows a rank sends, from the row counts of all ranks. A collective that is not listed sends own rows only."""
RING_AFTER_S = 0.5
TREE_FLOOR = -300.0
"""The value of `tree.FLOOR` in these tests. Candidates below the floor have equal scores, so rounding decides among
them, and a gang rounds differently from a single rank. With this floor the trees can be compared even at temperatures
so low that all scores are below -30, such as -69 and -71.
"""


class CollectiveLog:
    """The collectives that this rank entered over one axis, in order: their count, a checksum, and the last three.

    Each is described by its name, row counts, width and dtype.
    """

    def __init__(self) -> None:
        self.count, self.digest = 0, 0
        self.last: deque[str] = deque(maxlen=3)

    def add(self, collective: str) -> None:
        self.count += 1
        self.digest = zlib.crc32(collective.encode(), self.digest)
        self.last.append(collective)

    def summary(self) -> list[Any]:
        return [self.count, self.digest, *self.last]


class CollectiveLogs:
    """The logs of the world and of the attention group. They record collectives until `detach`."""

    def __init__(self, rank: Rank) -> None:
        mesh = rank.lockstep.mesh
        self.world, self.attn = CollectiveLog(), CollectiveLog()
        self._by_axis = {id(mesh.world): self.world, id(mesh.attn): self.attn}
        self._originals = {name: getattr(Axis, name) for name in LOGGED_COLLECTIVES}
        for name, original in self._originals.items():
            setattr(Axis, name, self._with_logging(name, original))

    def detach(self) -> None:
        for name, original in self._originals.items():
            setattr(Axis, name, original)

    def _with_logging(self, name: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def log_and_call(axis: Axis, rows: Tensor, *counts: Any) -> Tensor:
            log = self._by_axis.get(id(axis))
            is_gather_over_gloo = (
                name == "all_reduce" and not axis.direct
            )  # a sum over gloo is a gather, which is logged itself
            if log is not None and axis.size > 1 and not is_gather_over_gloo:
                shape = list(rows.shape)
                if counts:
                    sent_rows = SENT_ROW_COUNTS[name](counts[0]) if name in SENT_ROW_COUNTS else counts[0][axis.rank]
                    assert rows.shape[0] == sent_rows, f"{rows.shape[0]} rows to {name}, counts {counts[0]}"
                    shape = [*counts[0], *rows.shape[1:]]
                log.add(f"{name} {shape} {rows.dtype}")
            return original(axis, rows, *counts)

        return log_and_call


def run_and_report(case: dict[str, Any], rank: int, rendezvous: Rendezvous, store: Store | None) -> None:
    """Run a case as one rank, and write its report: a `RankReport`, or a `RankFailure` after an error."""
    try:
        write_json_line(asdict(run(case, rank, rendezvous, store)))
    except Exception as error:
        named_fields = {name: getattr(error, name, None) for name in ("rank", "step", "phase")}
        failed_at = time.monotonic()
        is_expected_error = isinstance(error, GangError | ConfigError)
        text = str(error) if is_expected_error else traceback.format_exc()
        write_json_line(asdict(RankFailure(text, type(error).__name__, **named_fields, at=failed_at)))


def _report_fault(step: int) -> None:
    write_json_line({"struck": [time.monotonic(), step]})


def run(
    case: dict[str, Any], rank: int = 0, rendezvous: Rendezvous | None = None, store: Store | None = None
) -> RankReport:
    """Build the rank, run the case step by step, and leave the gang together with the peers; return the report."""
    force_backend()
    config = EngineConfig.from_kwargs(case["config"] | case["own"].get(str(rank), {}))
    tree.FLOOR = TREE_FLOOR
    engine = with_automata(build_rank(config, rank, rendezvous, store if rank == 0 else None))
    if os.environ.get("OVERLAP") == "1":
        engine.lockstep.max_in_flight = 1
    logs = CollectiveLogs(engine)
    undo: Callable[[], None] | None = None
    if case["plant"] and rank == case["guilty"]:
        undo = plant(case["plant"], engine, case["at_step"], _report_fault)
    try:
        return _run_steps(engine, case, logs)
    except BaseException as error:
        engine.close(f"{type(error).__name__}: {error}")
        raise
    finally:
        if undo is not None:
            undo()
        logs.detach()


def _run_steps(engine: Rank, case: dict[str, Any], logs: CollectiveLogs) -> RankReport:
    mesh, started_at = engine.lockstep.mesh, time.monotonic()
    actions = deque(a for a in case["actions"] if mesh.is_leader and a["dp_rank"] == mesh.dp_rank)
    last_action_step = max((a["step"] for a in case["actions"]), default=0)
    report = RankReport({}, {}, {}, {}, [], [], 0, 0, [], [], 0, 0.0, [])
    if isinstance(engine, Engine):
        _record_tree_checksums(engine, report.tree_checksums)
        _record_retractions(engine, report.retractions)
        if case["shaken"] is not None:
            _randomise_schedule(engine, Random(case["shaken"] * 1009 + mesh.rank))
    while len(report.rows) <= last_action_step or not engine.is_idle:
        while actions and actions[0]["step"] <= len(report.rows):
            _apply_action(engine, actions.popleft())
        _take_step(engine, report)
    for number in range(case["naps"]):
        report.naps.append(_sleep(engine, rings=number % mesh.world.size == mesh.rank))
        _take_step(engine, report)
    report.pages_used = engine.status().pages_used
    engine.leave()
    engine.step()
    assert engine.has_ended, "the ranks did not leave together"
    engine.close()
    report.world_log, report.attn_log = logs.world.summary(), logs.attn.summary()
    report.seconds = time.monotonic() - started_at
    return report


def _logprob_fields(logprobs: Sequence[TokenLogprob]) -> list[list[Any]]:
    return [[logprob.token_id, logprob.logprob, logprob.rank, logprob.top] for logprob in logprobs]


def _take_step(engine: Rank, report: RankReport) -> None:
    result = engine.step()
    loop = engine._loop if isinstance(engine, Engine) else engine
    assert not loop._forward_spans._spans, "the step left spans of forwards that its result does not include"
    report.padding_rows += result.stats.padded_rows
    report.replayed_steps += "replay" in result.stats.phase_seconds
    report.rows.append(result.stats.target_rows)
    if isinstance(engine, Engine):
        engine.check_pages()
    for output in result.outputs:
        if output.tree is not None:
            report.returned_trees.setdefault(output.request_id, []).append(astuple(output.tree))
        report.tokens.setdefault(output.request_id, []).extend(output.token_ids)
        if output.prompt_logprobs:
            assert output.request_id not in report.prompt_logprobs, "prompt logprobs were reported twice"
            report.prompt_logprobs[output.request_id] = _logprob_fields(output.prompt_logprobs)
        report.token_logprobs.setdefault(output.request_id, []).extend(_logprob_fields(output.logprobs))
        if output.finish_reason is not None:
            counts = output.speculation
            report.ended[output.request_id] = (output.finish_reason, None if counts is None else list(counts.accepted))


def _sleep(engine: Rank, rings: bool) -> SleepRecord:
    """Sleep until a rank wakes all ranks. If `rings`, this rank wakes them, from another thread."""
    ring_times: list[float] = []

    def ring() -> None:
        ring_times.append(time.monotonic())
        engine.wake_ranks()

    if rings:
        threading.Timer(RING_AFTER_S, ring).start()
    started_at, cpu_at_start = time.monotonic(), time.process_time()
    engine.sleep()
    woke_at, cpu_used = time.monotonic(), time.process_time() - cpu_at_start
    return SleepRecord(woke_at, ring_times[0] if ring_times else 0.0, woke_at - started_at, cpu_used)


def _record_tree_checksums(engine: Engine, tree_checksums: dict[str, int]) -> None:
    """From now on record in `tree_checksums`, by request, a checksum of all drafted trees whose step counted.

    A step that began before the host knew that a request had ended does not count for the request. With capture nothing
    is recorded: a replay drafts without calling the drafter.
    """
    if engine._parts.lockstep.programs._capture is not None:
        return
    drafter, encoded_trees_by_row = engine._parts.lockstep.step._draft, deque[dict[int, bytes]]()
    original, original_commit = drafter.draft, engine._committer.commit

    def draft(batch: Batch, *arguments: Any) -> DraftTree:
        draft_tree = original(batch, *arguments)
        nodes = zip(draft_tree.tokens.tolist(), draft_tree.parents.tolist(), strict=True)
        rows = batch.rows[: batch.decodes].tolist()
        encoded_trees_by_row.append(
            {row: str(list(node_pair)).encode() for row, node_pair in zip(rows, nodes, strict=True)}
        )
        return draft_tree

    def commit(step: StepInFlight, *arguments: Any) -> Any:
        encoded_trees = encoded_trees_by_row.popleft()
        for sequence, lease in step.schedule.decodes:
            if sequence.lease is lease:
                sequence_id = sequence.request.request_id
                tree_checksums[sequence_id] = zlib.crc32(encoded_trees[lease.row], tree_checksums.get(sequence_id, 0))
        return original_commit(step, *arguments)

    drafter.draft = draft  # type: ignore[method-assign]
    engine._committer.commit = commit  # type: ignore[method-assign]


def _record_retractions(engine: Engine, request_ids: list[str]) -> None:
    """From now on append the id of each retracted request to `request_ids`."""
    scheduler = engine._parts.scheduler.decode
    original = scheduler._retract

    def retract(sequence: Any) -> None:
        request_ids.append(sequence.request.request_id)
        original(sequence)

    scheduler._retract = retract  # type: ignore[method-assign]


def _randomise_schedule(engine: Engine, random: Random) -> None:
    """Make the scheduler take a random tier and random chunk sizes in each step. Adaptive trees mostly take the largest
    tier that all groups allow, as if they explored.
    """
    scheduler, last_tier = engine._parts.scheduler, len(engine._parts.resolved.tiers) - 1
    original = scheduler.schedule

    def schedule(*arguments: int) -> Any:
        scheduler.prefill._max_rows = random.choice((1, 2, 5, 13, 64, 1 << 30))
        scheduler.prefill._max_mixed_rows = random.choice((1, 3, scheduler.prefill._max_rows))
        scheduled = original(*arguments)
        scheduled.vote = scheduled.vote._replace(
            max_tier=random.randint(0, last_tier), explores=random.choice((NO_TIER, 0, 64))
        )
        return scheduled

    scheduler.schedule = schedule  # type: ignore[method-assign]


def _apply_action(engine: Rank, action: dict[str, Any]) -> None:
    fields = action["request"]
    if action["kind"] == "abort":
        engine.abort(fields["request_id"])  # type: ignore[attr-defined]
        return
    params = RequestParams(**fields["params"] | {"adjustments": _adjustments_from_json(fields["params"])})
    engine.submit(Request(fields["request_id"], tuple(fields["prompt_token_ids"]), params))  # type: ignore[attr-defined]


def _adjustments_from_json(params: dict[str, Any]) -> LogitAdjustments | None:
    """The logit adjustments of a request, from JSON: lists become tuples again."""

    def lists_to_tuples(value: Any) -> Any:
        return tuple(map(lists_to_tuples, value)) if isinstance(value, list) else value

    adjustment_fields = params.get("adjustments")
    return (
        None
        if adjustment_fields is None
        else LogitAdjustments(**{name: lists_to_tuples(value) for name, value in adjustment_fields.items()})
    )


if __name__ == "__main__":
    serve(int(sys.argv[1]), run_and_report)
