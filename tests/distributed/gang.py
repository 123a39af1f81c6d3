"""Runs a gang's ranks as processes of their own, without Ray. Each process runs cases and answers in JSON."""

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
NOTICE_SLACK = 1.0 if os.environ.get("TIMED") == "1" else 6.0
"""The factor of the limits for noticing a fault. `make verify` runs the tests that measure this time alone, with
TIMED=1. In `make test` other tests use the CPUs too.
"""


@dataclass(frozen=True)
class Action:
    """What data-parallel rank `dp_rank` does before step `step`. `kind` is "submit" or "abort".

    `request` holds the fields of the `Request` to submit, with `params` as a dict; for an abort only `request_id`.
    """

    step: int
    dp_rank: int
    kind: str
    request: dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One run of a gang, from its start to its end. The field names are also the JSON keys that a rank process reads.

    `config` holds the settings of all ranks, `own` the settings of single ranks that replace them, by rank. `shaken` is
    the seed of random tiers and chunk sizes; None leaves both as they are. `plant` is the name of the planted fault,
    which happens on rank `guilty` in step `at_step` or later; an empty name plants none. `naps` is how often all ranks
    sleep after the last step; each time another rank wakes them.
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
    def world_size(self) -> int:
        return int(self.config.get("tp_size", 1))


@dataclass
class SleepRecord:
    """One sleep of one rank, with times of the system-wide clock.

    `woke` is when the rank woke, `rang` when the rank woke the others (0.0 if another rank did), `seconds` how long the
    rank slept, `cpu` the CPU seconds that its process used meanwhile.
    """

    woke: float
    rang: float
    seconds: float
    cpu: float


@dataclass
class RankReport:
    """The report of one rank on a run that all ranks ended together.

    By request: `tokens`; `ended` (finish reason, and the histogram of accept lengths or None); `tree_checksums` (one
    checksum of all drafted trees); `returned_trees` (trees that the request asked for); `prompt_logprobs` and
    `token_logprobs` (of each token: id, log-probability, rank in the vocabulary, likeliest tokens).

    `retractions` names the retracted requests. `rows` are the rank's rows in the target phase of each step, without
    padding; `padding_rows` is the sum of the padding, `replayed_steps` the number of steps that replayed a captured
    program. `world_log` and `attn_log` describe the collectives that the rank entered over the world and over its
    attention group: their count, a checksum and the last ones. `pages_used` is the number of pages in use at the end.
    `naps` are the rank's sleeps.
    """

    tokens: dict[str, list[int]]
    ended: dict[str, tuple[str, list[int] | None]]
    tree_checksums: dict[str, int]
    returned_trees: dict[str, list[list[Any]]]
    retractions: list[str]
    rows: list[int]
    padding_rows: int
    replayed_steps: int
    world_log: list[Any]
    attn_log: list[Any]
    pages_used: int
    seconds: float
    naps: list[SleepRecord]
    prompt_logprobs: dict[str, list[list[Any]]] = field(default_factory=dict)
    token_logprobs: dict[str, list[list[Any]]] = field(default_factory=dict)


@dataclass
class RankFailure:
    """The report of one rank on a run that failed.

    `error` is the message, `kind` the type of the error, `at` the time of the error (system-wide clock). `rank`, `step`
    and `phase` are those that the error names.
    """

    error: str
    kind: str
    rank: int | None
    step: int | None
    phase: str | None
    at: float


@dataclass
class ExitedProcess:
    """A rank process that ended, with its exit code."""

    code: int


RankAnswer = RankReport | RankFailure | ExitedProcess


class RankProcesses:
    """The `world_size` processes of a gang's ranks. They run many cases one after the other, each as a new gang.
    Processes that have ended are started again for the next case.

    `fault_time_and_step` is when the planted fault of the last case happened: (system-wide clock, step). It is None if
    the fault did not happen.
    """

    def __init__(self, world_size: int, module: str = "tests.distributed.worker") -> None:
        """Start the processes. Each runs the Python module `module`."""
        self.world_size, self._module = world_size, module
        self.fault_time_and_step: tuple[float, int] | None = None
        self._epoch = 0
        self._not_ready = set(range(world_size))
        self._processes = [self._start(rank) for rank in range(world_size)]

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

    def run(self, case: Case, timeout_s: float = 240.0) -> list[RankAnswer]:
        """Run the case; return the answer of each rank, in rank order.

        Raises:
            TimeoutError: a rank did not answer in time; the message names it.
        """
        self._epoch, self.fault_time_and_step = self._epoch + 1, None
        for rank, process in enumerate(self._processes):
            if process.poll() is not None:
                self._processes[rank] = self._start(rank)
                self._not_ready.add(rank)
        while self._not_ready:  # wait for the imports of new processes here: their time does not count as the case's
            self._read_line(self._not_ready.pop())
        deadline = time.monotonic() + timeout_s
        port = self._open_store()
        line = json.dumps({"port": port, "epoch": self._epoch, "case": asdict(case)})
        for process in self._processes:
            self._write_line(process, line)
        return self._collect_answers(deadline)

    def run_without_failure(self, case: Case, timeout_s: float = 240.0) -> list[RankReport]:
        """Run a case in which no rank may fail; return the report of each rank, in rank order."""
        answers = self.run(case, timeout_s)
        failures = [answer for answer in answers if not isinstance(answer, RankReport)]
        assert not failures, failures
        return answers  # type: ignore[return-value]

    def _open_store(self) -> int:
        """Make rank 0 open the store of the next run; return the port of the store."""
        self._write_line(self._processes[0], "open")
        return int(self._read_line(0)["port"])

    def _read_line(self, rank: int) -> dict[str, Any]:
        """Read the next line of a rank's process."""
        stdout = self._processes[rank].stdout
        assert stdout is not None
        line: dict[str, Any] = json.loads(stdout.readline())
        return line

    @staticmethod
    def _write_line(process: "subprocess.Popen[bytes]", line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(line.encode() + b"\n")

    def _collect_answers(self, deadline: float) -> list[RankAnswer]:
        """Wait for the answer of each rank, until the time `deadline` of the monotonic clock."""
        answers: dict[int, RankAnswer] = {}
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(answers) < self.world_size:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    missing_ranks = sorted(set(range(self.world_size)) - set(answers))
                    for process in self._processes:
                        process.kill()
                        process.wait()
                    raise TimeoutError(f"ranks {missing_ranks} did not answer in time")
                for key, _ in ready:
                    # The pipes have no buffer on this side: the next select still reports lines that are not read here.
                    answer = self._parse_answer(key.data, key.fileobj.readline())  # type: ignore[union-attr]
                    if answer is not None:
                        answers[key.data] = answer
                        selector.unregister(key.fileobj)
        return [answers[rank] for rank in range(self.world_size)]

    def _parse_answer(self, rank: int, line: bytes) -> RankAnswer | None:
        """Parse a line of a rank. Return the rank's answer, or None if the line only says when the fault happened."""
        if not line:
            return ExitedProcess(self._processes[rank].wait())
        message = json.loads(line)
        if "struck" in message:
            self.fault_time_and_step = tuple(message["struck"])
            return None
        if "error" in message:
            return RankFailure(**message)
        message["ended"] = {name: tuple(end_fields) for name, end_fields in message["ended"].items()}
        message["naps"] = [SleepRecord(**sleep_fields) for sleep_fields in message["naps"]]
        return RankReport(**message)
