import time

import pytest

from cluster.actors.loop import EngineLoop
from cluster.actors.messages import Commands, StepItem
from cluster.config import EngineConfig
from cluster.request import Request, RequestOutput, SamplingParams
from tests.actors.counting_engine import POISON, SLOW, STUCK, TOO_LONG, CountingEngine


def ask(name: str, *prompt: int, max_tokens: int = 6) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens))


@pytest.fixture
def loop():
    loop = EngineLoop(CountingEngine(EngineConfig(model_path="fake")), rank=3)
    loop.start()
    yield loop
    assert loop.stop()


def collect(loop: EngineLoop, *names: str, within_s: float = 5.0) -> tuple[list[StepItem], dict[str, RequestOutput]]:
    """All items until every named request ended, and the final outputs."""
    items, final, until = [], {}, time.monotonic() + within_s
    while not set(names) <= set(final) and time.monotonic() < until:
        for item in loop.drain(timeout_s=0.5):
            items.append(item)
            final |= {output.request_id: output for output in item.outputs if output.finish_reason is not None}
    assert set(names) <= set(final), f"only {sorted(final)} ended"
    return items, final


def test_each_step_is_one_item_with_every_request_in_it(loop):
    loop.put(Commands(submits=(ask("a", 10), ask("b", 100))))
    items, _ = collect(loop, "a", "b")
    assert [item.step for item in items] == [1, 2, 3]
    assert all(item.rank == 3 and [o.request_id for o in item.outputs] == ["a", "b"] for item in items)
    assert [t for item in items for t in item.outputs[1].token_ids] == [101, 102, 103, 104, 105, 106]


def test_an_idle_loop_sleeps_and_a_submit_wakes_it(loop):
    loop.put(Commands(submits=(ask("a", 1),)))
    collect(loop, "a")
    time.sleep(0.05)
    steps, spent = loop.heartbeat().steps, time.process_time()
    time.sleep(0.5)
    assert time.process_time() - spent < 0.05
    beat = loop.heartbeat()
    assert (beat.steps, beat.busy, beat.age_s) == (steps, False, 0.0)
    asked = time.monotonic()
    loop.put(Commands(submits=(ask("b", 1),)))
    collect(loop, "b")
    assert time.monotonic() - asked < 0.5


def test_abort_reaches_the_engine_between_steps(loop):
    loop.put(Commands(submits=(ask("a", SLOW, 1, max_tokens=10_000),)))
    assert loop.drain(timeout_s=2)
    loop.put(Commands(aborts=("a", "never-heard-of")))
    time.sleep(0.2)
    beat = loop.heartbeat()
    assert not beat.busy
    assert beat.status["aborted"] == 1 and beat.status["running"] == 0


def test_a_request_that_cannot_be_served_is_refused_and_harms_nobody(loop):
    loop.put(Commands(submits=(ask("bad", TOO_LONG), ask("good", 5))))
    items, _ = collect(loop, "good")
    assert items[0].refused == (("bad", "prompt is too long"),)
    assert not loop.heartbeat().failed


def test_a_refusal_alone_is_an_item_too(loop):
    loop.put(Commands(submits=(ask("bad", TOO_LONG),)))
    (item,) = loop.drain(timeout_s=2)
    assert item.refused and not item.outputs


def test_a_step_that_raises_ends_every_request_and_all_later_ones(loop):
    loop.put(Commands(submits=(ask("a", SLOW, 1, max_tokens=1000),)))
    assert loop.drain(timeout_s=2)
    loop.put(Commands(submits=(ask("b", POISON),)))
    _, final = collect(loop, "a", "b")
    assert {output.finish_reason for output in final.values()} == {"error"}
    beat = loop.heartbeat()
    assert beat.failed.startswith("rank 3: RuntimeError: poisoned") and not beat.busy
    loop.put(Commands(submits=(ask("c", 1),)))
    _, final = collect(loop, "c")
    assert final["c"].error == beat.failed


def test_the_pulse_of_a_stuck_step_ages(loop):
    time.sleep(0.3)  # an idle time that must not count
    loop.put(Commands(submits=(ask("a", STUCK, 1, max_tokens=2),)))
    time.sleep(0.2)
    assert 0.1 < loop.heartbeat().age_s < 0.29
    time.sleep(0.2)
    assert loop.heartbeat().age_s > 0.35 and loop.heartbeat().busy
    collect(loop, "a", within_s=15)


def test_stop_ends_a_waiting_reader_and_a_busy_loop():
    loop = EngineLoop(CountingEngine(EngineConfig(model_path="fake")))
    loop.start()
    loop.put(Commands(submits=(ask("a", SLOW, 1, max_tokens=10_000),)))
    assert loop.drain(timeout_s=2)
    assert loop.stop(timeout_s=2)
    assert loop.stopping and loop.drain(timeout_s=5) is not None
