"""Grammars compiled beside the server: in processes of their own, with limits, each grammar once."""

import asyncio
import json
import logging
import os
import queue
import select
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cluster.grammar.asked import Grammar, GrammarError
from cluster.grammar.sources import MAX_CHARACTERS
from cluster.grammar.vocabulary import Vocabulary
from cluster.grammar.worker import BROKEN, COMPILED, GONE, READY, TOO_LARGE, frame

logger = logging.getLogger(__name__)

WORKERS = 2
SECONDS = 10.0
START_S = 120.0  # to import xgrammar and what it imports
GRACE_S = 5.0  # for a process to end itself when its time is over
NICENESS = 10  # a tenth of a core where what computes and what answers wants it, a whole one where it does not
TRIES = 2  # where the process was killed by somebody else
NOT_ITS_FAULT = (0, -signal.SIGKILL, -signal.SIGTERM)
CACHED = 64
CACHED_CHARACTERS = 128 << 20


class CompilerError(RuntimeError):
    """Grammars cannot be compiled here, whatever they are."""


class Compiler:
    """Compiles grammars for one vocabulary, in at most `workers` processes that start when they are first needed."""

    def __init__(self, vocabulary: Vocabulary, workers: int = WORKERS, seconds: float = SECONDS) -> None:
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="grammar")
        self._processes = [Process(vocabulary, seconds) for _ in range(workers)]
        self._idle: queue.LifoQueue[Process] = queue.LifoQueue()  # one that runs is taken before one that would start
        for process in self._processes:
            self._idle.put(process)
        self._done: OrderedDict[Grammar, str | GrammarError] = OrderedDict()
        self._under_way: dict[Grammar, asyncio.Task[str | GrammarError]] = {}

    async def compile(self, grammar: Grammar) -> str:
        """The compiled grammar, as text for `Matchers.matcher`.

        Raises:
            GrammarError: it is refused, or goes beyond a limit; the message says why.
            CompilerError: no process could be started.
        """
        if len(grammar.text) > MAX_CHARACTERS:
            raise GrammarError(f"it has {len(grammar.text)} characters; at most {MAX_CHARACTERS} are allowed")
        found = self._done.get(grammar)
        if found is None:
            task = self._under_way.get(grammar)
            if task is None:
                task = self._under_way[grammar] = asyncio.create_task(self._compile(grammar))
            found = await asyncio.shield(task)  # others may wait for it too
        else:
            self._done.move_to_end(grammar)
        if isinstance(found, GrammarError):
            raise GrammarError(str(found))
        return found

    def close(self) -> None:
        """End the processes; what they were compiling is refused."""
        for process in self._processes:
            process.close()
        self._pool.shutdown(cancel_futures=True)
        for process in self._processes:
            process.end()

    async def _compile(self, grammar: Grammar) -> str | GrammarError:
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._pool, self._ask, grammar)
        finally:
            del self._under_way[grammar]
        self._done[grammar] = found
        while len(self._done) > CACHED or sum(len(str(text)) for text in self._done.values()) > CACHED_CHARACTERS:
            self._done.popitem(last=False)
        return found

    def _ask(self, grammar: Grammar) -> str | GrammarError:
        process = self._idle.get()
        try:
            return process.compile(grammar)
        finally:
            self._idle.put(process)


class Process:
    """One process that compiles, started anew after it has ended. For one thread at a time."""

    def __init__(self, vocabulary: Vocabulary, seconds: float) -> None:
        self._vocabulary = vocabulary
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The id of the process, if one runs."""
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    def compile(self, grammar: Grammar) -> str | GrammarError:
        """The compiled grammar, or why there is none."""
        asked = {"kind": grammar.kind, "text": grammar.text, "compact": grammar.compact, "seconds": self._seconds}
        for _ in range(TRIES):
            try:
                if self.pid is None:
                    self._start()
                reply = self._exchange(json.dumps(asked).encode(), self._seconds + GRACE_S)
            except TimeoutError:
                self.end()
                return self._too_slow()
            if reply is not None and reply[:1] != GONE:
                text = reply[1:].decode()
                return text if reply[:1] == COMPILED else GrammarError(text)
            code = self.end() if reply is None else int(reply[1:])
            logger.warning("the compiler of a grammar (%s) ended with %s", grammar.kind, code)
            if code == -signal.SIGALRM:
                return self._too_slow()
            if code not in NOT_ITS_FAULT:
                return GrammarError(TOO_LARGE)
        return GrammarError(TOO_LARGE)

    def _too_slow(self) -> GrammarError:
        return GrammarError(f"it takes longer than {self._seconds:g} s to compile; make it shorter or simpler")

    def close(self) -> None:
        """End the process for good, from any thread; the thread that waits for it learns so."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()

    def end(self) -> int | None:
        """Kill the process, if there is one; its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        assert process.stdin is not None and process.stdout is not None
        process.kill()
        code = process.wait()
        for pipe in (process.stdin, process.stdout):
            pipe.close()
        return code

    def _start(self) -> None:
        tokens = [token.decode("latin-1") for token in self._vocabulary.tokens]
        first = json.dumps({"tokens": tokens, "stops": self._vocabulary.stops}).encode()
        here = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
        for _ in range(TRIES):
            self.end()
            if self._closed:
                raise CompilerError("grammars are not compiled any more: the server ends")
            self._process = subprocess.Popen(
                [sys.executable, "-m", "cluster.grammar.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env=os.environ | here,
                start_new_session=True,
            )
            _give_way(self._process.pid)  # importing takes most of a second
            try:
                reply = self._exchange(first, START_S)
            except TimeoutError:
                reply = BROKEN + b"it does not answer"
            if reply == READY:
                return
            code = self.end()
            why = f"it ended with {code}" if reply is None else reply.removeprefix(BROKEN).decode()
            if reply is not None or code not in NOT_ITS_FAULT:
                break
        raise CompilerError(f"the process that compiles grammars does not start: {why}")

    def _exchange(self, content: bytes, seconds: float) -> bytes | None:
        """Send a frame and wait for one; None if the process ends. Raises TimeoutError."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        until = time.monotonic() + seconds
        ends, source = self._process.stdin.fileno(), self._process.stdout.fileno()
        rest = memoryview(frame(content))
        found = bytearray()
        size = 8
        try:
            while rest:
                _wait(ends, select.POLLOUT, until)
                rest = rest[os.write(ends, rest[: select.PIPE_BUF]) :]
            while len(found) < size:
                _wait(source, select.POLLIN, until)
                piece = os.read(source, 1 << 20)
                if not piece:
                    return None
                found += piece
                size = 8 + int.from_bytes(found[:8], "big") if len(found) >= 8 else size
        except BrokenPipeError:
            return None
        return bytes(found[8:])


def _give_way(pid: int) -> None:
    """Make a process that leads a session of its own nicer than this one, and its session as well: Linux shares
    processors among sessions first (sched(7), autogroups), and niceness counts within one.
    """
    os.setpriority(os.PRIO_PROCESS, pid, min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS))
    for _ in range(TRIES):
        try:
            Path(f"/proc/{pid}/autogroup").write_text(str(NICENESS), encoding="ascii")
        except BlockingIOError:  # the system takes ten such changes a second
            time.sleep(0.2)
        except OSError:  # no Linux, or one without autogroups
            return
        else:
            return


def _wait(descriptor: int, event: int, until: float) -> None:
    """Wait until a pipe can be used; its end counts as that."""
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, 1000 * (until - time.monotonic()))):
        raise TimeoutError
