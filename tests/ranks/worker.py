"""The process of one rank: reads a case per line, runs it, answers with one line of JSON."""

import json
import sys
import time
import zlib
from collections.abc import Sequence
from random import Random
from typing import Any

from torch import Tensor

from cluster.config import ConfigError, EngineConfig
from cluster.engine import Engine, Rank, build_rank
from cluster.mesh import Axis, GangError, Rendezvous
from cluster.request import Request, SamplingParams
from tests.ranks.plants import plant


class Log:
    """Every collective over the whole world that this rank entered: name, sizes, width, dtype, in order."""

    def __init__(self) -> None:
        self.count, self.digest = 0, 0
        self._kept: list[tuple[str, Any]] = []

    def attach(self, rank: Rank) -> None:
        """Log what the rank's axes do from now on."""
        world, log = rank._lockstep.mesh.world, self
        for name in ("gather", "reduce_scatter", "swap"):
            true = getattr(Axis, name)
            self._kept.append((name, true))

            def logged(axis: Axis, rows: Tensor, counts: Sequence[int], name: str = name, true: Any = true) -> Tensor:
                if axis is world:
                    log.add(f"{name} {list(counts)} {list(rows.shape[1:])} {rows.dtype}")
                return true(axis, rows, counts)

            setattr(Axis, name, logged)

    def detach(self) -> None:
        for name, true in self._kept:
            setattr(Axis, name, true)
        self._kept = []

    def add(self, line: str) -> None:
        self.count += 1
        self.digest = zlib.crc32(line.encode(), self.digest)


def main(rank: int) -> None:
    """Answer cases until the input ends."""
    for line in sys.stdin:
        message = json.loads(line)
        started = time.monotonic()
        try:
            answer = run(rank, Rendezvous("127.0.0.1", message["port"], message["epoch"]), message["case"])
        except (GangError, ConfigError) as error:
            answer = {
                "error": str(error),
                "kind": type(error).__name__,
                "rank": getattr(error, "rank", None),
                "step": getattr(error, "step", None),
                "phase": getattr(error, "phase", None),
            }
        answer["seconds"] = time.monotonic() - started
        print(json.dumps(answer), flush=True)


def run(rank: int, rendezvous: Rendezvous, case: dict[str, Any]) -> dict[str, Any]:
    """Build the rank, do what the case says step by step, and leave together with the peers."""
    config = EngineConfig.from_kwargs(case["config"])
    engine = build_rank(config, rank, rendezvous)
    log = Log()
    log.attach(engine)
    undo = plant(case["plant"], engine, case["at_step"]) if case["plant"] and rank == case["guilty"] else None
    try:
        return _steps(engine, case, log)
    except BaseException as error:
        engine.close(f"{type(error).__name__}: {error}")
        raise
    finally:
        log.detach()
        if undo is not None:
            undo()


def _steps(engine: Rank, case: dict[str, Any], log: Log) -> dict[str, Any]:
    mesh = engine._lockstep.mesh
    actions = [a for a in case["actions"] if a["dp_rank"] == mesh.dp_rank and mesh.leads]
    last = max((a["step"] for a in case["actions"]), default=0)
    if case["votes"] is not None and isinstance(engine, Engine):
        votes = Random(case["votes"] * 1009 + mesh.rank)
        engine._vote = lambda _: votes.randint(0, engine._p.shape.num_steps)  # type: ignore[method-assign]
    tokens: dict[str, list[int]] = {}
    ended: dict[str, Any] = {}
    retracted = padded = step = 0
    while step <= last or not engine.quiet:
        if step == case["steps"]:
            break
        while actions and actions[0]["step"] <= step:
            _do(engine, actions.pop(0))
        result = engine.step()
        retracted += result.stats.retracted
        padded += result.stats.padded_rows
        if isinstance(engine, Engine):
            engine.check_pages()
        for output in result.outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                counts = output.speculation
                accepted = None if counts is None else list(counts.accepted)
                ended[output.request_id] = [output.finish_reason, accepted]
        step += 1
    status = engine.status()
    engine.leave()
    engine.step()
    assert engine.left, "the ranks did not leave together"
    engine.close()
    return {
        "tokens": tokens,
        "ended": ended,
        "steps": step,
        "retracted": retracted,
        "padded": padded,
        "collectives": [log.count, log.digest],
        "pages_used": status.pages_used,
    }


def _do(engine: Rank, action: dict[str, Any]) -> None:
    fields = action["request"]
    if action["kind"] == "abort":
        engine.abort(fields["request_id"])
        return
    params = SamplingParams(**fields["params"])
    prompt = tuple(fields["prompt_token_ids"])
    engine.submit(Request(fields["request_id"], prompt, params))  # type: ignore[attr-defined]


if __name__ == "__main__":
    main(int(sys.argv[1]))
