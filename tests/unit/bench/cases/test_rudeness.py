"""What the harness leaves behind when the server that it measures does not answer."""

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

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # to the end of what is sent
        closed.set()
        writer.close()

    async def scene() -> rudeness.AnswerTally:
        server = await asyncio.start_server(silent, rudeness.HOST, 0)
        before, tally = asyncio.all_tasks(), rudeness.AnswerTally()
        await rudeness._slow_body(tally, server.sockets[0].getsockname()[1], "m", 0, random.Random(0))
        await asyncio.sleep(0)  # for the reading to be told
        left = [task for task in asyncio.all_tasks() - before if "read_reply" in repr(task)]
        assert not left
        await asyncio.wait_for(closed.wait(), 5)
        server.close()
        return tally

    assert asyncio.run(scene()).unanswered == 1


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> ResumeCounter:
    """Of a server whose page of resumed streams is again and again not there, and which is healthy when asked again."""
    answers: list[float | OSError] = [2.0, OSError("no"), 5.0, OSError("no")]
    health = [False, True]

    def page(port: int, name: str) -> float:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(crowd, "read_metric", page)
    monkeypatch.setattr(crowd, "POLL_S", 0.0)
    monkeypatch.setattr(
        fault, "server_info", lambda port: {"ranks": [{"rank": 0, "pid": 7}], "restarts": [{"rank": 1}]}
    )
    monkeypatch.setattr(fault, "is_healthy", lambda port: health.pop(0))
    monkeypatch.setattr(fault, "apply_fault", lambda verb, pid: hurt.append((verb, pid)))
    hurt.clear()
    server = SimpleNamespace(port=1)
    return ResumeCounter(1, fault.Fault(server, "kill rank 0", lambda streams: all(s.token_ids for s in streams)))  # type: ignore[arg-type]


hurt: list[tuple[str, int]] = []


def test_resume_counter_returns_at_once_if_no_fault_was_triggered(counter: ResumeCounter) -> None:
    counter.poll([ClientStream(Prompt("x"))])
    assert (counter.wait_until_healthy(), counter.fault.healthy_s, hurt) == ((None, 0), None, [])


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
    done = counter.fault
    assert (hurt, done.open_streams) == ([("kill", 7)], 1)
    assert done.unhealthy_s is not None and done.healthy_s is not None and resumed_s is not None
    assert 0.0 < done.unhealthy_s < done.healthy_s
    assert done.gang_failures({"restarts": [{"rank": 1}, {"rank": 0}]}) == [{"rank": 0}], (
        "the earlier one is not its doing"
    )
