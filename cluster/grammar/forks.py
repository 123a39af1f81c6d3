"""The process that compiles grammars: what a client sent may take a compiler all its time and memory, or its life.

So each grammar is compiled by a child of its own. It starts in milliseconds, because its parent has imported and made
all that a compiler needs. `compiler.py` runs it as `python -m cluster.grammar.forks`. A frame is eight bytes of length
and as many bytes. The first one in is the vocabulary; it is answered when everything is made. Each that follows is a
number of eight bytes and a grammar as JSON; its answer is the number, one of the marks below, and a text. Answers come
in the order in which children end.
"""

import ctypes
import gc
import json
import os
import selectors
import signal
import time
from dataclasses import dataclass, field
from typing import Any

from cluster.grammar.asked import Grammar, GrammarError
from cluster.grammar.limits import TOO_LARGE, Stopwatch, TimeSpent, limit, no_more_limit
from cluster.grammar.vocabulary import Vocabulary
from cluster.grammar.worker import SlowGrammarError, Worker

READY, BROKEN = b"=", b"!"
COMPILED, REFUSED = b"+", b"-"
UNSURE = b"~"  # refused for the time that it took while others had the processor
SLOW, LATE = b"t", b"l"  # it took its processor time; or it did not get as much for very long: what it got, as JSON
GONE = b"x"  # the child ended: how
PATIENCE_S = 60.0  # how long a grammar may wait for its processor time
PR_SET_PDEATHSIG = 1  # of prctl(2)
NUMBER = 8  # bytes of a frame's length, and of a grammar's number


@dataclass(slots=True)
class Child:
    """A process that compiles one grammar; it ends, and so closes `pipe`, when it has written its answer there."""

    number: bytes
    pid: int
    pipe: int
    until: float
    began: float = field(default_factory=time.monotonic)
    answer: bytearray = field(default_factory=bytearray)
    late: bool = False

    def ended(self) -> bytes:
        """Its answer, once its pipe is closed."""
        _, status, usage = os.wait4(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if not code:
            return bytes(self.answer)
        spent = {"processor": usage.ru_utime + usage.ru_stime, "passed": time.monotonic() - self.began}
        if self.late or code == -signal.SIGPROF:
            return (LATE if self.late else SLOW) + json.dumps(spent).encode()
        return GONE + str(code).encode()


class Forks:
    """Has children compile the grammars that come in, each as soon as it comes."""

    def __init__(self, worker: Worker, requests: int, replies: int) -> None:
        """`requests` and `replies` are the descriptors of pipes."""
        self._worker, self._requests, self._replies = worker, requests, replies
        self._children: dict[int, Child] = {}  # by the descriptor of their pipes
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Answer until the pipe of requests is closed."""
        self._selector.register(self._requests, selectors.EVENT_READ)
        while True:
            waits = [child.until - time.monotonic() for child in self._children.values() if not child.late]
            for key, _ in self._selector.select(max(0.0, min(waits)) if waits else None):
                if key.fd != self._requests:
                    self._read(self._children[key.fd])
                elif (asked := read_frame(self._requests)) is not None:
                    self._begin(asked[:NUMBER], json.loads(asked[NUMBER:]))
                else:
                    return
            for child in self._children.values():
                if not child.late and time.monotonic() > child.until:
                    child.late = True
                    os.kill(child.pid, signal.SIGKILL)

    def _begin(self, number: bytes, request: dict[str, Any]) -> None:
        source, end = os.pipe()
        parent, pid = os.getpid(), os.fork()
        if not pid:
            code = 1
            try:
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() == parent:
                    write_all(end, replied(self._worker, request))
                    code = 0
            finally:
                os._exit(code)
        os.close(end)
        self._children[source] = Child(number, pid, source, time.monotonic() + PATIENCE_S)
        self._selector.register(source, selectors.EVENT_READ)

    def _read(self, child: Child) -> None:
        piece = os.read(child.pipe, 1 << 20)
        if piece:
            child.answer += piece
            return
        self._selector.unregister(child.pipe)
        os.close(child.pipe)
        del self._children[child.pipe]
        write_all(self._replies, frame(child.number + child.ended()))


def replied(worker: Worker, request: dict[str, Any]) -> bytes:
    """The answer to a grammar, within the limits of processor time and memory."""
    watch = Stopwatch()
    limit(request["seconds"])
    try:
        return COMPILED + worker.compile(Grammar(request["kind"], request["text"], request["compact"])).encode()
    except SlowGrammarError as error:
        return (UNSURE if watch.read().on_a_busy_machine else REFUSED) + str(error).encode()
    except GrammarError as error:
        return REFUSED + str(error).encode("utf-8", "backslashreplace")
    except MemoryError:
        return REFUSED + TOO_LARGE.encode()
    finally:
        no_more_limit()


def spent_in(answer: bytes) -> TimeSpent:
    """What a child spent, of an answer that is `SLOW` or `LATE`."""
    return TimeSpent(**json.loads(answer[1:]))


def frame(content: bytes) -> bytes:
    """A frame of this content."""
    return len(content).to_bytes(NUMBER, "big") + content


def read_frame(source: int) -> bytes | None:
    """The next frame from a pipe; None at its end."""
    head = _read_exactly(source, NUMBER)
    return None if head is None else _read_exactly(source, int.from_bytes(head, "big"))


def _read_exactly(source: int, size: int) -> bytes | None:
    found = bytearray()
    while len(found) < size:
        piece = os.read(source, size - len(found))
        if not piece:
            return None
        found += piece
    return bytes(found)


def write_all(end: int, content: bytes) -> None:
    """Write everything into a pipe, waiting for its reader."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(end, rest) :]


def main() -> None:
    """Answer frames until the parent closes the pipe."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends by it, and this process with the parent
    replies = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not come between frames
    try:
        first = json.loads(read_frame(0) or b"{}")
        tokens = tuple(token.encode("latin-1") for token in first["tokens"])
        worker = Worker(Vocabulary(tokens, tuple(first["stops"])))
        worker.prepare()
    except Exception as error:
        write_all(replies, frame(BROKEN + repr(error).encode()))
        raise
    gc.freeze()  # children share its pages as long as nobody writes to them
    write_all(replies, frame(READY))
    Forks(worker, 0, replies).run()


if __name__ == "__main__":
    main()
