"""What the harness leaves behind when the server that it measures does not answer."""

import asyncio
import random
import time

import pytest

from cluster.bench import rudeness
from cluster.bench.cases import crowd
from cluster.bench.cases.crowd import Counter


def test_a_slow_body_that_is_given_up_leaves_no_task_and_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rudeness, "SLOW_LIMIT_S", 0.3)
    closed = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # to the end of what is sent
        closed.set()
        writer.close()

    async def scene() -> rudeness.Tally:
        server = await asyncio.start_server(silent, rudeness.HOST, 0)
        before, tally = asyncio.all_tasks(), rudeness.Tally()
        await rudeness._slow(tally, server.sockets[0].getsockname()[1], "m", 0, random.Random(0))
        await asyncio.sleep(0)  # for the reading to be told
        left = [task for task in asyncio.all_tasks() - before if "read_reply" in repr(task)]
        assert not left
        await asyncio.wait_for(closed.wait(), 5)
        server.close()
        return tally

    assert asyncio.run(scene()).unanswered == 1


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many streams were resumed, by a page that is there again and again not."""
    answers: list[float | OSError] = [2.0, OSError("no"), 5.0, OSError("no")]

    def page(port: int) -> float:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(crowd, "resumed_streams", page)


@pytest.mark.usefixtures("flaky")
def test_a_crowd_that_never_began_has_nothing_to_settle() -> None:
    assert Counter(1, 1, 0).settle() == (None, None, 0)


@pytest.mark.usefixtures("flaky")
def test_a_page_that_fails_does_not_end_the_watch() -> None:
    counter = Counter(1, 1, 0)
    counter._thread.start()
    while not counter._times:
        time.sleep(0.01)
    assert counter.settle()[2] == 3
