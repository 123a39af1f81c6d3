"""Tests of `Compiler`: it compiles grammars in separate processes with limits.

So a grammar that takes long to compile delays only the request of the client that sent it.
"""

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
def two_slot_compiler() -> Iterator[Compiler]:
    """A compiler that compiles at most two grammars at the same time, each for at most 1 s of processor time."""
    instance = Compiler(demo().vocabulary, max_concurrent=2, processor_s=1.0)
    yield instance
    instance.close()


async def refusal(compiler: Compiler, grammar: Grammar) -> str:
    """Return the message of the error that compiling the grammar raises."""
    with pytest.raises((GrammarError, CompilerError)) as error:
        await compiler.compile(grammar)
    return str(error.value)


@pytest.mark.parametrize("some", [HOSTILE[::20], pytest.param(HOSTILE, marks=pytest.mark.slow)], ids=["some", "all"])
def test_compiler_survives_hostile_grammars(two_slot_compiler: Compiler, some: tuple[Grammar, ...]) -> None:
    assert len(set(HOSTILE)) >= 100

    async def compile_all() -> None:
        for index in range(0, len(some), 2):
            start = time.monotonic()
            compilations = [two_slot_compiler.compile(grammar) for grammar in some[index : index + 2]]
            for result in await asyncio.gather(*compilations, return_exceptions=True):
                assert isinstance(result, str | GrammarError) or "too busy" in str(result), result
                if isinstance(result, GrammarError):
                    assert 0 < len(str(result)) < 500 and "\n" not in str(result)
                else:
                    demo().matchers.matcher(result)
            assert time.monotonic() - start < CHILD_TIMEOUT_S + GRACE_S, some[index : index + 2]
        assert walk(demo(), demo().matchers.matcher(await two_slot_compiler.compile(GOOD)), 1) in (b"yes", b"no")

    asyncio.run(compile_all())


def test_slow_grammar_is_refused_while_others_are_compiled(two_slot_compiler: Compiler) -> None:
    async def compile_meanwhile() -> None:
        await asyncio.gather(
            two_slot_compiler.compile(GOOD), two_slot_compiler.compile(Grammar("json_object"))
        )  # warm-up
        completed: list[str] = []
        slow = asyncio.create_task(refusal(two_slot_compiler, SLOW))
        slow.add_done_callback(lambda _: completed.append("slow"))
        for count in range(5):
            await two_slot_compiler.compile(Grammar("regex", f"a{{{count}}}"))
            completed.append("quick")
        assert re.search(r"longer than 1 s|GiB of memory|too large|too busy", await slow)
        assert completed == ["quick"] * 5 + ["slow"]

    asyncio.run(compile_meanwhile())


@pytest.mark.slow
def test_killed_compiler_process_is_replaced(two_slot_compiler: Compiler) -> None:
    async def kill_and_compile() -> None:
        await asyncio.gather(two_slot_compiler.compile(GOOD), two_slot_compiler.compile(Grammar("json_object")))
        old_pid = two_slot_compiler._process.pid
        assert old_pid is not None
        os.kill(old_pid, signal.SIGKILL)
        grammars = [Grammar("regex", "a"), Grammar("regex", "b"), Grammar("regex", "c")]
        assert all(await asyncio.gather(*map(two_slot_compiler.compile, grammars)))
        new_pid = two_slot_compiler._process.pid
        assert new_pid is not None and new_pid != old_pid
        assert os.getpriority(os.PRIO_PROCESS, new_pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
        assert os.getsid(new_pid) == new_pid, "it must lead a session: Linux divides CPU time by session"
        autogroup = Path(f"/proc/{new_pid}/autogroup")
        assert not autogroup.exists() or autogroup.read_text().endswith(f" nice {NICENESS}\n")

    asyncio.run(kill_and_compile())


@pytest.mark.slow
def test_compile_is_repeated_when_its_process_is_killed() -> None:
    process = CompilerProcess(demo().vocabulary, processor_s=4.0)
    try:
        assert process.compile(GOOD).text

        async def compile_while_killed() -> CompileResult:
            compilation = asyncio.create_task(asyncio.to_thread(process.compile, SLOW))
            pid: int | None = None
            for _ in range(2):  # kill the first process, and then the one that replaces it
                while process.pid in (None, pid):
                    await asyncio.sleep(0.01)
                pid = process.pid
                await asyncio.to_thread(wait_until_busy, pid)
                os.kill(pid or 0, signal.SIGKILL)
            return await compilation

        assert "longer than 4 s" in asyncio.run(compile_while_killed()).refusal
        assert process.compile(GOOD).text
    finally:
        process.end()


def wait_until_busy(pid: int | None) -> None:
    """Wait until a process compiles: until it has used 0.3 s of processor time. Give up after 100 s."""
    deadline = time.monotonic() + 100
    initial_cpu_s = cpu_seconds(pid)
    while time.monotonic() < deadline and cpu_seconds(pid) < initial_cpu_s + 0.3:
        time.sleep(0.01)


def cpu_seconds(pid: int | None) -> float:
    """Return the processor time in seconds of a process and of its child, which does the compiling."""
    total = 0.0
    for process_id in (pid, *Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        with suppress(FileNotFoundError, ProcessLookupError):
            fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
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
        assert process.pid == pid and not child_pids(pid), "only the child that compiles may end, not its parent"
    finally:
        process.end()


def child_pids(pid: int | None) -> str:
    """Return the process ids of the children of a process, separated by spaces."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().strip()


def test_compiling_child_does_not_outlive_its_process() -> None:
    process = CompilerProcess(demo().vocabulary, processor_s=30.0)
    assert process.compile(GOOD).text
    with ThreadPoolExecutor(1) as pool:
        compilation = pool.submit(process.compile, SLOW)
        wait_until_busy(process.pid)
        child = int(child_pids(process.pid).split()[0])
        process.close()
        with pytest.raises(CompilerError):  # a closed compiler does not start a new process
            compilation.result(timeout=20)
    process.end()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{child}").exists()


def test_compiled_grammars_and_refusals_are_cached(
    two_slot_compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_grammars: list[Grammar] = []
    original_compile = CompilerProcess.compile

    def record_and_compile(self: CompilerProcess, grammar: Grammar) -> CompileResult:
        compiled_grammars.append(grammar)
        return original_compile(self, grammar)

    monkeypatch.setattr(CompilerProcess, "compile", record_and_compile)
    monkeypatch.setattr(compiler, "MAX_CACHED", 3)
    invalid_grammar = Grammar("regex", "(")

    async def compile_repeatedly() -> None:
        texts = await asyncio.gather(*(two_slot_compiler.compile(GOOD) for _ in range(5)))
        assert len(set(texts)) == 1 and compiled_grammars == [GOOD]
        assert await refusal(two_slot_compiler, invalid_grammar) == await refusal(two_slot_compiler, invalid_grammar)
        assert compiled_grammars == [GOOD, invalid_grammar]
        await two_slot_compiler.compile(Grammar("regex", "a"))
        await two_slot_compiler.compile(GOOD)
        await two_slot_compiler.compile(Grammar("regex", "b"))  # now the refusal is the oldest of four entries
        del compiled_grammars[:]
        await two_slot_compiler.compile(GOOD)
        assert compiled_grammars == []
        await refusal(two_slot_compiler, invalid_grammar)
        assert compiled_grammars == [invalid_grammar]

    asyncio.run(compile_repeatedly())


def test_cancelled_request_does_not_cancel_a_shared_compile(two_slot_compiler: Compiler) -> None:
    async def cancel_first_request() -> None:
        first = asyncio.create_task(two_slot_compiler.compile(GOOD))
        second = asyncio.create_task(two_slot_compiler.compile(GOOD))
        await asyncio.sleep(0)
        first.cancel()
        assert await second
        assert await two_slot_compiler.compile(GOOD)

    asyncio.run(cancel_first_request())


def test_close_ends_the_process_and_its_running_compile() -> None:
    async def close_while_compiling() -> None:
        instance = Compiler(demo().vocabulary, max_concurrent=1, processor_s=30.0)
        await instance.compile(GOOD)
        pid = instance._process.pid
        slow_compilation = asyncio.create_task(instance.compile(SLOW))
        await asyncio.to_thread(wait_until_busy, pid)
        await asyncio.to_thread(instance.close)
        with pytest.raises((GrammarError, CompilerError)):
            await slow_compilation
        assert instance._process.pid is None
        with pytest.raises(ProcessLookupError):
            os.kill(pid or 0, 0)

    asyncio.run(close_while_compiling())


def test_compiler_process_ends_when_its_parent_is_killed() -> None:
    """When the parent is killed, its end of the pipe closes, and the compiler process ends."""
    code = (
        "from tests.grammar.walks import demo\n"
        "from cluster.grammar.compiler import CompilerProcess\nfrom cluster.grammar.asked import Grammar\n"
        "process = CompilerProcess(demo().vocabulary, 10.0)\nprocess.compile(Grammar('choice', '[\"a\"]'))\n"
        "print(process.pid, flush=True)\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    pid = int(result.stdout)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and is_alive(pid):
        time.sleep(0.05)
    assert not is_alive(pid)


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_compiler_that_cannot_start_raises_compiler_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/true")
    process = CompilerProcess(demo().vocabulary, 2.0)
    with pytest.raises(CompilerError, match="does not start"):
        process.compile(GOOD)
