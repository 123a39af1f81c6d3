"""One operation of the real engine takes longer than any limit. The tests judge the loop's heartbeats, without Ray."""

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
from tests.serving.actors.slowed_engine import BLOCK, BURN, BURN_S, MIN_ROWS, build, serve_rank
from tests.support.tiny_checkpoints import target_folder

LIMIT_S = 0.5


def run_loop(folder: Path, trouble: str) -> EngineLoop:
    """Start a loop over a slowed engine with this trouble, and have it admit a prompt that is long enough for it."""
    shutil.copytree(target_folder(), folder, dirs_exist_ok=True)
    (folder / trouble).touch()
    config = EngineConfig(model_path=str(folder), num_threads=2, max_total_tokens=4096, mixed_prefill_size=512)
    loop = EngineLoop(build(config))
    loop.start()
    prompt = tuple(3 + i % 60 for i in range(MIN_ROWS + 50))
    loop.put(Commands((Request("long", prompt, RequestParams(max_tokens=1, temperature=0.0)),)))
    assert [item.admitted for item in loop.drain(timeout_s=30)] == [("long",)]
    return loop


def verdict(loop: EngineLoop) -> Verdict | None:
    return judge([RankEvidence(loop.heartbeat())], LIMIT_S)


def test_long_computing_operation_is_not_judged_a_freeze(tmp_path: Path) -> None:
    loop, started_at, longest_since_mark_s = run_loop(tmp_path, BURN), time.monotonic(), 0.0
    while not (items := loop.drain(timeout_s=0.1)):
        beat = loop.heartbeat()
        longest_since_mark_s = max(longest_since_mark_s, beat.since_mark_s)
        assert verdict(loop) is None
        assert beat.since_mark_s <= LIMIT_S or (beat.busy and not beat.is_waiting and beat.phase == "target")
    assert items[0].outputs[0].finish_reason == "length"
    assert time.monotonic() - started_at > BURN_S > 3 * LIMIT_S and longest_since_mark_s > 3 * LIMIT_S
    assert loop.stop()


def test_blocked_operation_is_judged_a_freeze(tmp_path: Path) -> None:
    loop, deadline = run_loop(tmp_path, BLOCK), time.monotonic() + 60
    while (last_verdict := verdict(loop)) is None or not last_verdict.final:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert (last_verdict.rank, last_verdict.kind, last_verdict.step, last_verdict.phase) == (0, "frozen", 0, "target")
    assert "did nothing for" in last_verdict.reason


@contextmanager
def two_ranks(folder: Path, trouble: str) -> Iterator[list[Connection]]:
    """Run `serve_rank` in two processes and yield a pipe to each. The engines are slowed ones with this trouble."""
    shutil.copytree(target_folder(), folder, dirs_exist_ok=True)
    (folder / trouble).touch()
    spawn = multiprocessing.get_context("spawn")
    pipes, processes, port = [], [], 0
    try:
        for rank in range(2):
            parent_pipe, child_pipe = spawn.Pipe()
            process = spawn.Process(target=serve_rank, args=(rank, str(folder), port, child_pipe), daemon=True)
            process.start()
            processes.append(process)
            pipes.append(parent_pipe)
            port = port or parent_pipe.recv()
        assert [pipe.recv() for pipe in pipes] == ["ready", "ready"]
        yield pipes
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.slow
@pytest.mark.parametrize("trouble", [BURN, BLOCK])
def test_waiting_rank_is_not_blamed_for_a_slow_or_frozen_peer(tmp_path: Path, trouble: str) -> None:
    prompt = tuple(3 + i % 60 for i in range(MIN_ROWS + 50))
    request = Request("long", prompt, RequestParams(max_tokens=1, temperature=0.0, seed=1))
    with two_ranks(tmp_path, trouble) as pipes:
        pipes[1].send(Commands((request,)))
        deadline, longest_wait_s, last_verdict, outputs = time.monotonic() + 90, 0.0, None, []
        while not outputs and (last_verdict is None or not last_verdict.final):
            assert time.monotonic() < deadline
            time.sleep(0.1)
            for pipe in pipes:
                pipe.send("heartbeat")
            beats, items = zip(*(pipe.recv() for pipe in pipes), strict=True)
            outputs = [output for item in items[1] for output in item.outputs]
            longest_wait_s = max(longest_wait_s, beats[0].idle_s if beats[0].is_waiting else 0.0)
            last_verdict = judge([RankEvidence(beat) for beat in beats], LIMIT_S)
            assert last_verdict is None or (trouble == BLOCK and last_verdict.rank == 1)
        assert longest_wait_s > 3 * LIMIT_S, "rank 0 did not have to wait"
        if trouble == BURN:
            assert outputs[0].finish_reason == "length"
        else:
            assert (
                last_verdict is not None and last_verdict.phase == "target" and "did nothing for" in last_verdict.reason
            )
