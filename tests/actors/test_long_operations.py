"""One operation of the real engine that takes longer than any limit, seen through its loop's heartbeats; no Ray."""

import shutil
import time
from pathlib import Path

from cluster.actors.loop import EngineLoop
from cluster.actors.messages import Commands
from cluster.actors.verdict import Signs, Verdict, judge
from cluster.config import EngineConfig
from cluster.request import Request, SamplingParams
from tests.actors.slowed_engine import BLOCK, BURN, BURN_S, ROWS, build
from tests.tiny import target_folder

LIMIT_S = 0.5


def run_loop(folder: Path, trouble: str) -> EngineLoop:
    shutil.copytree(target_folder(), folder, dirs_exist_ok=True)
    (folder / trouble).touch()
    loop = EngineLoop(build(EngineConfig(model_path=str(folder), num_threads=2, max_total_tokens=4096)))
    loop.start()
    ids = tuple(3 + i % 60 for i in range(ROWS + 50))
    loop.put(Commands((Request("long", ids, SamplingParams(max_tokens=1, temperature=0.0)),)))
    assert [item.begun for item in loop.drain(timeout_s=30)] == [("long",)]
    return loop


def verdict(loop: EngineLoop) -> Verdict | None:
    return judge([Signs(loop.heartbeat())], LIMIT_S)


def test_an_operation_that_computes_is_no_freeze_however_long_it_takes(tmp_path: Path) -> None:
    loop, began, longest = run_loop(tmp_path, BURN), time.monotonic(), 0.0
    while not (items := loop.drain(timeout_s=0.1)):
        beat = loop.heartbeat()
        longest = max(longest, beat.unmarked_s)
        assert verdict(loop) is None
        assert not longest > LIMIT_S or (beat.busy and not beat.waits and beat.phase == "target")
    assert items[0].outputs[0].finish_reason == "length"
    assert time.monotonic() - began > BURN_S > 3 * LIMIT_S and longest > 3 * LIMIT_S
    assert loop.stop()


def test_an_operation_that_does_nothing_is_one(tmp_path: Path) -> None:
    loop, until = run_loop(tmp_path, BLOCK), time.monotonic() + 60
    while (said := verdict(loop)) is None or not said.final:
        assert time.monotonic() < until
        time.sleep(0.1)
    assert (said.rank, said.kind, said.step, said.phase) == (0, "frozen", 0, "target")
    assert "did nothing for" in said.reason
