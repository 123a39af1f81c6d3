"""The program of one measured rank. It reads a case from each line of stdin and writes the case's record to stdout."""

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from cluster.bench.ranks import RankRequest, RankRun, StepRecord
from cluster.bench.runs import fixed_length_params
from cluster.bench.streams import HOST
from cluster.config import EngineConfig
from cluster.distributed.mesh import Rendezvous
from cluster.engine import Engine, build_rank
from cluster.request import Request

PrepareEngine = Callable[[Engine, EngineConfig, Mapping[str, Any]], dict[str, list[float]]]
"""A function that changes an engine before a case. It gets the engine, the engine's config and the case's `options`.
It returns `RankRun.extra_times`: lists by name, which its changes may fill during the case.
"""


def main(rank: int, prepare: PrepareEngine = lambda *_: {}) -> None:
    """Run cases until stdin ends. `prepare` may change the engine of each case before its requests."""

    def answer(message: Mapping[str, Any]) -> dict[str, Any]:
        rendezvous = Rendezvous(HOST, message["port"], message["epoch"])
        return asdict(_run_case(rank, rendezvous, message["case"], prepare))

    answer_messages(answer)


def answer_messages(answer: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
    """Read messages, one JSON object per line, until stdin ends. Write `answer(message)` for each of them to stdout. If
    `answer` raises, write an object whose `error` says what it raised.
    """
    for line in sys.stdin:
        try:
            response = answer(json.loads(line))
        except Exception as error:  # the parent process reports any failure
            response = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(response), flush=True)


def _run_case(rank: int, rendezvous: Rendezvous, case: Mapping[str, Any], prepare: PrepareEngine) -> RankRun:
    config = EngineConfig.from_kwargs(case["settings"])
    engine = build_rank(config, rank, rendezvous if config.tp_size > 1 else None)
    assert isinstance(engine, Engine), "only ranks that take requests are measured"
    extra_times = prepare(engine, config, case["options"])
    try:
        rank_run = _run_requests(engine, case)
        rank_run.extra_times = extra_times
        return rank_run
    except BaseException as error:
        engine.close(f"{type(error).__name__}: {error}")
        raise
    finally:
        engine.close()


def _run_requests(engine: Engine, case: Mapping[str, Any]) -> RankRun:
    """Submit the requests of this rank, step until the gang (all ranks together) ends, and return the record. The gang
    ends after the request `last_request` or, if the case names none, when no rank has work left.
    """
    waiting = [
        request
        for request in (RankRequest(**fields) for fields in case["requests"])
        if request.dp_rank == engine.info().dp_rank
    ]
    running: dict[str, RankRequest] = {}
    rank_run, run_number, finished = RankRun(), 0, set[str]()
    while not engine.has_ended:
        for request in list(waiting):
            if request.wait_until_idle and running:
                break
            if request.after_request and request.after_request not in finished:
                continue
            waiting.remove(request)
            name = f"{request.name}#{run_number}" if request.name in rank_run.submitted_at else request.name
            running[name], run_number = request, run_number + 1
            rank_run.submitted_at[name] = time.perf_counter()
            engine.submit(Request(name, tuple(request.prompt), fixed_length_params(request.new_tokens)))
        started_at, cpu_seconds = time.perf_counter(), time.process_time()
        result = engine.step()
        ended_at, cpu_seconds = time.perf_counter(), time.process_time() - cpu_seconds
        rank_run.steps.append(
            StepRecord(
                started_at=started_at,
                seconds=ended_at - started_at,
                cpu_seconds=cpu_seconds,
                phase_seconds=result.stats.phase_seconds,
                decode_requests=result.stats.decode_requests,
                prompt_rows=result.stats.prompt_rows,
                target_rows=result.stats.target_rows,
                padded_rows=result.stats.padded_rows,
            )
        )
        for output in result.outputs:
            name = output.request_id
            rank_run.output_times.setdefault(name, []).append(ended_at)
            rank_run.tokens.setdefault(name, []).extend(output.token_ids)
            if output.finish_reason is None:
                continue
            request = running.pop(name)
            finished.add(name)
            if request.resubmit:
                waiting.append(request)
            if name == case["last_request"]:
                engine.leave()
        if not case["last_request"] and not waiting and engine.is_idle:
            engine.leave()
    return rank_run


if __name__ == "__main__":
    main(int(sys.argv[1]))
