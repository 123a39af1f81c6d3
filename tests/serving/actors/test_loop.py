import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster.actors.engine_loop import EngineLoop
from cluster.actors.messages import Commands, StepItem
from cluster.config import EngineConfig
from cluster.request import Request, RequestParams, SequenceOutput
from tests.distributed.gang import NOTICE_SLACK
from tests.serving.actors.counting_engine import (
    OUT_OF_STEP,
    POISON,
    SLOW,
    SLOW_PHASES,
    STUCK,
    TOO_LONG,
    CountingEngine,
    Rendezvous,
    build,
    open_store,
)


def make_request(name: str, *prompt: int, max_tokens: int = 6) -> Request:
    return Request(name, prompt, RequestParams(max_tokens=max_tokens))


@pytest.fixture
def loop():
    loop = EngineLoop(CountingEngine(EngineConfig(model_path="fake")), rank=3)
    loop.start()
    yield loop
    assert loop.stop()


def collect(loop: EngineLoop, *names: str, within_s: float = 60.0) -> tuple[list[StepItem], dict[str, SequenceOutput]]:
    """Drain the loop until every named request has ended. Returns the step items, and the last output by request id."""
    items, last_outputs, deadline = [], {}, time.monotonic() + within_s
    while not set(names) <= set(last_outputs) and time.monotonic() < deadline:
        for item in loop.drain(timeout_s=0.5):
            if not item.admitted:
                items.append(item)
            last_outputs |= {output.request_id: output for output in item.outputs if output.finish_reason is not None}
    assert set(names) <= set(last_outputs), f"only {sorted(last_outputs)} ended"
    return items, last_outputs


def cpu_seconds(*loops: EngineLoop) -> float:
    """The CPU time that the threads of the loops have used. Threads that other tests have left do not count."""
    return sum(time.clock_gettime(time.pthread_getcpuclockid(loop._thread.ident)) for loop in loops)


def test_each_step_gives_a_single_item_with_all_requests(loop):
    loop.put(Commands(submits=(make_request("a", 10), make_request("b", 100))))
    items, _ = collect(loop, "a", "b")
    assert [item.step for item in items] == [1, 2, 3]
    assert all(item.rank == 3 and [o.request_id for o in item.outputs] == ["a", "b"] for item in items)
    assert [t for item in items for t in item.outputs[1].token_ids] == [101, 102, 103, 104, 105, 106]


def test_idle_loop_sleeps_until_a_request_is_submitted(loop):
    loop.put(Commands(submits=(make_request("a", 1),)))
    collect(loop, "a")
    time.sleep(0.05)
    steps, cpu_s_before = loop.heartbeat().steps, cpu_seconds(loop)
    time.sleep(0.5)
    assert cpu_seconds(loop) - cpu_s_before < 0.05
    beat = loop.heartbeat()
    assert (beat.steps, beat.busy) == (steps, False)
    loop.put(Commands(submits=(make_request("b", 1),)))
    collect(loop, "b")


def test_loop_reports_admitted_requests_before_the_step(loop):
    loop.put(Commands(submits=(make_request("a", POISON), make_request("b", 1))))
    assert loop.wait() is not None
    assert [item.admitted for item in loop.drain()] == [("a", "b")]


def drain_for(loop: EngineLoop, within_s: float) -> list[StepItem]:
    """Drain the loop for `within_s` seconds, and return all step items."""
    items, deadline = [], time.monotonic() + within_s
    while (remaining_s := deadline - time.monotonic()) > 0:
        items += loop.drain(timeout_s=remaining_s)
    return items


def wait_until_asleep(loops: list[EngineLoop]) -> bool:
    """Wait up to 60 s until no loop is busy. Returns whether none is."""
    deadline = time.monotonic() + 60
    while any(loop.heartbeat().busy for loop in loops) and time.monotonic() < deadline:
        time.sleep(0.005)
    return not any(loop.heartbeat().busy for loop in loops)


@pytest.mark.parametrize("last_commands", [Commands(confirmed=("b",)), Commands(aborts=("b",))])
def test_step_of_a_suspect_request_waits_for_the_confirmation_of_the_replica(loop, monkeypatch, last_commands):
    monkeypatch.setattr("cluster.actors.engine_loop.CONFIRMATION_TIMEOUT_S", 30.0)
    loop.put(Commands(submits=(make_request("a", 1), make_request("b", 7)), suspects=("a", "b")))
    (item,) = loop.drain(timeout_s=30)
    assert item.admitted == ("a", "b") and not item.outputs
    assert drain_for(loop, 0.3) == []
    loop.put(Commands(confirmed=("a",)))
    assert drain_for(loop, 0.3) == []
    loop.put(last_commands)
    collect(loop, "a")
    loop.put(Commands(submits=(make_request("b2", 1), make_request("a", 5))))  # no request is a suspect any more
    collect(loop, "a", "b2")


def test_step_of_a_suspect_request_starts_after_the_confirmation_timeout(loop, monkeypatch):
    monkeypatch.setattr("cluster.actors.engine_loop.CONFIRMATION_TIMEOUT_S", 0.2)
    submitted_at = time.monotonic()
    loop.put(Commands(submits=(make_request("a", 7),), suspects=("a",)))
    collect(loop, "a")
    assert time.monotonic() - submitted_at > 0.2
    monkeypatch.setattr("cluster.actors.engine_loop.CONFIRMATION_TIMEOUT_S", 30.0)
    loop.put(Commands(submits=(make_request("a", 7),)))
    collect(loop, "a")


def test_abort_reaches_the_engine_between_steps(loop):
    loop.put(Commands(submits=(make_request("a", SLOW, 1, max_tokens=10_000),)))
    assert loop.drain(timeout_s=30)
    loop.put(Commands(aborts=("a", "never-heard-of")))
    assert wait_until_asleep([loop])
    beat = loop.heartbeat()
    assert beat.status.aborted == 1 and beat.status.running == 0


def test_invalid_request_is_refused_without_harm_to_other_requests(loop):
    loop.put(Commands(submits=(make_request("bad", TOO_LONG), make_request("good", 5))))
    items, _ = collect(loop, "good")
    assert items[0].refused == (("bad", "prompt is too long"),)
    assert loop.failure is None


def test_refusal_without_outputs_still_gives_an_item(loop):
    loop.put(Commands(submits=(make_request("bad", TOO_LONG),)))
    (item,) = loop.drain(timeout_s=30)
    assert item.refused and not item.outputs


def test_failing_step_ends_the_loop_and_reports_rank_phase_and_reason(loop):
    loop.put(Commands(submits=(make_request("a", SLOW, 1, max_tokens=1000),)))
    assert loop.drain(timeout_s=30)
    steps = loop.heartbeat().steps
    loop.put(Commands(submits=(make_request("b", POISON),)))
    failure = loop.wait()
    assert failure is not None
    assert (failure.reported_by, failure.rank, failure.kind, failure.phase) == (3, 3, "failed", "target")
    assert failure.step >= steps
    assert failure.reason.startswith("RuntimeError: poisoned (")
    beat = loop.heartbeat()
    assert loop.failure == failure and not beat.busy
    assert (beat.step, beat.phase) == (failure.step, "target")
    loop.put(Commands(submits=(make_request("c", 1),)))
    items = loop.drain()
    admitted_ids = [request_id for item in items for request_id in item.admitted]
    outputs = [output for item in items for output in item.outputs]
    assert "b" in admitted_ids and "c" not in admitted_ids
    assert all(output.request_id != "c" and output.finish_reason is None for output in outputs)
    assert loop.has_ended and loop.drain(timeout_s=5) == []


def test_heartbeat_age_grows_during_a_stuck_step(loop):
    time.sleep(0.3)  # the time before the request must not count
    submitted_at = time.monotonic()
    loop.put(Commands(submits=(make_request("a", STUCK, 1, max_tokens=2),)))
    # Each heartbeat notes whether the engine has entered a phase. A normal step takes 1 ms.
    while not ((beat := loop.heartbeat()).busy and beat.idle_s > 0.1):
        time.sleep(0.01)
    time.sleep(0.2)
    idle_s, busy = loop.heartbeat().idle_s, loop.heartbeat().busy
    assert beat.idle_s + 0.2 < idle_s < time.monotonic() - submitted_at and busy
    collect(loop, "a")


def test_heartbeat_age_restarts_with_each_phase_of_a_slow_step(loop):
    started_at = time.monotonic()
    loop.put(Commands(submits=(make_request("a", SLOW_PHASES, 1, max_tokens=2),)))
    idle_times, phases = [], []
    assert [item.admitted for item in loop.drain(timeout_s=30)] == [("a",)]
    while not (items := loop.drain(timeout_s=0.05)):
        beat = loop.heartbeat()
        idle_times.append(beat.idle_s)
        phases.append(beat.phase)
    assert items[0].outputs[0].token_ids == (2, 3)
    assert max(idle_times) < (time.monotonic() - started_at) / 2, "each of the four phases takes 0.4 s"
    assert set(phases) >= {"plan", "draft", "target", "extend"}


def test_stop_ends_a_busy_loop():
    loop = EngineLoop(CountingEngine(EngineConfig(model_path="fake")))
    loop.start()
    loop.put(Commands(submits=(make_request("a", SLOW, 1, max_tokens=10_000),)))
    assert loop.drain(timeout_s=30)
    assert loop.stop(timeout_s=30)
    assert loop.has_ended and loop.wait() is None
    loop.drain()  # the outputs of the last steps
    started_at = time.monotonic()
    assert loop.drain(timeout_s=30) == []
    assert time.monotonic() - started_at < 20, "the drain of an ended loop waited"


@pytest.fixture
def gang():
    """The running loops of a gang of three ranks in this process, by rank."""
    store = open_store("127.0.0.1")
    rendezvous = Rendezvous("127.0.0.1", store.port)
    config = EngineConfig(model_path="fake", tp_size=3)
    with ThreadPoolExecutor(3) as pool:
        engines = list(pool.map(lambda rank: build(config, rank, rendezvous, None if rank else store), range(3)))
    loops = [EngineLoop(engine, rank, 3) for rank, engine in enumerate(engines)]
    for loop in loops:
        loop.start()
    yield loops
    assert all(loop.stop() for loop in loops)


def make_seeded_request(name: str, *prompt: int, max_tokens: int = 6) -> Request:
    return Request(name, prompt, RequestParams(max_tokens=max_tokens, seed=1))


def test_ranks_without_requests_step_with_a_busy_rank_and_then_all_sleep(gang):
    gang[1].put(Commands(submits=(make_seeded_request("a", 10, max_tokens=40),)))
    collect(gang[1], "a")
    assert wait_until_asleep(gang)
    steps = [loop.heartbeat().steps for loop in gang]
    assert len(set(steps)) == 1 and steps[0] >= 20
    cpu_s_before = cpu_seconds(*gang)
    time.sleep(0.5)
    assert cpu_seconds(*gang) - cpu_s_before < 0.05
    assert [loop.heartbeat().steps for loop in gang] == steps


def test_every_submit_around_falling_asleep_is_processed(gang):
    """Random ranks get requests at random moments around falling asleep. A request that gets lost would never end."""
    rng = random.Random(1)
    for turn in range(300):
        ranks = rng.sample(range(3), rng.randint(1, 3))
        for rank in ranks:
            time.sleep(rng.random() * 0.004)
            gang[rank].put(Commands(submits=(make_seeded_request(f"{turn}", rank, max_tokens=2),)))
        for rank in ranks:
            collect(gang[rank], f"{turn}")
    assert wait_until_asleep(gang)


def test_stopping_a_single_rank_stops_all_busy_ranks(gang):
    gang[0].put(Commands(submits=(make_seeded_request("a", SLOW, 1, max_tokens=10_000),)))
    assert gang[0].drain(timeout_s=30)
    assert gang[2].stop(timeout_s=30)
    assert [loop.wait() for loop in gang] == [None] * 3


def test_stopping_a_single_rank_stops_a_sleeping_gang(gang):
    assert wait_until_asleep(gang)
    assert gang[1].stop(timeout_s=30)
    assert [loop.wait() for loop in gang] == [None] * 3


def test_failed_rank_is_named_by_its_peers(gang):
    gang[0].put(Commands(submits=(make_seeded_request("a", SLOW, 1, max_tokens=10_000),)))
    assert gang[0].drain(timeout_s=30)
    submitted_at = time.monotonic()
    gang[2].put(Commands(submits=(make_seeded_request("b", POISON, 1),)))
    failures = [loop.wait() for loop in gang]
    assert time.monotonic() - submitted_at < 1.0 * NOTICE_SLACK
    assert [(f.reported_by, f.rank, f.kind) for f in failures] == [(0, 2, "lost"), (1, 2, "lost"), (2, 2, "failed")]
    assert {f.phase for f in failures} == {"target"} and len({f.step for f in failures}) == 1


def test_rank_out_of_step_is_reported_as_out_of_step(gang):
    gang[1].put(Commands(submits=(make_seeded_request("b", OUT_OF_STEP, 1),)))
    failure = gang[1].wait()
    assert failure is not None and (failure.kind, failure.rank) == ("out_of_step", 1)
