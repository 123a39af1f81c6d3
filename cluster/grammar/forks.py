"""The process that compiles grammars. Each grammar is compiled in a forked child of its own.

A client's grammar may use up a compiler's time and memory, or crash the compiler; then only the child is lost. A child
starts in milliseconds, because its parent has imported and prepared everything. `compiler.py` runs this module as
`python -m cluster.grammar.forks`.

A frame is eight bytes that give a length, then a content of that length. The first incoming frame is the vocabulary; it
is answered when the process is ready. The content of each later frame is a request number of eight bytes, then JSON
with a grammar and its time limit. The answer to such a frame is the same number, one of the marks below, and a text.
Answers come in the order in which children end.
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
from cluster.grammar.limits import TOO_LARGE, Stopwatch, TimeSpent, remove_time_limit, set_limits
from cluster.grammar.vocabulary import Vocabulary
from cluster.grammar.worker import SlowGrammarError, Worker

READY, START_FAILED = b"=", b"!"
COMPILED, REFUSED = b"+", b"-"
REFUSED_WHILE_BUSY = b"~"  # refused because its masks took too long, while other processes also used the processor
# OUT_OF_TIME: the child used up its processor time. TIMED_OUT: the child did not get that processor time within
# `CHILD_TIMEOUT_S`. In both cases the text is the time spent, as JSON.
OUT_OF_TIME, TIMED_OUT = b"t", b"l"
DIED = b"x"  # the child died; the text is its exit code
CHILD_TIMEOUT_S = 60.0  # wall-clock time that a child may take
PR_SET_PDEATHSIG = 1  # option of prctl(2): the signal sent to a child when its parent dies
NUMBER_BYTES = 8  # size of a frame's length and of a request number, in bytes


@dataclass(slots=True)
class Child:
    """A process that compiles one grammar. It writes its answer to `pipe` and ends, which closes the pipe.
    `timed_out` says that it was killed because it still ran at the time `deadline`.
    """

    request_id: bytes
    pid: int
    pipe: int
    deadline: float
    started_at: float = field(default_factory=time.monotonic)
    reply: bytearray = field(default_factory=bytearray)
    timed_out: bool = False

    def reap(self) -> bytes:
        """Reap the child after its pipe closed. Return its answer, or an answer that says why it died."""
        _, status, usage = os.wait4(self.pid, 0)
        exit_code = os.waitstatus_to_exitcode(status)
        if not exit_code:
            return bytes(self.reply)
        time_spent = {"processor_s": usage.ru_utime + usage.ru_stime, "elapsed_s": time.monotonic() - self.started_at}
        if self.timed_out or exit_code == -signal.SIGPROF:
            return (TIMED_OUT if self.timed_out else OUT_OF_TIME) + json.dumps(time_spent).encode()
        return DIED + str(exit_code).encode()


class ForkServer:
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
            remaining_times = [
                child.deadline - time.monotonic() for child in self._children.values() if not child.timed_out
            ]
            for key, _ in self._selector.select(max(0.0, min(remaining_times)) if remaining_times else None):
                if key.fd != self._requests:
                    self._read_child(self._children[key.fd])
                elif (request := read_frame(self._requests)) is not None:
                    self._fork_child(request[:NUMBER_BYTES], json.loads(request[NUMBER_BYTES:]))
                else:
                    return
            for child in self._children.values():
                if not child.timed_out and time.monotonic() > child.deadline:
                    child.timed_out = True
                    os.kill(child.pid, signal.SIGKILL)

    def _fork_child(self, request_id: bytes, request: dict[str, Any]) -> None:
        read_fd, write_fd = os.pipe()
        parent_pid, pid = os.getpid(), os.fork()
        if not pid:
            exit_code = 1
            try:
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                # The parent may have died before prctl took effect.
                if os.getppid() == parent_pid:
                    write_all(write_fd, compile_reply(self._worker, request))
                    exit_code = 0
            finally:
                os._exit(exit_code)
        os.close(write_fd)
        self._children[read_fd] = Child(request_id, pid, read_fd, time.monotonic() + CHILD_TIMEOUT_S)
        self._selector.register(read_fd, selectors.EVENT_READ)

    def _read_child(self, child: Child) -> None:
        piece = os.read(child.pipe, 1 << 20)
        if piece:
            child.reply += piece
            return
        self._selector.unregister(child.pipe)
        os.close(child.pipe)
        del self._children[child.pipe]
        write_all(self._replies, frame(child.request_id + child.reap()))


def compile_reply(worker: Worker, request: dict[str, Any]) -> bytes:
    """Compile a grammar within the limits of processor time and memory, and return the answer: a mark and a text."""
    stopwatch = Stopwatch()
    set_limits(request["seconds"])
    try:
        return COMPILED + worker.compile(Grammar(request["kind"], request["text"], request["compact"])).encode()
    except SlowGrammarError as error:
        return (REFUSED_WHILE_BUSY if stopwatch.measure().machine_was_busy else REFUSED) + str(error).encode()
    except GrammarError as error:
        return REFUSED + str(error).encode("utf-8", "backslashreplace")
    except MemoryError:
        return REFUSED + TOO_LARGE.encode()
    finally:
        remove_time_limit()


def time_spent_in(reply: bytes) -> TimeSpent:
    """Return the time that a child process spent. Its reply must begin with the byte `OUT_OF_TIME` or `TIMED_OUT`."""
    return TimeSpent(**json.loads(reply[1:]))


def frame(content: bytes) -> bytes:
    """Return a frame with this content."""
    return len(content).to_bytes(NUMBER_BYTES, "big") + content


def read_frame(read_fd: int) -> bytes | None:
    """Return the content of the next frame from a pipe, or None if the pipe has ended."""
    header = _read_exactly(read_fd, NUMBER_BYTES)
    return None if header is None else _read_exactly(read_fd, int.from_bytes(header, "big"))


def _read_exactly(read_fd: int, size: int) -> bytes | None:
    content = bytearray()
    while len(content) < size:
        piece = os.read(read_fd, size - len(content))
        if not piece:
            return None
        content += piece
    return bytes(content)


def write_all(write_fd: int, content: bytes) -> None:
    """Write all bytes to a pipe, blocking while it is full."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(write_fd, rest) :]


def main() -> None:
    """Serve frames until the parent closes the pipe."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which then ends this process
    replies = os.dup(1)
    os.dup2(2, 1)  # keep output that libraries print out of the frames
    try:
        vocabulary_fields = json.loads(read_frame(0) or b"{}")
        tokens = tuple(token.encode("latin-1") for token in vocabulary_fields["tokens"])
        worker = Worker(Vocabulary(tokens, tuple(vocabulary_fields["stops"])))
        worker.prepare()
    except Exception as error:
        write_all(replies, frame(START_FAILED + repr(error).encode()))
        raise
    gc.freeze()  # a garbage collection in a child would write to, and so copy, the shared memory pages
    write_all(replies, frame(READY))
    ForkServer(worker, 0, replies).run()


if __name__ == "__main__":
    main()
