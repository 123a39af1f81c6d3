"""What a client sends delays its own request at most: compilers live in processes of their own, with limits."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from cluster.bench.hostile_grammars import HOSTILE
from cluster.grammar import compiler
from cluster.grammar.asked import Grammar, GrammarError
from cluster.grammar.compiler import (
    CHILD_TIMEOUT_S,
    GRACE_S,
    NICENESS,
    Compiler,
    CompilerError,
    CompileResult,
    CompilerProcess,
)
from tests.grammar.walks import demo, walk

GOOD = Grammar("choice", '["yes", "no"]')
SLOW = Grammar("json_schema", json.dumps({"properties": {f"p{at}": {"type": "string"} for at in range(3000)}}))


@pytest.fixture
def compile_in_two() -> Iterator[Compiler]:
    made = Compiler(demo().vocabulary, max_concurrent=2, processor_s=1.0)
    yield made
    made.close()


async def refusal(compiler: Compiler, grammar: Grammar) -> str:
    with pytest.raises((GrammarError, CompilerError)) as error:
        await compiler.compile(grammar)
    return str(error.value)


@pytest.mark.parametrize("some", [HOSTILE[::20], pytest.param(HOSTILE, marks=pytest.mark.slow)], ids=["some", "all"])
def test_compiler_survives_hostile_grammars(compile_in_two: Compiler, some: tuple[Grammar, ...]) -> None:
    assert len(set(HOSTILE)) >= 100

    async def all_of_them() -> None:
        for at in range(0, len(some), 2):
            began = time.monotonic()
            pair = [compile_in_two.compile(grammar) for grammar in some[at : at + 2]]
            for found in await asyncio.gather(*pair, return_exceptions=True):
                assert isinstance(found, str | GrammarError) or "too busy" in str(found), found
                if isinstance(found, GrammarError):
                    assert 0 < len(str(found)) < 500 and "\n" not in str(found)
                else:
                    demo().matchers.matcher(found)
            assert time.monotonic() - began < CHILD_TIMEOUT_S + GRACE_S, some[at : at + 2]
        assert walk(demo(), demo().matchers.matcher(await compile_in_two.compile(GOOD)), 1) in (b"yes", b"no")

    asyncio.run(all_of_them())


def test_slow_grammar_is_refused_while_others_are_compiled(compile_in_two: Compiler) -> None:
    async def both() -> None:
        await asyncio.gather(compile_in_two.compile(GOOD), compile_in_two.compile(Grammar("json_object")))  # both run
        began = time.monotonic()
        slow = asyncio.create_task(refusal(compile_in_two, SLOW))
        for at in range(20):
            await compile_in_two.compile(Grammar("regex", f"a{{{at}}}"))
        assert not slow.done() or time.monotonic() - began > 1
        assert re.search(r"longer than 1 s|GiB of memory|too large|too busy", await slow)

    asyncio.run(both())


@pytest.mark.slow
def test_killed_compiler_process_is_replaced(compile_in_two: Compiler) -> None:
    async def killed() -> None:
        await asyncio.gather(compile_in_two.compile(GOOD), compile_in_two.compile(Grammar("json_object")))
        before = compile_in_two._process.pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        again = [Grammar("regex", "a"), Grammar("regex", "b"), Grammar("regex", "c")]
        assert all(await asyncio.gather(*map(compile_in_two.compile, again)))
        after = compile_in_two._process.pid
        assert after is not None and after != before
        assert os.getpriority(os.PRIO_PROCESS, after) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
        assert os.getsid(after) == after, "Linux shares processors among sessions first"
        share = Path(f"/proc/{after}/autogroup")
        assert not share.exists() or share.read_text().endswith(f" nice {NICENESS}\n")

    asyncio.run(killed())


@pytest.mark.slow
def test_compile_is_repeated_when_its_process_is_killed() -> None:
    process = CompilerProcess(demo().vocabulary, processor_s=4.0)
    try:
        assert process.compile(GOOD).text

        async def killed_twice() -> CompileResult:
            work = asyncio.create_task(asyncio.to_thread(process.compile, SLOW))
            pid: int | None = None
            for _ in range(2):  # at work, and while the next one starts
                while process.pid in (None, pid):
                    await asyncio.sleep(0.01)
                pid = process.pid
                await asyncio.to_thread(busy, pid)
                os.kill(pid or 0, signal.SIGKILL)
            return await work

        assert "longer than 4 s" in asyncio.run(killed_twice()).refusal
        assert process.compile(GOOD).text
    finally:
        process.end()


def busy(pid: int | None) -> None:
    """Wait until a process is at work: until it uses its processor without asking for anything."""
    until = time.monotonic() + 100
    at_first = used(pid)
    while time.monotonic() < until and used(pid) < at_first + 0.3:
        time.sleep(0.01)


def used(pid: int | None) -> float:
    """Processor time of a process and of the child that compiles for it."""
    total = 0.0
    for each in (pid, *Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        with suppress(FileNotFoundError, ProcessLookupError):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    return total


@pytest.mark.slow
def test_processor_time_limit_does_not_restart_the_process() -> None:
    process = CompilerProcess(demo().vocabulary, processor_s=2.0)
    try:
        assert process.compile(GOOD).text
        pid = process.pid
        assert process.compile(Grammar("ebnf", "nothing")).refusal
        assert "longer than 2 s" in process.compile(SLOW).refusal
        assert process.compile(GOOD).text
        assert process.pid == pid and not children(pid), "whatever a grammar does, its child alone ends"
    finally:
        process.end()


def children(pid: int | None) -> str:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().strip()


def test_compiling_child_does_not_outlive_its_process() -> None:
    process = CompilerProcess(demo().vocabulary, processor_s=30.0)
    assert process.compile(GOOD).text
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(process.compile, SLOW)
        busy(process.pid)
        child = int(children(process.pid).split()[0])
        process.close()
        with pytest.raises(CompilerError):  # it would be started again, but the server ends
            work.result(timeout=20)
    process.end()
    until = time.monotonic() + 20
    while Path(f"/proc/{child}").exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert not Path(f"/proc/{child}").exists()


def test_compiled_grammars_and_refusals_are_cached(compile_in_two: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Grammar] = []
    compile_one = CompilerProcess.compile

    def counting(self: CompilerProcess, grammar: Grammar) -> CompileResult:
        asked.append(grammar)
        return compile_one(self, grammar)

    monkeypatch.setattr(CompilerProcess, "compile", counting)
    monkeypatch.setattr(compiler, "MAX_CACHED", 3)
    wrong = Grammar("regex", "(")

    async def often() -> None:
        same = await asyncio.gather(*(compile_in_two.compile(GOOD) for _ in range(5)))
        assert len(set(same)) == 1 and asked == [GOOD]
        assert await refusal(compile_in_two, wrong) == await refusal(compile_in_two, wrong)
        assert asked == [GOOD, wrong]
        await compile_in_two.compile(Grammar("regex", "a"))
        await compile_in_two.compile(GOOD)
        await compile_in_two.compile(Grammar("regex", "b"))  # now the refusal is the oldest of four
        del asked[:]
        await compile_in_two.compile(GOOD)
        assert asked == []
        await refusal(compile_in_two, wrong)
        assert asked == [wrong]

    asyncio.run(often())


def test_cancelled_request_does_not_cancel_a_shared_compile(compile_in_two: Compiler) -> None:
    async def cancelled() -> None:
        first = asyncio.create_task(compile_in_two.compile(GOOD))
        second = asyncio.create_task(compile_in_two.compile(GOOD))
        await asyncio.sleep(0)
        first.cancel()
        assert await second
        assert await compile_in_two.compile(GOOD)

    asyncio.run(cancelled())


def test_close_ends_the_process_and_its_running_compile() -> None:
    async def closed() -> None:
        made = Compiler(demo().vocabulary, max_concurrent=1, processor_s=30.0)
        await made.compile(GOOD)
        pid = made._process.pid
        slow = asyncio.create_task(made.compile(SLOW))
        await asyncio.to_thread(busy, pid)
        await asyncio.to_thread(made.close)
        with pytest.raises((GrammarError, CompilerError)):
            await slow
        assert made._process.pid is None
        with pytest.raises(ProcessLookupError):
            os.kill(pid or 0, 0)

    asyncio.run(closed())


def test_compiler_process_ends_when_its_parent_is_killed() -> None:
    """Even if the parent is killed: its end of the pipe closes."""
    code = (
        "from tests.grammar.walks import demo\n"
        "from cluster.grammar.compiler import CompilerProcess\nfrom cluster.grammar.asked import Grammar\n"
        "process = CompilerProcess(demo().vocabulary, 10.0)\nprocess.compile(Grammar('choice', '[\"a\"]'))\n"
        "print(process.pid, flush=True)\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    pid = int(done.stdout)
    until = time.monotonic() + 60
    while time.monotonic() < until and alive(pid):
        time.sleep(0.05)
    assert not alive(pid)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_compiler_that_cannot_start_raises_compiler_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/true")
    process = CompilerProcess(demo().vocabulary, 2.0)
    with pytest.raises(CompilerError, match="does not start"):
        process.compile(GOOD)
