"""The process of one measured rank: read a case (JSON) per line of stdin, write its record per line of stdout."""

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from cluster.bench.ranks import RankRequest, RankRun, StepRecord
from cluster.bench.runs import params_of
from cluster.bench.streams import HOST
from cluster.config import EngineConfig
from cluster.distributed.mesh import Rendezvous
from cluster.engine import Engine, build_rank
from cluster.request import Request

Prepare = Callable[[Engine, EngineConfig, Mapping[str, Any]], dict[str, list[float]]]
"""Changes an engine before a case, given its config and the case's `options`; returns lists for `RankRun.recorded`."""


def main(rank: int, prepare: Prepare = lambda *_: {}) -> None:
    """Run cases until stdin ends. `prepare` changes the engine of each case."""
    for line in sys.stdin:
        message = json.loads(line)
        try:
            answer = asdict(_live(rank, Rendezvous(HOST, message["port"], message["epoch"]), message["case"], prepare))
        except Exception as error:  # the parent process reports any failure
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


def _live(rank: int, rendezvous: Rendezvous, case: Mapping[str, Any], prepare: Prepare) -> RankRun:
    config = EngineConfig.from_kwargs(case["settings"])
    engine = build_rank(config, rank, rendezvous if config.tp_size > 1 else None)
    assert isinstance(engine, Engine), "only ranks that take requests are measured"
    recorded = prepare(engine, config, case["options"])
    try:
        life = _steps(engine, case)
        life.recorded = recorded
        return life
    except BaseException as error:
        engine.close(f"{type(error).__name__}: {error}")
        raise
    finally:
        engine.close()


def _steps(engine: Engine, case: Mapping[str, Any]) -> RankRun:
    """Submit the requests and step until the gang leaves: when request `until` ends, or when no rank has work left."""
    waiting = [
        job for job in (RankRequest(**fields) for fields in case["jobs"]) if job.dp_rank == engine.info().dp_rank
    ]
    running: dict[str, RankRequest] = {}
    life, lives, over = RankRun(), 0, set[str]()
    while not engine.left:
        for job in list(waiting):
            if job.alone and running:
                break
            if job.after and job.after not in over:
                continue
            waiting.remove(job)
            name = f"{job.name}#{lives}" if job.name in life.submitted else job.name
            running[name], lives = job, lives + 1
            life.submitted[name] = time.perf_counter()
            engine.submit(Request(name, tuple(job.prompt), params_of(job.new_tokens)))
        began, cpu = time.perf_counter(), time.process_time()
        result = engine.step()
        ended, cpu = time.perf_counter(), time.process_time() - cpu
        life.steps.append(
            StepRecord(
                began=began,
                seconds=ended - began,
                cpu=cpu,
                phases=result.stats.phase_seconds,
                decodes=result.stats.decode_requests,
                prompt_rows=result.stats.prompt_rows,
                target_rows=result.stats.target_rows,
                padded_rows=result.stats.padded_rows,
            )
        )
        for output in result.outputs:
            name = output.request_id
            life.times.setdefault(name, []).append(ended)
            life.tokens.setdefault(name, []).extend(output.token_ids)
            if output.finish_reason is None:
                continue
            job = running.pop(name)
            over.add(name)
            if job.again:
                waiting.append(job)
            if name == case["until"]:
                engine.leave()
        if not case["until"] and not waiting and engine.quiet:
            engine.leave()
    return life


if __name__ == "__main__":
    main(int(sys.argv[1]))
