"""One operation of the real engine that takes longer than any limit, seen through its loop's heartbeats; no Ray."""

import multiprocessing
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from cluster.actors.blame import RankEvidence, Verdict, judge
from cluster.actors.engine_loop import EngineLoop
from cluster.actors.messages import Commands
from cluster.config import EngineConfig
from cluster.request import Request, RequestParams
from tests.actors.slowed_engine import BLOCK, BURN, BURN_S, ROWS, build, serve_rank
from tests.tiny import target_folder

LIMIT_S = 0.5


def run_loop(folder: Path, trouble: str) -> EngineLoop:
    shutil.copytree(target_folder(), folder, dirs_exist_ok=True)
    (folder / trouble).touch()
    config = EngineConfig(model_path=str(folder), num_threads=2, max_total_tokens=4096, mixed_prefill_size=512)
    loop = EngineLoop(build(config))
    loop.start()
    ids = tuple(3 + i % 60 for i in range(ROWS + 50))
    loop.put(Commands((Request("long", ids, RequestParams(max_tokens=1, temperature=0.0)),)))
    assert [item.admitted for item in loop.drain(timeout_s=30)] == [("long",)]
    return loop


def verdict(loop: EngineLoop) -> Verdict | None:
    return judge([RankEvidence(loop.heartbeat())], LIMIT_S)


def test_long_computing_operation_is_not_judged_a_freeze(tmp_path: Path) -> None:
    loop, began, longest = run_loop(tmp_path, BURN), time.monotonic(), 0.0
    while not (items := loop.drain(timeout_s=0.1)):
        beat = loop.heartbeat()
        longest = max(longest, beat.since_mark_s)
        assert verdict(loop) is None
        assert beat.since_mark_s <= LIMIT_S or (beat.busy and not beat.is_waiting and beat.phase == "target")
    assert items[0].outputs[0].finish_reason == "length"
    assert time.monotonic() - began > BURN_S > 3 * LIMIT_S and longest > 3 * LIMIT_S
    assert loop.stop()


def test_blocked_operation_is_judged_a_freeze(tmp_path: Path) -> None:
    loop, until = run_loop(tmp_path, BLOCK), time.monotonic() + 60
    while (said := verdict(loop)) is None or not said.final:
        assert time.monotonic() < until
        time.sleep(0.1)
    assert (said.rank, said.kind, said.step, said.phase) == (0, "frozen", 0, "target")
    assert "did nothing for" in said.reason


@contextmanager
def two_ranks(folder: Path, trouble: str) -> Iterator[list[Connection]]:
    shutil.copytree(target_folder(), folder, dirs_exist_ok=True)
    (folder / trouble).touch()
    spawn = multiprocessing.get_context("spawn")
    pipes, processes, port = [], [], 0
    try:
        for rank in range(2):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=serve_rank, args=(rank, str(folder), port, theirs), daemon=True)
            process.start()
            processes.append(process)
            pipes.append(ours)
            port = port or ours.recv()
        assert [pipe.recv() for pipe in pipes] == ["ready", "ready"]
        yield pipes
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.parametrize("trouble", [BURN, pytest.param(BLOCK, marks=pytest.mark.slow)])
def test_waiting_rank_is_not_blamed_for_a_slow_or_frozen_peer(tmp_path: Path, trouble: str) -> None:
    ids = tuple(3 + i % 60 for i in range(ROWS + 50))
    request = Request("long", ids, RequestParams(max_tokens=1, temperature=0.0, seed=1))
    with two_ranks(tmp_path, trouble) as pipes:
        pipes[1].send(Commands((request,)))
        until, waited, said, outputs = time.monotonic() + 90, 0.0, None, []
        while not outputs and (said is None or not said.final):
            assert time.monotonic() < until
            time.sleep(0.1)
            for pipe in pipes:
                pipe.send("heartbeat")
            beats, items = zip(*(pipe.recv() for pipe in pipes), strict=True)
            outputs = [output for item in items[1] for output in item.outputs]
            waited = max(waited, beats[0].idle_s if beats[0].is_waiting else 0.0)
            said = judge([RankEvidence(beat) for beat in beats], LIMIT_S)
            assert said is None or (trouble == BLOCK and said.rank == 1)
        assert waited > 3 * LIMIT_S, "rank 0 did not have to wait"
        if trouble == BURN:
            assert outputs[0].finish_reason == "length"
        else:
            assert said is not None and said.phase == "target" and "did nothing for" in said.reason
