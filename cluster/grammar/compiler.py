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
    CHILD_TIMEOUT_S,
    COMPILED,
    DIED,
    NUMBER_BYTES,
    OUT_OF_TIME,
    READY,
    REFUSED_WHILE_BUSY,
    START_FAILED,
    TIMED_OUT,
    frame,
    read_frame,
    time_spent_in,
)
from cluster.grammar.limits import TOO_LARGE
from cluster.grammar.sources import MAX_CHARACTERS
from cluster.grammar.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

MAX_CONCURRENT = 2
MAX_PROCESSOR_S = 10.0  # processor time that compiling one grammar may take
START_TIMEOUT_S = 300.0  # in this time the process must import xgrammar and its dependencies, and make tables and masks
GRACE_S = 5.0  # extra time for the forking process to report that a child's time is over
NICENESS = 10  # the process gets a whole core, or about a tenth of it while the engine and the server need the core
MAX_ATTEMPTS = 2  # attempts to start the process or to compile a grammar, if the process is killed from outside
RETRYABLE_EXIT_CODES = (0, -signal.SIGKILL, -signal.SIGTERM)
MAX_CACHED = 64
MAX_CACHED_CHARACTERS = 32 << 20


COMMON_GRAMMARS = (Grammar("json_object"), Grammar("json_object", compact=True))


class CompilerError(RuntimeError):
    """Grammars cannot be compiled here or now, for reasons that do not depend on the grammar."""


@dataclass(frozen=True, slots=True)
class CompileResult:
    """The result of compiling a grammar: either the `text` that ranks read, or a `refusal`, which is the reason (empty
    if the grammar is accepted). If `is_lasting`, compiling the grammar again would give the same result.
    """

    text: str = ""
    refusal: str = ""
    is_lasting: bool = True


class Compiler:
    """Compiles grammars for one vocabulary, at most `max_concurrent` at once, in a process that starts on first use."""

    def __init__(
        self, vocabulary: Vocabulary, max_concurrent: int = MAX_CONCURRENT, processor_s: float = MAX_PROCESSOR_S
    ) -> None:
        """`processor_s` is the processor time that each grammar may take."""
        self._pool = ThreadPoolExecutor(max_concurrent, thread_name_prefix="grammar")
        self._process = CompilerProcess(vocabulary, processor_s)
        self._cache: OrderedDict[Grammar, CompileResult] = OrderedDict()
        self._pending: dict[Grammar, asyncio.Task[CompileResult]] = {}

    async def warm(self) -> None:
        """Start the process and compile the most common grammars. Errors are ignored here, because the first request
        that needs a grammar reports them again.
        """
        for grammar in COMMON_GRAMMARS:
            with suppress(GrammarError, CompilerError):
                await self.compile(grammar)

    async def compile(self, grammar: Grammar) -> str:
        """Compile a grammar and return it as text for `Matchers.matcher`.

        Raises:
            GrammarError: the grammar is refused or exceeds a limit; the message says why.
            CompilerError: the process could not be started or does not answer, or the machine is too busy.
        """
        if len(grammar.text) > MAX_CHARACTERS:
            raise GrammarError(f"it has {len(grammar.text)} characters; at most {MAX_CHARACTERS} are allowed")
        result = self._cache.get(grammar)
        if result is None:
            task = self._pending.get(grammar)
            if task is None:
                task = self._pending[grammar] = asyncio.create_task(self._compile(grammar))
            # Cancelling one request must not cancel a compilation that other requests may await.
            result = await asyncio.shield(task)
        else:
            self._cache.move_to_end(grammar)
        if result.refusal:
            raise GrammarError(result.refusal)
        return result.text

    def close(self) -> None:
        """End the process for good. Grammars that are not compiled yet get an error."""
        self._process.close()
        self._pool.shutdown(cancel_futures=True)
        self._process.end()

    async def _compile(self, grammar: Grammar) -> CompileResult:
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._pool, self._process.compile, grammar)
        finally:
            del self._pending[grammar]
        if result.is_lasting:
            self._cache[grammar] = result
        while (
            len(self._cache) > MAX_CACHED
            or sum(len(cached.text) for cached in self._cache.values()) > MAX_CACHED_CHARACTERS
        ):
            self._cache.popitem(last=False)
        return result


class CompilerProcess:
    """The process that compiles grammars. A new process is started if the last one has ended. Thread-safe; several
    threads may compile at once.
    """

    def __init__(self, vocabulary: Vocabulary, processor_s: float) -> None:
        self._vocabulary = vocabulary
        self._processor_s = processor_s
        self._running: RunningCompiler | None = None
        self._closed = False
        self._start_lock = Lock()

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
        with self._start_lock:
            running = self._running
            if running is None or running.process.poll() is not None:
                running = self._start()
            return running

    def compile(self, grammar: Grammar) -> CompileResult:
        """Compile a grammar and return the result, which may be a refusal.

        Raises:
            CompilerError: the process could not be started or does not answer, or the machine is too busy.
        """
        request = {"kind": grammar.kind, "text": grammar.text, "compact": grammar.compact, "seconds": self._processor_s}
        for _ in range(MAX_ATTEMPTS):
            running = self.start()
            try:
                reply = running.send_grammar(json.dumps(request).encode(), CHILD_TIMEOUT_S + GRACE_S)
            except TimeoutError:
                self.end(running)
                raise CompilerError("the process that compiles grammars does not answer; try again") from None
            if reply is not None and reply[:1] != DIED:
                return self._parse_reply(reply)
            exit_code = self.end(running) if reply is None else int(reply[1:])
            logger.warning("the compiler of a grammar (%s) ended with %s", grammar.kind, exit_code)
            if exit_code not in RETRYABLE_EXIT_CODES:
                break
        return CompileResult(refusal=TOO_LARGE)

    def _parse_reply(self, reply: bytes) -> CompileResult:
        status, text = reply[:1], reply[1:].decode()
        if status == TIMED_OUT:
            time_spent = time_spent_in(reply)
            raise CompilerError(
                f"this machine is too busy to compile it: it got {time_spent.processor_s:.1f} s of processor time in "
                f"{time_spent.elapsed_s:.0f} s; try again"
            )
        if status == OUT_OF_TIME:
            reason = (
                f"it takes longer than {self._processor_s:g} s of processor time to compile; make it shorter or simpler"
            )
            return CompileResult(refusal=reason, is_lasting=not time_spent_in(reply).machine_was_busy)
        return (
            CompileResult(text)
            if status == COMPILED
            else CompileResult(refusal=text, is_lasting=status != REFUSED_WHILE_BUSY)
        )

    def close(self) -> None:
        """End the process, and start no new one. Any thread may call this. Threads that wait for an answer get an error
        at once.
        """
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
        vocabulary_json = json.dumps({"tokens": tokens, "stops": self._vocabulary.stop_token_ids}).encode()
        for _ in range(MAX_ATTEMPTS):
            self.end()
            if self._closed:
                raise CompilerError("grammars are not compiled any more: the server ends")
            self._running = running = RunningCompiler()
            try:
                reply = running.send_vocabulary(vocabulary_json)
            except TimeoutError:
                reply = START_FAILED + b"it does not answer"
            if reply == READY:
                return running
            exit_code = self.end()
            reason = f"it ended with {exit_code}" if reply is None else reply.removeprefix(START_FAILED).decode()
            if reply is not None or exit_code not in RETRYABLE_EXIT_CODES:
                break
        raise CompilerError(f"the process that compiles grammars does not start: {reason}")


class RunningCompiler:
    """One running process, and a thread that reads its answers."""

    def __init__(self) -> None:
        environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cluster.grammar.forks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=os.environ | environment,
            start_new_session=True,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._request_pipe, self._reply_pipe = self.process.stdin, self.process.stdout
        self._ready_reply: Future[bytes | None] = Future()
        self._pending_replies: dict[bytes, Future[bytes | None]] = {}
        self._request_numbers = count()
        self._lock, self._write_lock = Lock(), Lock()
        self._has_ended = False
        _lower_priority(self.process.pid)  # before the import of xgrammar, which takes most of a second
        self._reader = Thread(target=self._read, name="grammar-answers", daemon=True)
        self._reader.start()

    def send_vocabulary(self, vocabulary_json: bytes) -> bytes | None:
        """Send the vocabulary and return the answer of the process: `READY`, an error, or None if the process ended.

        Raises:
            TimeoutError: the process does not answer in time.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        self._send(vocabulary_json, deadline)
        return self._ready_reply.result(max(0.0, deadline - time.monotonic()))

    def send_grammar(self, grammar_json: bytes, timeout_s: float) -> bytes | None:
        """Send a grammar and return the answer, or None if the process ended.

        Raises:
            TimeoutError: there is no answer after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        request_id, reply = next(self._request_numbers).to_bytes(NUMBER_BYTES, "big"), Future[bytes | None]()
        with self._lock:
            if self._has_ended:
                return None
            self._pending_replies[request_id] = reply
        self._send(request_id + grammar_json, deadline)
        return reply.result(max(0.0, deadline - time.monotonic()))

    def end(self) -> int:
        """Kill the process and return its exit code."""
        self.process.kill()
        exit_code = self.process.wait()
        self._reader.join()
        for pipe in (self._request_pipe, self._reply_pipe):
            pipe.close()
        return exit_code

    def _send(self, content: bytes, deadline: float) -> None:
        """Write a frame to the pipe. Raises TimeoutError if the process does not read it."""
        try:
            with self._write_lock:
                _write(self._request_pipe.fileno(), frame(content), deadline)
        except (BrokenPipeError, ValueError):
            return  # the process has ended or the pipe was closed; the reader thread reports that

    def _read(self) -> None:
        """Deliver answers until the process ends. Then give None to all requests that have no answer."""
        read_fd = self._reply_pipe.fileno()
        ready_reply = read_frame(read_fd)
        self._ready_reply.set_result(ready_reply)
        while ready_reply is not None and (reply := read_frame(read_fd)) is not None:
            with self._lock:
                pending = self._pending_replies.pop(reply[:NUMBER_BYTES])
            pending.set_result(reply[NUMBER_BYTES:])
        with self._lock:
            self._has_ended = True
            unanswered, self._pending_replies = list(self._pending_replies.values()), {}
        for pending in unanswered:
            pending.set_result(None)


def _write(write_fd: int, content: bytes, deadline: float) -> None:
    """Write all bytes to a pipe in pieces of at most PIPE_BUF. Raises TimeoutError at `deadline`."""
    poller = select.poll()
    poller.register(write_fd, select.POLLOUT)
    rest = memoryview(content)
    while rest:
        if not poller.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
            raise TimeoutError
        rest = rest[os.write(write_fd, rest[: select.PIPE_BUF]) :]


def _lower_priority(pid: int) -> None:
    """Lower the priority of a process that leads its own session. Linux shares processors first among sessions
    (sched(7), autogroups); niceness counts only within a session. So the session's priority is lowered too.
    """
    os.setpriority(os.PRIO_PROCESS, pid, min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS))
    for _ in range(MAX_ATTEMPTS):
        try:
            Path(f"/proc/{pid}/autogroup").write_text(str(NICENESS), encoding="ascii")
        except BlockingIOError:  # the kernel allows ten such changes per second
            time.sleep(0.2)
        except OSError:  # not Linux, or a kernel without autogroups
            return
        else:
            return
