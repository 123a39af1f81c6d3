"""The limit of a grammar is processor time, so a busy machine is no reason to refuse a grammar permanently."""

import asyncio
import json
import os
import time
from collections.abc import Iterator
from itertools import chain, repeat

import pytest

from cluster.grammar import forks
from cluster.grammar.asked import Grammar, GrammarError
from cluster.grammar.compiler import Compiler, CompilerError, CompileResult, CompilerProcess
from cluster.grammar.forks import COMPILED, OUT_OF_TIME, REFUSED, REFUSED_WHILE_BUSY, TIMED_OUT, Child, compile_reply
from cluster.grammar.limits import MAX_MEMORY_BYTES, TOO_LARGE, Stopwatch, TimeSpent
from cluster.grammar.vocabulary import Vocabulary
from cluster.grammar.worker import SlowGrammarError, Worker

GOOD = Grammar("choice", '["yes"]')
REQUEST = {"kind": "choice", "text": "[]", "compact": False, "seconds": 0.3}


class FakeWorker(Worker):
    """A worker whose `compile` behaves as `behaviour` says: it waits, computes, fills memory, or is slow."""

    def __init__(self, behaviour: str) -> None:
        self._behaviour = behaviour

    def compile(self, grammar: Grammar) -> str:
        if self._behaviour == "waits":
            time.sleep(1.0)
        elif self._behaviour == "computes":
            while True:
                sum(range(1000))
        elif self._behaviour == "fills memory":
            bytearray(2 * MAX_MEMORY_BYTES)
        elif self._behaviour == "is slow":
            raise SlowGrammarError("it is too ambiguous")
        return "done"


def reply_of_child(worker: Worker) -> bytes:
    """The compile reply of a child process that runs `worker`."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        forks.write_all(write_end, compile_reply(worker, REQUEST))
        os._exit(0)
    os.close(write_end)
    child = Child(b"", pid, read_end, time.monotonic() + 60)
    while piece := os.read(read_end, 1 << 16):
        child.reply += piece
    os.close(read_end)
    return child.reap()


def test_sleeping_does_not_count_as_processor_time_of_a_grammar() -> None:
    assert reply_of_child(FakeWorker("waits")) == COMPILED + b"done", "it slept for a second, three times its limit"


def test_compiling_ends_at_the_processor_time_limit() -> None:
    answer = reply_of_child(FakeWorker("computes"))
    assert answer[:1] == OUT_OF_TIME
    time_spent = forks.time_spent_in(answer)
    assert 0.2 < time_spent.processor_s < 1.5 * time_spent.elapsed_s, "the system counts processor time in ticks"


def clock(*readings: float) -> Iterator[float]:
    return chain(readings, repeat(readings[-1]))


def test_compiling_is_refused_at_the_memory_limit() -> None:
    assert reply_of_child(FakeWorker("fills memory")) == REFUSED + TOO_LARGE.encode()


@pytest.mark.parametrize(
    ("processor_s", "elapsed_s", "busy"), [(1.0, 1.0, False), (0.95, 1.0, False), (0.5, 1.0, True)]
)
def test_machine_is_busy_when_processor_time_is_below_elapsed_time(
    processor_s: float, elapsed_s: float, busy: bool
) -> None:
    cpu_clock, wall_clock = clock(2.0, 2.0 + processor_s), clock(50.0, 50.0 + elapsed_s)
    stopwatch = Stopwatch(lambda: next(cpu_clock), lambda: next(wall_clock))
    time_spent = stopwatch.measure()
    assert (time_spent.processor_s, time_spent.elapsed_s) == pytest.approx((processor_s, elapsed_s))
    assert time_spent.machine_was_busy == busy


@pytest.mark.parametrize(("busy", "mark"), [(False, REFUSED), (True, REFUSED_WHILE_BUSY)])
def test_slow_grammar_is_refused_permanently_only_on_an_idle_machine(
    busy: bool, mark: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stopwatch, "measure", lambda self: TimeSpent(0.5 if busy else 1.0, 1.0))
    monkeypatch.setattr(forks, "set_limits", lambda processor_s: None)
    assert compile_reply(FakeWorker("is slow"), REQUEST) == mark + b"it is too ambiguous"


def parse_reply(reply: bytes) -> CompileResult:
    return CompilerProcess(Vocabulary((b"a",), ()), 10.0)._parse_reply(reply)


def timeout_reply(mark: bytes, processor_s: float, elapsed_s: float) -> bytes:
    return mark + json.dumps({"processor_s": processor_s, "elapsed_s": elapsed_s}).encode()


def test_parse_reply_maps_each_reply_to_its_result() -> None:
    assert parse_reply(COMPILED + b"rules") == CompileResult("rules")
    assert (
        parse_reply(REFUSED + b"why") == CompileResult(refusal="why")
        and parse_reply(REFUSED_WHILE_BUSY + b"why").is_lasting is False
    )
    slow_result = parse_reply(timeout_reply(OUT_OF_TIME, 10.0, 10.2))
    assert "longer than 10 s of processor time" in slow_result.refusal and slow_result.is_lasting
    assert parse_reply(timeout_reply(OUT_OF_TIME, 10.0, 40.0)).is_lasting is False
    with pytest.raises(CompilerError, match=r"too busy to compile it: it got 3.0 s of processor time in 60 s"):
        parse_reply(timeout_reply(TIMED_OUT, 3.0, 60.0))


def test_refusal_on_a_busy_machine_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [
        CompileResult(refusal="slow", is_lasting=False),
        CompileResult(refusal="slow", is_lasting=False),
        CompileResult("rules"),
    ]
    monkeypatch.setattr(CompilerProcess, "compile", lambda self, grammar: answers.pop(0))

    async def compile_repeatedly() -> None:
        compiler = Compiler(Vocabulary((b"a",), ()))
        for _ in range(2):
            with pytest.raises(GrammarError, match="slow"):
                await compiler.compile(GOOD)
        assert [await compiler.compile(GOOD) for _ in range(3)] == ["rules"] * 3 and not answers
        compiler.close()

    asyncio.run(compile_repeatedly())


def test_permanent_refusal_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [CompileResult(refusal="nothing can match")]
    monkeypatch.setattr(CompilerProcess, "compile", lambda self, grammar: answers.pop(0))

    async def compile_repeatedly() -> None:
        compiler = Compiler(Vocabulary((b"a",), ()))
        for _ in range(3):
            with pytest.raises(GrammarError, match="nothing can match"):
                await compiler.compile(GOOD)
        compiler.close()

    asyncio.run(compile_repeatedly())
