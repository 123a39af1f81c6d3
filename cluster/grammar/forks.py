"""The process that compiles grammars. Each grammar is compiled in a forked child of its own.

A client's grammar may use up a compiler's time and memory, or crash the compiler; then only the child is lost. A child
starts in milliseconds, because its parent has imported and prepared everything. `compiler.py` runs this module as
`python -m cluster.grammar.forks`.

A frame is eight bytes that give a length, then a content of that length. The first incoming frame is the vocabulary; it
is answered when the process is ready. The content of each later frame is a request number of eight bytes, and a grammar
as JSON. The answer to such a frame is the same number, one of the marks below, and a text. Answers come in the order in
which children end.
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
UNSURE = b"~"  # refused for its compile time, which was measured while other processes also used the processor
# SLOW: the child used up its processor time. LATE: the child did not get that processor time within `PATIENCE_S`. In
# both cases the text is the time spent, as JSON.
SLOW, LATE = b"t", b"l"
GONE = b"x"  # the child died; the text is its exit code
PATIENCE_S = 60.0  # wall-clock time that a child may take
PR_SET_PDEATHSIG = 1  # option of prctl(2): the signal sent to a child when its parent dies
NUMBER = 8  # size of a frame's length and of a request number, in bytes


@dataclass(slots=True)
class Child:
    """A process that compiles one grammar. It writes its answer to `pipe` and ends, which closes the pipe. `late`: it
    was killed because it still ran at the time `until`.
    """

    number: bytes
    pid: int
    pipe: int
    until: float
    began: float = field(default_factory=time.monotonic)
    answer: bytearray = field(default_factory=bytearray)
    late: bool = False

    def ended(self) -> bytes:
        """Reap the child after its pipe closed, and return its answer."""
        _, status, usage = os.wait4(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if not code:
            return bytes(self.answer)
        spent = {"processor": usage.ru_utime + usage.ru_stime, "passed": time.monotonic() - self.began}
        if self.late or code == -signal.SIGPROF:
            return (LATE if self.late else SLOW) + json.dumps(spent).encode()
        return GONE + str(code).encode()


class Forks:
    """Forks a child for each incoming grammar as soon as it arrives, and sends the answers."""

    def __init__(self, worker: Worker, requests: int, replies: int) -> None:
        """`requests` and `replies` are the file descriptors of pipes."""
        self._worker, self._requests, self._replies = worker, requests, replies
        self._children: dict[int, Child] = {}  # keyed by the file descriptor of a child's pipe
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Serve requests until the pipe of requests is closed."""
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
                # The parent may have died before prctl took effect.
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
    """Compile a grammar within the limits of processor time and memory, and return the answer."""
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
    """Return the time that a child spent. `answer` is marked `SLOW` or `LATE`."""
    return TimeSpent(**json.loads(answer[1:]))


def frame(content: bytes) -> bytes:
    """Return a frame with this content."""
    return len(content).to_bytes(NUMBER, "big") + content


def read_frame(source: int) -> bytes | None:
    """Return the content of the next frame from a pipe, or None if the pipe has ended."""
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
    """Write all bytes to a pipe, blocking while it is full."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(end, rest) :]


def main() -> None:
    """Serve frames until the parent closes the pipe."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which then ends this process
    replies = os.dup(1)
    os.dup2(2, 1)  # keep output that libraries print out of the frames
    try:
        first = json.loads(read_frame(0) or b"{}")
        tokens = tuple(token.encode("latin-1") for token in first["tokens"])
        worker = Worker(Vocabulary(tokens, tuple(first["stops"])))
        worker.prepare()
    except Exception as error:
        write_all(replies, frame(BROKEN + repr(error).encode()))
        raise
    gc.freeze()  # a garbage collection in a child would write to, and so copy, the shared memory pages
    write_all(replies, frame(READY))
    Forks(worker, 0, replies).run()


if __name__ == "__main__":
    main()
