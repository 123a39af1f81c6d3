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

from cluster.mesh import open_store

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
    """One life of a gang. `votes`: a seed for random tiers. `plant`: a divergence by name, on one rank at one step."""

    config: dict[str, Any]
    actions: list[Action] = field(default_factory=list)
    steps: int = 100_000
    votes: int | None = None
    plant: str = ""
    guilty: int = 1
    at_step: int = 6


class Ranks:
    """`world` processes. They live through many cases, each a gang of its own."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._epoch = 0
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONWARNINGS": "ignore",
        }
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.ranks.worker", str(rank)],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def run(self, case: Case, timeout_s: float = 240.0) -> list[dict[str, Any]]:
        """What every rank answered, in rank order.

        Raises:
            TimeoutError: a rank did not answer, named.
            RuntimeError: a rank's process ended.
        """
        self._epoch += 1
        store = open_store("127.0.0.1")
        line = json.dumps({"port": store.port, "epoch": self._epoch, "case": asdict(case)})
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(line + "\n")
            process.stdin.flush()
        return self._answers(time.monotonic() + timeout_s)

    def _answers(self, until: float) -> list[dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(answers) < self.world:
                ready = selector.select(max(0.0, until - time.monotonic()))
                if not ready:
                    raise TimeoutError(f"ranks {sorted(set(range(self.world)) - set(answers))} do not answer")
                for key, _ in ready:
                    text = key.fileobj.readline()  # type: ignore[union-attr]
                    if not text:
                        code = self._processes[key.data].wait()
                        raise RuntimeError(f"rank {key.data} ended with {code}")
                    answers[key.data] = json.loads(text)
        return [answers[rank] for rank in range(self.world)]
