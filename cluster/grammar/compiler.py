"""Compiles grammars in separate processes, with limits, and caches the results."""

import asyncio
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from threading import Lock, Thread

from cluster.grammar.asked import Grammar, GrammarError
from cluster.grammar.forks import (
    BROKEN,
    COMPILED,
    GONE,
    LATE,
    NUMBER,
    PATIENCE_S,
    READY,
    SLOW,
    UNSURE,
    frame,
    read_frame,
    spent_in,
)
from cluster.grammar.limits import TOO_LARGE
from cluster.grammar.sources import MAX_CHARACTERS
from cluster.grammar.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

AT_ONCE = 2
SECONDS = 10.0  # processor time that compiling one grammar may take
START_S = 300.0  # time in which the process must import xgrammar and its dependencies, and make tables and masks
GRACE_S = 5.0  # extra time for the forking process to report that a child's time is over
NICENESS = 10  # the process gets a whole core, or about a tenth of it while the engine and the server need the core
TRIES = 2  # attempts, if the process was killed from outside
NOT_ITS_FAULT = (0, -signal.SIGKILL, -signal.SIGTERM)
CACHED = 64
CACHED_CHARACTERS = 32 << 20


COMMON = (Grammar("json_object"), Grammar("json_object", compact=True))


class CompilerError(RuntimeError):
    """Grammars cannot be compiled here or now, for reasons that do not depend on the grammar."""


@dataclass(frozen=True, slots=True)
class CompileResult:
    """The result of compiling a grammar: either the `text` that ranks read, or a `refusal` with the reason. `lasting`:
    compiling the grammar again would give the same result.
    """

    text: str = ""
    refusal: str = ""
    lasting: bool = True


class Compiler:
    """Compiles grammars for one vocabulary, at most `at_once` at a time, in a process that starts on first use."""

    def __init__(self, vocabulary: Vocabulary, at_once: int = AT_ONCE, seconds: float = SECONDS) -> None:
        """`seconds` is the processor time that each grammar may take."""
        self._pool = ThreadPoolExecutor(at_once, thread_name_prefix="grammar")
        self._process = CompilerProcess(vocabulary, seconds)
        self._done: OrderedDict[Grammar, CompileResult] = OrderedDict()
        self._under_way: dict[Grammar, asyncio.Task[CompileResult]] = {}

    async def warm(self) -> None:
        """Start the process and compile the most common grammars. Errors are ignored here, because the first request
        will report the same errors.
        """
        for grammar in COMMON:
            with suppress(GrammarError, CompilerError):
                await self.compile(grammar)

    async def compile(self, grammar: Grammar) -> str:
        """Compile a grammar and return it as text for `Matchers.matcher`.

        Raises:
            GrammarError: the grammar is refused or exceeds a limit; the message says why.
            CompilerError: no process could be started, or the machine is too busy.
        """
        if len(grammar.text) > MAX_CHARACTERS:
            raise GrammarError(f"it has {len(grammar.text)} characters; at most {MAX_CHARACTERS} are allowed")
        found = self._done.get(grammar)
        if found is None:
            task = self._under_way.get(grammar)
            if task is None:
                task = self._under_way[grammar] = asyncio.create_task(self._compile(grammar))
            # Cancelling one request must not cancel a compilation that other requests may await.
            found = await asyncio.shield(task)
        else:
            self._done.move_to_end(grammar)
        if found.refusal:
            raise GrammarError(found.refusal)
        return found.text

    def close(self) -> None:
        """End the process. Grammars that are being compiled are refused."""
        self._process.close()
        self._pool.shutdown(cancel_futures=True)
        self._process.end()

    async def _compile(self, grammar: Grammar) -> CompileResult:
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._pool, self._process.compile, grammar)
        finally:
            del self._under_way[grammar]
        if found.lasting:
            self._done[grammar] = found
        while len(self._done) > CACHED or sum(len(each.text) for each in self._done.values()) > CACHED_CHARACTERS:
            self._done.popitem(last=False)
        return found


class CompilerProcess:
    """The process that compiles grammars. A new process is started if the last one has ended. Thread-safe; several
    threads may compile at once.
    """

    def __init__(self, vocabulary: Vocabulary, seconds: float) -> None:
        self._vocabulary = vocabulary
        self._seconds = seconds
        self._running: RunningCompiler | None = None
        self._closed = False
        self._starting = Lock()

    @property
    def pid(self) -> int | None:
        """The process id, or None if no process runs."""
        running = self._running
        return None if running is None or running.process.poll() is not None else running.process.pid

    def start(self) -> "RunningCompiler":
        """Return a running process that is ready to compile; start one if necessary.

        Raises:
            CompilerError: no process can be started.
        """
        with self._starting:
            running = self._running
            if running is None or running.process.poll() is not None:
                running = self._start()
            return running

    def compile(self, grammar: Grammar) -> CompileResult:
        """Compile a grammar and return the result, which may be a refusal.

        Raises:
            CompilerError: no process could be started, or the machine is too busy.
        """
        asked = {"kind": grammar.kind, "text": grammar.text, "compact": grammar.compact, "seconds": self._seconds}
        for _ in range(TRIES):
            running = self.start()
            try:
                reply = running.ask(json.dumps(asked).encode(), PATIENCE_S + GRACE_S)
            except TimeoutError:
                self.end(running)
                raise CompilerError("the process that compiles grammars does not answer; try again") from None
            if reply is not None and reply[:1] != GONE:
                return self._answer(reply)
            code = self.end(running) if reply is None else int(reply[1:])
            logger.warning("the compiler of a grammar (%s) ended with %s", grammar.kind, code)
            if code not in NOT_ITS_FAULT:
                break
        return CompileResult(refusal=TOO_LARGE)

    def _answer(self, reply: bytes) -> CompileResult:
        mark, text = reply[:1], reply[1:].decode()
        if mark == LATE:
            spent = spent_in(reply)
            raise CompilerError(
                f"this machine is too busy to compile it: it got {spent.processor:.1f} s of processor time in "
                f"{spent.passed:.0f} s; try again"
            )
        if mark == SLOW:
            why = f"it takes longer than {self._seconds:g} s of processor time to compile; make it shorter or simpler"
            return CompileResult(refusal=why, lasting=not spent_in(reply).on_a_busy_machine)
        return CompileResult(text) if mark == COMPILED else CompileResult(refusal=text, lasting=mark != UNSURE)

    def close(self) -> None:
        """End the process for good, from any thread. Threads that wait for an answer are released at once."""
        self._closed = True
        running = self._running
        if running is not None:
            running.process.kill()

    def end(self, running: "RunningCompiler | None" = None) -> int | None:
        """Kill `running` or, if that is None, the current process. Return its exit code, or None if no process runs."""
        running = running or self._running
        if running is None:
            return None
        if self._running is running:
            self._running = None
        return running.end()

    def _start(self) -> "RunningCompiler":
        tokens = [token.decode("latin-1") for token in self._vocabulary.tokens]
        first = json.dumps({"tokens": tokens, "stops": self._vocabulary.stops}).encode()
        for _ in range(TRIES):
            self.end()
            if self._closed:
                raise CompilerError("grammars are not compiled any more: the server ends")
            self._running = running = RunningCompiler()
            try:
                reply = running.begin(first)
            except TimeoutError:
                reply = BROKEN + b"it does not answer"
            if reply == READY:
                return running
            code = self.end()
            why = f"it ended with {code}" if reply is None else reply.removeprefix(BROKEN).decode()
            if reply is not None or code not in NOT_ITS_FAULT:
                break
        raise CompilerError(f"the process that compiles grammars does not start: {why}")


class RunningCompiler:
    """One running process, and a thread that reads its answers."""

    def __init__(self) -> None:
        here = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cluster.grammar.forks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=os.environ | here,
            start_new_session=True,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._requests, self._replies = self.process.stdin, self.process.stdout
        self._first: Future[bytes | None] = Future()
        self._asked: dict[bytes, Future[bytes | None]] = {}
        self._numbers = count()
        self._lock, self._writing = Lock(), Lock()
        self._over = False
        _give_way(self.process.pid)  # before the import of xgrammar, which takes most of a second
        self._reader = Thread(target=self._read, name="grammar-answers", daemon=True)
        self._reader.start()

    def begin(self, vocabulary: bytes) -> bytes | None:
        """Send the vocabulary and return the answer of the process: `READY`, an error, or None if the process ended.

        Raises:
            TimeoutError: the process does not answer in time.
        """
        until = time.monotonic() + START_S
        self._send(vocabulary, until)
        return self._first.result(max(0.0, until - time.monotonic()))

    def ask(self, grammar: bytes, seconds: float) -> bytes | None:
        """Send a grammar and return the answer, or None if the process ended.

        Raises:
            TimeoutError: there is no answer after `seconds`.
        """
        until = time.monotonic() + seconds
        number, answer = next(self._numbers).to_bytes(NUMBER, "big"), Future[bytes | None]()
        with self._lock:
            if self._over:
                return None
            self._asked[number] = answer
        self._send(number + grammar, until)
        return answer.result(max(0.0, until - time.monotonic()))

    def end(self) -> int:
        """Kill the process and return its exit code."""
        self.process.kill()
        code = self.process.wait()
        self._reader.join()
        for pipe in (self._requests, self._replies):
            pipe.close()
        return code

    def _send(self, content: bytes, until: float) -> None:
        """Write a frame to the pipe. Raises TimeoutError if the process does not read it."""
        try:
            with self._writing:
                _write(self._requests.fileno(), frame(content), until)
        except (BrokenPipeError, ValueError):
            return  # the process has ended or the pipe was closed; the reader thread reports that

    def _read(self) -> None:
        """Deliver answers until the process ends; then answer all open requests with None."""
        source = self._replies.fileno()
        first = read_frame(source)
        self._first.set_result(first)
        while first is not None and (reply := read_frame(source)) is not None:
            with self._lock:
                answer = self._asked.pop(reply[:NUMBER])
            answer.set_result(reply[NUMBER:])
        with self._lock:
            self._over = True
            left, self._asked = list(self._asked.values()), {}
        for answer in left:
            answer.set_result(None)


def _write(pipe: int, content: bytes, until: float) -> None:
    """Write all bytes to a pipe in pieces of at most PIPE_BUF. Raises TimeoutError at `until`."""
    poll = select.poll()
    poll.register(pipe, select.POLLOUT)
    rest = memoryview(content)
    while rest:
        if not poll.poll(max(0.0, 1000 * (until - time.monotonic()))):
            raise TimeoutError
        rest = rest[os.write(pipe, rest[: select.PIPE_BUF]) :]


def _give_way(pid: int) -> None:
    """Lower the priority of a process that leads its own session. Linux shares processors first among sessions
    (sched(7), autogroups); niceness counts only within a session. So the session's priority is lowered too.
    """
    os.setpriority(os.PRIO_PROCESS, pid, min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS))
    for _ in range(TRIES):
        try:
            Path(f"/proc/{pid}/autogroup").write_text(str(NICENESS), encoding="ascii")
        except BlockingIOError:  # the kernel allows ten such changes per second
            time.sleep(0.2)
        except OSError:  # not Linux, or a kernel without autogroups
            return
        else:
            return
