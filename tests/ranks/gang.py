"""Ranks as processes of their own, without Ray: each runs the cases it is given and answers with plain values."""

import json
import os
import selectors
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Action:
    """What a data-parallel rank is told before step `step`: `submit` a request or `abort` one.

    `request` holds the fields of a `Request`, its `params` as a dict; of an abort only `request_id`.
    """

    step: int
    dp_rank: int
    kind: str
    request: dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One life of a gang. `own`: settings that differ, by rank. `shaken`: a seed for random tiers and chunk sizes.

    `plant`: what goes wrong on rank `guilty` from step `at_step` on. `naps`: after the last step all ranks sleep this
    often, and each time another rank rings.
    """

    config: dict[str, Any]
    actions: list[Action] = field(default_factory=list)
    own: dict[int, dict[str, Any]] = field(default_factory=dict)
    shaken: int | None = None
    plant: str = ""
    guilty: int = 1
    at_step: int = 6
    naps: int = 0

    @property
    def world(self) -> int:
        return int(self.config.get("tp_size", 1))


@dataclass
class Nap:
    """A sleep of one rank: when it woke, when it rang itself, seconds asleep, and CPU seconds used meanwhile."""

    woke: float
    rang: float
    seconds: float
    cpu: float


@dataclass
class Life:
    """What a rank tells of a life that ended by agreement.

    `ended`: reason and accepted histogram by request; `trees`: a checksum of all its drafted trees; `shown`: those that
    it asked for; `rows`: its rows in the target phase of every step, padding not counted, `padded` the padding,
    `replayed` the steps that were replayed; `world_log`, `attn_log`: count and checksum of the collectives it entered.
    `scores` are the log-probabilities of prompts, `drawn` those of the tokens that came: token, number, rank and the
    likeliest, of each token.
    """

    tokens: dict[str, list[int]]
    ended: dict[str, tuple[str, list[int] | None]]
    trees: dict[str, int]
    shown: dict[str, list[list[Any]]]
    retracted: list[str]
    rows: list[int]
    padded: int
    replayed: int
    world_log: list[Any]
    attn_log: list[Any]
    pages_used: int
    seconds: float
    naps: list[Nap]
    scores: dict[str, list[list[Any]]] = field(default_factory=dict)
    drawn: dict[str, list[list[Any]]] = field(default_factory=dict)


@dataclass
class Lost:
    """What a rank tells of a life that broke: the error, when it came (system-wide clock), and what it named."""

    error: str
    kind: str
    rank: int | None
    step: int | None
    phase: str | None
    at: float


@dataclass
class Dead:
    """A process that is gone, with its exit code."""

    code: int


Answer = Life | Lost | Dead


class Ranks:
    """`world` processes. They live through many cases, each a gang of its own; dead ones are started again.

    `struck` is when the plant of the last case did its harm, (system-wide clock, step); None if it never did.
    """

    def __init__(self, world: int, module: str = "tests.ranks.worker") -> None:
        """`module` is what each process runs."""
        self.world, self._module = world, module
        self.struck: tuple[float, int] | None = None
        self._epoch = 0
        self._fresh = set(range(world))
        self._processes = [self._start(rank) for rank in range(world)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _start(self, rank: int) -> "subprocess.Popen[bytes]":
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONWARNINGS": "ignore",
        }
        command = [sys.executable, "-m", self._module, str(rank)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return subprocess.Popen(command, cwd=ROOT, env=environment, bufsize=0, **pipes)

    def run(self, case: Case, timeout_s: float = 240.0) -> list[Answer]:
        """What every rank answered, in rank order.

        Raises:
            TimeoutError: a rank did not answer, named.
        """
        self._epoch, self.struck = self._epoch + 1, None
        for rank, process in enumerate(self._processes):
            if process.poll() is not None:
                self._processes[rank] = self._start(rank)
                self._fresh.add(rank)
        while self._fresh:  # imports take their time, which is not the case's
            self._heard(self._fresh.pop())
        until = time.monotonic() + timeout_s
        port = self._opened()
        line = json.dumps({"port": port, "epoch": self._epoch, "case": asdict(case)})
        for process in self._processes:
            self._tell(process, line)
        return self._answers(until)

    def lives(self, case: Case, timeout_s: float = 240.0) -> list[Life]:
        """What every rank told of a life that must not break."""
        answers = self.run(case, timeout_s)
        broken = [answer for answer in answers if not isinstance(answer, Life)]
        assert not broken, broken
        return answers  # type: ignore[return-value]

    def _opened(self) -> int:
        """Rank 0 opens the store of the next life."""
        self._tell(self._processes[0], "open")
        return int(self._heard(0)["port"])

    def _heard(self, rank: int) -> dict[str, Any]:
        """The next line of a rank."""
        stdout = self._processes[rank].stdout
        assert stdout is not None
        line: dict[str, Any] = json.loads(stdout.readline())
        return line

    @staticmethod
    def _tell(process: "subprocess.Popen[bytes]", line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(line.encode() + b"\n")

    def _answers(self, until: float) -> list[Answer]:
        answers: dict[int, Answer] = {}
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(answers) < self.world:
                ready = selector.select(max(0.0, until - time.monotonic()))
                if not ready:
                    silent = sorted(set(range(self.world)) - set(answers))
                    for process in self._processes:
                        process.kill()
                        process.wait()
                    raise TimeoutError(f"ranks {silent} do not answer")
                for key, _ in ready:
                    # The pipes have no buffer on this side: what is not read here still shows in the next select.
                    answer = self._answer(key.data, key.fileobj.readline())  # type: ignore[union-attr]
                    if answer is not None:
                        answers[key.data] = answer
                        selector.unregister(key.fileobj)
        return [answers[rank] for rank in range(self.world)]

    def _answer(self, rank: int, line: bytes) -> Answer | None:
        if not line:
            return Dead(self._processes[rank].wait())
        said = json.loads(line)
        if "struck" in said:
            self.struck = tuple(said["struck"])
            return None
        if "error" in said:
            return Lost(**said)
        said["ended"] = {name: tuple(end) for name, end in said["ended"].items()}
        said["naps"] = [Nap(**nap) for nap in said["naps"]]
        return Life(**said)
