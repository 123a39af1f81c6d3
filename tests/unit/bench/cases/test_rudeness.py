"""The harness of the rudeness and crowd benches cleans up and goes on when the measured server does not answer."""

import asyncio
import random
from types import SimpleNamespace

import pytest

from cluster.bench import fault, rudeness
from cluster.bench.cases import crowd
from cluster.bench.cases.crowd import ResumeCounter
from cluster.bench.streams import ClientStream, Prompt


def test_abandoned_slow_body_leaves_no_task_and_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rudeness, "SLOW_LIMIT_S", 0.3)
    closed = asyncio.Event()

    async def silent_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # reads until the client closes the connection
        closed.set()
        writer.close()

    async def run_scenario() -> rudeness.AnswerTally:
        server = await asyncio.start_server(silent_server, rudeness.HOST, 0)
        tasks_before, tally = asyncio.all_tasks(), rudeness.AnswerTally()
        await rudeness._slow_body(tally, server.sockets[0].getsockname()[1], "m", 0, random.Random(0))
        await asyncio.sleep(0)  # the task that reads the reply gets a turn to end
        reader_tasks = [task for task in asyncio.all_tasks() - tasks_before if "read_reply" in repr(task)]
        assert not reader_tasks
        await asyncio.wait_for(closed.wait(), 5)
        server.close()
        return tally

    assert asyncio.run(run_scenario()).unanswered == 1


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> ResumeCounter:
    """A counter of a server whose metric of resumed streams often cannot be read. The server is unhealthy at the first
    health check and healthy at the second.
    """
    metric_answers: list[float | OSError] = [2.0, OSError("no"), 5.0, OSError("no")]
    health_answers = [False, True]

    def fake_read_metric(port: int, name: str) -> float:
        answer = metric_answers.pop(0) if len(metric_answers) > 1 else metric_answers[0]
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(crowd, "read_metric", fake_read_metric)
    monkeypatch.setattr(crowd, "POLL_S", 0.0)
    monkeypatch.setattr(
        fault, "server_info", lambda port: {"ranks": [{"rank": 0, "pid": 7}], "restarts": [{"rank": 1}]}
    )
    monkeypatch.setattr(fault, "is_healthy", lambda port: health_answers.pop(0))
    monkeypatch.setattr(fault, "apply_fault", lambda verb, pid: applied_faults.append((verb, pid)))
    applied_faults.clear()
    server = SimpleNamespace(port=1)
    return ResumeCounter(1, fault.Fault(server, "kill rank 0", lambda streams: all(s.token_ids for s in streams)))  # type: ignore[arg-type]


applied_faults: list[tuple[str, int]] = []


def test_resume_counter_returns_at_once_if_no_fault_was_triggered(counter: ResumeCounter) -> None:
    counter.poll([ClientStream(Prompt("x"))])
    assert (counter.wait_until_healthy(), counter.fault.healthy_s, applied_faults) == ((None, 0), None, [])


def test_resume_counter_survives_failing_metrics_requests(counter: ResumeCounter) -> None:
    streams = [ClientStream(Prompt("x"), token_ids=[1]), ClientStream(Prompt("y"), token_ids=[1], ended_at=1.0)]
    while not counter._samples:
        counter.poll(streams)
    assert counter.wait_until_healthy()[1] == 3


def test_fault_is_applied_once_and_health_is_tracked_afterwards(counter: ResumeCounter) -> None:
    streams = [ClientStream(Prompt("x"), token_ids=[1]), ClientStream(Prompt("y"), token_ids=[1], ended_at=1.0)]
    for _ in range(3):
        counter.poll(streams)
    resumed_s, _ = counter.wait_until_healthy()
    kill_fault = counter.fault
    assert (applied_faults, kill_fault.open_streams) == ([("kill", 7)], 1)
    assert kill_fault.unhealthy_s is not None and kill_fault.healthy_s is not None and resumed_s is not None
    assert 0.0 < kill_fault.unhealthy_s < kill_fault.healthy_s
    assert kill_fault.gang_failures({"restarts": [{"rank": 1}, {"rank": 0}]}) == [{"rank": 0}], (
        "the restart of rank 1 came before this fault"
    )
