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
from cluster.engine import Engine, Rank, build_rank
from cluster.engine.lockstep import StepInFlight
from cluster.request import LogitAdjustments, Request, RequestParams, TokenLogprob
from cluster.spec import tree
from cluster.spec.tree import DraftTree
from tests.backend import force
from tests.parity.automata import walked
from tests.ranks.gang import Life, Lost, Nap
from tests.ranks.plants import plant
from tests.ranks.process import say, serve

LOGGED = ("gather", "reduce_scatter", "broadcast", "all_reduce")
SENT = {"reduce_scatter": sum}  # sends rows to all; the others send own rows
RING_AFTER_S = 0.5
LOWEST = -300.0
"""Candidates below `tree.FLOOR` are alike, and rounding decides among them, which ranks and one rank do differently: at
temperatures so low that all are below -30, as -69 and -71, their trees are to be compared nevertheless.
"""


class Log:
    """Every collective that this rank entered over one axis: name, counts, width, dtype, in order."""

    def __init__(self) -> None:
        self.count, self.digest = 0, 0
        self.last: deque[str] = deque(maxlen=3)

    def add(self, line: str) -> None:
        self.count += 1
        self.digest = zlib.crc32(line.encode(), self.digest)
        self.last.append(line)

    def told(self) -> list[Any]:
        return [self.count, self.digest, *self.last]


class Logs:
    """The logs of the world and of the attention group, kept while it is attached."""

    def __init__(self, rank: Rank) -> None:
        mesh = rank.lockstep.mesh
        self.world, self.attn = Log(), Log()
        self._by_axis = {id(mesh.world): self.world, id(mesh.attn): self.attn}
        self._true = {name: getattr(Axis, name) for name in LOGGED}
        for name, true in self._true.items():
            setattr(Axis, name, self._logged(name, true))

    def detach(self) -> None:
        for name, true in self._true.items():
            setattr(Axis, name, true)

    def _logged(self, name: str, true: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def logged(axis: Axis, rows: Tensor, *counts: Any) -> Tensor:
            log = self._by_axis.get(id(axis))
            inner = name == "all_reduce" and not axis.direct  # a sum over gloo is a gather, which is logged itself
            if log is not None and axis.size > 1 and not inner:
                shape = list(rows.shape)
                if counts:
                    sent = SENT[name](counts[0]) if name in SENT else counts[0][axis.rank]
                    assert rows.shape[0] == sent, f"{rows.shape[0]} rows to {name}, counts {counts[0]}"
                    shape = [*counts[0], *rows.shape[1:]]
                log.add(f"{name} {shape} {rows.dtype}")
            return true(axis, rows, *counts)

        return logged


def live(case: dict[str, Any], rank: int, where: Rendezvous, store: Store | None) -> None:
    """Run a case, and say how the life ended."""
    try:
        say(asdict(run(case, rank, where, store)))
    except Exception as error:
        said = {name: getattr(error, name, None) for name in ("rank", "step", "phase")}
        at = time.monotonic()
        known = isinstance(error, GangError | ConfigError)
        text = str(error) if known else traceback.format_exc()
        say(asdict(Lost(text, type(error).__name__, **said, at=at)))


def _struck(step: int) -> None:
    say({"struck": [time.monotonic(), step]})


def run(case: dict[str, Any], rank: int = 0, rendezvous: Rendezvous | None = None, store: Store | None = None) -> Life:
    """Build the rank, do what the case says step by step, and leave together with the peers."""
    force()
    config = EngineConfig.from_kwargs(case["config"] | case["own"].get(str(rank), {}))
    tree.FLOOR = LOWEST
    engine = walked(build_rank(config, rank, rendezvous, store if rank == 0 else None))
    if os.environ.get("OVERLAP") == "1":
        engine.lockstep.max_in_flight = 1
    logs = Logs(engine)
    undo: Callable[[], None] | None = None
    if case["plant"] and rank == case["guilty"]:
        undo = plant(case["plant"], engine, case["at_step"], _struck)
    try:
        return _steps(engine, case, logs)
    except BaseException as error:
        engine.close(f"{type(error).__name__}: {error}")
        raise
    finally:
        if undo is not None:
            undo()
        logs.detach()


def _steps(engine: Rank, case: dict[str, Any], logs: Logs) -> Life:
    mesh, began = engine.lockstep.mesh, time.monotonic()
    actions = deque(a for a in case["actions"] if mesh.is_leader and a["dp_rank"] == mesh.dp_rank)
    last = max((a["step"] for a in case["actions"]), default=0)
    life = Life({}, {}, {}, {}, [], [], 0, 0, [], [], 0, 0.0, [])
    if isinstance(engine, Engine):
        _watch_trees(engine, life.trees)
        _watch_retraction(engine, life.retracted)
        if case["shaken"] is not None:
            _shake(engine, Random(case["shaken"] * 1009 + mesh.rank))
    while len(life.rows) <= last or not engine.is_idle:
        while actions and actions[0]["step"] <= len(life.rows):
            _do(engine, actions.popleft())
        _step(engine, life)
    for number in range(case["naps"]):
        life.naps.append(_nap(engine, rings=number % mesh.world.size == mesh.rank))
        _step(engine, life)
    life.pages_used = engine.status().pages_used
    engine.leave()
    engine.step()
    assert engine.has_ended, "the ranks did not leave together"
    engine.close()
    life.world_log, life.attn_log = logs.world.told(), logs.attn.told()
    life.seconds = time.monotonic() - began
    return life


def _told(lines: Sequence[TokenLogprob]) -> list[list[Any]]:
    return [[line.token_id, line.logprob, line.rank, line.top] for line in lines]


def _step(engine: Rank, life: Life) -> None:
    result = engine.step()
    loop = engine._loop if isinstance(engine, Engine) else engine
    assert not loop._forward_spans._spans, "spans of forwards that no step took"
    life.padded += result.stats.padded_rows
    life.replayed += "replay" in result.stats.phase_seconds
    life.rows.append(result.stats.target_rows)
    if isinstance(engine, Engine):
        engine.check_pages()
    for output in result.outputs:
        if output.tree is not None:
            life.shown.setdefault(output.request_id, []).append(astuple(output.tree))
        life.tokens.setdefault(output.request_id, []).extend(output.token_ids)
        if output.prompt_logprobs:
            assert output.request_id not in life.scores, "told twice"
            life.scores[output.request_id] = _told(output.prompt_logprobs)
        life.drawn.setdefault(output.request_id, []).extend(_told(output.logprobs))
        if output.finish_reason is not None:
            counts = output.speculation
            life.ended[output.request_id] = (output.finish_reason, None if counts is None else list(counts.accepted))


def _nap(engine: Rank, rings: bool) -> Nap:
    """Sleep until a rank rings; the one that `rings` does so from another thread."""
    rang: list[float] = []

    def ring() -> None:
        rang.append(time.monotonic())
        engine.wake_ranks()

    if rings:
        threading.Timer(RING_AFTER_S, ring).start()
    began, cpu = time.monotonic(), time.process_time()
    engine.sleep()
    woke, used = time.monotonic(), time.process_time() - cpu
    return Nap(woke, rang[0] if rang else 0.0, woke - began, used)


def _watch_trees(engine: Engine, trees: dict[str, int]) -> None:
    """Keep a checksum of all trees that counted for each request: not of a step begun before its end was known. What
    is captured drafts unseen, so nothing is kept then.
    """
    if engine._parts.lockstep.programs._capture is not None:
        return
    drafter, drafted = engine._parts.lockstep.step._draft, deque[dict[int, bytes]]()
    true, true_commit = drafter.draft, engine._committer.commit

    def draft(batch: Batch, *given: Any) -> DraftTree:
        drawn = true(batch, *given)
        nodes = zip(drawn.tokens.tolist(), drawn.parents.tolist(), strict=True)
        rows = batch.rows[: batch.decodes].tolist()
        drafted.append({row: str(list(each)).encode() for row, each in zip(rows, nodes, strict=True)})
        return drawn

    def commit(step: StepInFlight, *given: Any) -> Any:
        words = drafted.popleft()
        for sequence, lease in step.schedule.decodes:
            if sequence.lease is lease:
                name = sequence.request.request_id
                trees[name] = zlib.crc32(words[lease.row], trees.get(name, 0))
        return true_commit(step, *given)

    drafter.draft = draft  # type: ignore[method-assign]
    engine._committer.commit = commit  # type: ignore[method-assign]


def _watch_retraction(engine: Engine, names: list[str]) -> None:
    scheduler = engine._parts.scheduler.decode
    true = scheduler._retract

    def retract(sequence: Any) -> None:
        names.append(sequence.request.request_id)
        true(sequence)

    scheduler._retract = retract  # type: ignore[method-assign]


def _shake(engine: Engine, random: Random) -> None:
    """Random tiers and chunk sizes from step to step."""
    scheduler, deepest = engine._parts.scheduler, engine._parts.resolved.shape.num_steps
    true = scheduler.schedule

    def schedule(*given: int) -> Any:
        scheduler.prefill._max_rows = random.choice((1, 2, 5, 13, 64, 1 << 30))
        scheduler.prefill._max_mixed_rows = random.choice((1, 3, scheduler.prefill._max_rows))
        made = true(*given)
        made.num_steps = random.randint(0, deepest)
        return made

    scheduler.schedule = schedule  # type: ignore[method-assign]


def _do(engine: Rank, action: dict[str, Any]) -> None:
    fields = action["request"]
    if action["kind"] == "abort":
        engine.abort(fields["request_id"])  # type: ignore[attr-defined]
        return
    params = RequestParams(**fields["params"] | {"adjustments": _adjustments(fields["params"])})
    engine.submit(Request(fields["request_id"], tuple(fields["prompt_token_ids"]), params))  # type: ignore[attr-defined]


def _adjustments(params: dict[str, Any]) -> LogitAdjustments | None:
    """Those in JSON, whose lists were tuples."""

    def tupled(value: Any) -> Any:
        return tuple(map(tupled, value)) if isinstance(value, list) else value

    given = params.get("adjustments")
    return None if given is None else LogitAdjustments(**{name: tupled(value) for name, value in given.items()})


if __name__ == "__main__":
    serve(int(sys.argv[1]), live)
