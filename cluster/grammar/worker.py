"""The process that compiles grammars: what a client sent may take a compiler all its time and memory, or its life.

So each grammar is compiled by a child of its own, which starts in milliseconds, as its parent has imported and read
all that a compiler needs. Run by `compiler.py` as `python -m cluster.grammar.worker`. Frames on both pipes are eight
bytes of length and as many bytes; the first one in is the vocabulary, then each is a grammar and is answered.
"""

import ctypes
import gc
import json
import os
import re
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from cluster.grammar.asked import Grammar, GrammarError
from cluster.grammar.matching import Matchers, TextMatcher
from cluster.grammar.sources import source, tokens_of
from cluster.grammar.vocabulary import Vocabulary

READY, COMPILED, REFUSED, BROKEN, GONE = b"=", b"+", b"-", b"!", b"x"
MEMORY = 1 << 30  # bytes of address space that one grammar may take
TOO_LARGE = "it is nested too deeply, or takes more than 1 GiB of memory to compile; make it shorter or simpler"
MAX_COMPILED = 64 << 20  # characters; it is read again where it is used
PR_SET_PDEATHSIG = 1  # of prctl(2)
THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))
SHOWN = 300  # characters of xgrammar's reason
WALKS = 3
WALK_TOKENS = 48
SLOW_TOKEN_S = 0.005  # processor time of a token, on average over a walk
WHERE = re.compile(r"^\[[\d:]+\] \S+:\d+: |^Check failed: \(.*?\) is false: ")


class Worker:
    """Compiles grammars for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary, self._info = vocabulary, vocabulary.info
        self._matchers = Matchers(vocabulary)

    def compile(self, grammar: Grammar) -> str:
        """The compiled grammar as text, after it was tried out.

        Raises:
            GrammarError: it is refused; the message says why.
        """
        from xgrammar import GrammarCompiler

        text = source(grammar)
        try:
            compiler = GrammarCompiler(self._info, max_threads=THREADS, cache_enabled=False)  # threads do not fork
            if grammar.kind in ("structural_tag", "chat"):
                compiled = compiler.compile_structural_tag(text)
            else:
                compiled = compiler.compile_grammar(text)
            found = str(compiled.serialize_json())
            if grammar.kind == "chat":
                found = json.dumps(tokens_of(json.loads(text))) + found
        except MemoryError:
            raise
        except Exception as error:  # of many types, by what its C++ code raised
            if "bad_alloc" in str(error):
                raise MemoryError from error
            raise GrammarError(shortened(str(error))) from error
        if len(found) > MAX_COMPILED:
            raise GrammarError(f"compiled it is larger than {MAX_COMPILED >> 20} MiB; bound fewer or shorter strings")
        for seed in range(WALKS):
            try_out(self._matchers.matcher(found), self._vocabulary, seed)
        return found


def shortened(reason: str) -> str:
    """A reason of xgrammar's without the place in its code, on one line, cut short."""
    line = " ".join(WHERE.sub("", WHERE.sub("", reason.strip())).split())
    return line if len(line) <= SHOWN else line[: SHOWN - 3] + "..."


def try_out(matcher: TextMatcher, vocabulary: Vocabulary, seed: int) -> None:
    """Walk at random through a grammar, as a model would.

    Raises:
        GrammarError: it has a dead end, or takes too long.
    """
    random = np.random.default_rng(seed)
    row = np.zeros(vocabulary.words, np.int32)
    stops = list(vocabulary.stops)
    spent = 0.0
    for step in range(WALK_TOKENS):
        began = time.thread_time()
        matcher.fill((), row)
        spent += time.thread_time() - began
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        texts = np.setdiff1d(allowed, stops)
        if not len(texts):
            if not matcher.finished:
                raise GrammarError("nothing can match" if not step else "it has a dead end: nothing can follow there")
            break
        began = time.thread_time()
        matcher.accept([int(random.choice(texts))])
        spent += time.thread_time() - began
        if spent > SLOW_TOKEN_S * (step + 20):
            raise GrammarError(
                f"it is too ambiguous: a token takes {1000 * spent / (step + 1):.0f} ms; make it simpler"
            )


def address_space() -> int:
    """Bytes of address space that this process has taken; 0 where the system does not say."""
    file = Path("/proc/self/statm")
    return int(file.read_text().split()[0]) * resource.getpagesize() if file.exists() else 0


def limit(seconds: float) -> None:
    """End the process if it takes longer than `seconds`, and refuse it more than `MEMORY` beyond what it has."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    taken = address_space()
    if taken:
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, resource.RLIM_INFINITY))


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame; None at the end."""
    head = stream.read(8)
    return stream.read(int.from_bytes(head, "big")) if len(head) == 8 else None


def frame(content: bytes) -> bytes:
    """The bytes of a frame."""
    return len(content).to_bytes(8, "big") + content


def compiled_apart(worker: Worker, asked: bytes) -> bytes:
    """The reply to a grammar, from a child: `COMPILED` or `REFUSED` and a text, or `GONE` and how the child ended."""
    reply = os.memfd_create("reply")
    with os.fdopen(reply, "w+b") as file:
        parent, child = os.getpid(), os.fork()
        if not child:
            code = 1
            try:
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() == parent:
                    file.write(replied(worker, json.loads(asked)))
                    file.flush()
                    code = 0
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            return GONE + str(code).encode()
        file.seek(0)
        return file.read()


def replied(worker: Worker, request: dict[str, Any]) -> bytes:
    """The reply to a grammar, within the limits of time and memory."""
    limit(request["seconds"])
    try:
        reply = COMPILED + worker.compile(Grammar(request["kind"], request["text"], request["compact"])).encode()
    except GrammarError as error:
        reply = REFUSED + str(error).encode("utf-8", "backslashreplace")
    except MemoryError:
        reply = REFUSED + TOO_LARGE.encode()
    signal.setitimer(signal.ITIMER_REAL, 0)
    return reply


def main() -> None:
    """Answer frames until the parent closes the pipe."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends by it, and this process with the parent
    replies = os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)  # what libraries print must not come between frames
    requests = sys.stdin.buffer
    try:
        first = json.loads(read_frame(requests) or b"{}")
        tokens = tuple(token.encode("latin-1") for token in first["tokens"])
        worker = Worker(Vocabulary(tokens, tuple(first["stops"])))
        replies.write(frame(READY))
    except Exception as error:
        replies.write(frame(BROKEN + repr(error).encode()))
        raise
    gc.freeze()  # children share its pages as long as nobody writes to them
    while (asked := read_frame(requests)) is not None:
        replies.write(frame(compiled_apart(worker, asked)))


if __name__ == "__main__":
    main()
