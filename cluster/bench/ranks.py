"""Run the ranks of a gang (all ranks of one replica) as plain processes, without Ray, for measurements.

Every case builds the engines of a gang and ends them. The processes outlive a case, so that contenders can take turns
in one run without starting Python again.
"""

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from cluster.bench.pair import DEFAULT_TREE, ModelPair
from cluster.bench.streams import HOST
from cluster.distributed.mesh import Store, open_store
from cluster.paths.checkout import CHECKOUT

CASE_TIMEOUT_S = 300.0
CHUNK_ROWS = 512


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a measurement; `requests` is the number per rank.

    Prefill interference (how much the prefill of a long prompt slows decoding down) is measured with a prompt of
    `long_tokens` tokens beside requests that generate `steady_tokens` tokens, once for each value of the setting
    `prefill_share` in `shares`.
    """

    requests: int = 4
    prompt_tokens: int = 64
    new_tokens: int = 96
    long_tokens: int = 8192
    steady_tokens: int = 384
    shares: tuple[float, ...] = (0.25, 0.5, 0.75)
    repeats: int = 3


QUICK = Size(2, new_tokens=12, long_tokens=1024, steady_tokens=48, shares=(0.5,), repeats=1)


def gang_settings(pair: ModelPair, requests: int, ranks: int, **overrides: object) -> dict[str, Any]:
    """Return the settings of a gang of `ranks` data-parallel ranks; `overrides` replaces some settings."""
    settings = pair.config(DEFAULT_TREE, requests).model_dump(exclude_none=True)
    return {
        **settings,
        "num_threads": pair.num_threads or 1,
        "chunked_prefill_size": CHUNK_ROWS,
        "tp_size": ranks,
        "attn_dp_size": ranks,
        **overrides,
    }


@dataclass(frozen=True, slots=True)
class RankRequest:
    """A greedy request to one data-parallel rank; EOS is ignored.

    `resubmit`: the request is submitted again whenever it ends, as `name#N` with a new number N. `wait_until_idle`: the
    request waits until its rank runs no request; later requests of the rank wait with it. `after_request`: the name of
    a request of the same rank that must end before this one starts, or "".
    """

    name: str
    dp_rank: int
    prompt: Sequence[int]
    new_tokens: int
    resubmit: bool = False
    wait_until_idle: bool = False
    after_request: str = ""


@dataclass(frozen=True, slots=True)
class GangCase:
    """One run of a gang (all ranks of a replica). The run ends when request `last_request` has ended; if `last_request`
    is empty, when all requests have ended. `options` are passed to the `prepare` function of `rank_process.main`; the
    default program has no such function and ignores them.
    """

    settings: Mapping[str, Any]
    requests: Sequence[RankRequest]
    last_request: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of one rank: its start (on a clock that all processes share), its wall and CPU seconds, and its rows.

    `phase_seconds` are seconds by phase, as in `StepStats.phase_seconds`: a step replayed as one captured program has
    the phase `replay` in place of draft, target and extend. `padded_rows` counts padding.
    """

    started_at: float
    seconds: float
    cpu_seconds: float
    phase_seconds: Mapping[str, float]
    decode_requests: int
    prompt_rows: int
    target_rows: int
    padded_rows: int


@dataclass(slots=True)
class RankRun:
    """The record of one rank: its steps and, by name of request, the submission time, the output times and the tokens.

    `extra_times` has lists of seconds by name, which the `prepare` function of `rank_process.main` returned.
    """

    steps: list[StepRecord] = field(default_factory=list)
    submitted_at: dict[str, float] = field(default_factory=dict)
    output_times: dict[str, list[float]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    extra_times: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self:
        """Return the record from the JSON object that a rank's process wrote."""
        return cls(**{**record, "steps": [StepRecord(**step) for step in record["steps"]]})


class RankProcesses:
    """The processes of `rank_count` ranks. `run` sends a case to the first of them, as many as `tp_size` says."""

    def __init__(self, rank_count: int, program: str = "cluster.bench.rank_process") -> None:
        """`program` is the module that each process runs; the module must call `rank_process.main` or
        `rank_process.answer_messages`.
        """
        self.rank_count, self._program = rank_count, program
        self._epoch = 0
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONWARNINGS": "ignore",
        }
        for rank in range(self.rank_count):
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", self._program, str(rank)],
                    cwd=CHECKOUT,  # makes the package importable even if it is not installed
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def run(self, case: GangCase) -> list[RankRun]:
        """Run a case and return the records of its ranks, in rank order.

        Raises:
            RuntimeError: a rank failed, ended, or did not answer within `CASE_TIMEOUT_S`; the message names the rank.
        """
        store = open_store(HOST)
        answers = self.meet({"case": asdict(case)}, int(case.settings.get("tp_size", 1)), store)
        return [RankRun.of(answer) for answer in answers]

    def meet(self, message: Mapping[str, Any], rank_count: int, store: Store) -> list[dict[str, Any]]:
        """Send `message` to the first `rank_count` ranks, which then form a gang. Add to the message what they need to
        meet: the `port` of `store`, and an `epoch`. The caller must keep `store` as long as the gang lives. Return the
        answers of the ranks, in rank order.

        Raises:
            RuntimeError: as `run`.
        """
        self._epoch += 1
        return self.ask({"port": store.port, "epoch": self._epoch, **message}, rank_count)

    def ask(self, message: Mapping[str, Any], rank_count: int) -> list[dict[str, Any]]:
        """Send `message` to the first `rank_count` ranks. Return their answers, in rank order.

        Raises:
            RuntimeError: as `run`.
        """
        for process in self._processes[:rank_count]:
            assert process.stdin is not None
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
        return self._answers(rank_count)

    def _answers(self, rank_count: int) -> list[dict[str, Any]]:
        records: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + CASE_TIMEOUT_S
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes[:rank_count]):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(records) < rank_count:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise RuntimeError(f"no answer from ranks {sorted(set(range(rank_count)) - set(records))}")
                for key, _ in ready:
                    line = key.fileobj.readline()  # type: ignore[union-attr]
                    if not line:
                        raise RuntimeError(f"rank {key.data} ended, exit code {self._processes[key.data].wait()}")
                    record = json.loads(line)
                    if "error" in record:
                        raise RuntimeError(f"rank {key.data} failed: {record['error']}")
                    records[key.data] = record
        return [records[rank] for rank in range(rank_count)]
