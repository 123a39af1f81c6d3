"""An engine without tensors, in the shape of `cluster.engine.Engine`: it counts, so every stream can be checked.

A request with prompt (.., p) gets the tokens p+1, p+2, ..., two per step. Several ranks step together. A prompt may
begin with a word that asks for trouble, on the rank that it was sent to or, with `(TROUBLE, ON + rank, ..)`, on that
one: see the constants.
"""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster.config import ConfigError, EngineConfig
from cluster.observability.metrics import EngineMetrics, StepStats
from cluster.request import Request, SequenceOutput, SpeculationCounts
from cluster.status import EngineStatus, RankInfo
from tests.actors.fake_link import Link, OutOfStepError, PeerLostError, Rendezvous, Store
from tests.info import rank_info

__all__ = ["PeerLostError", "Rendezvous", "build", "open_store"]

POISON = 900_001  # the step raises
TOO_LONG = 900_002  # refused at submit
SLOW = 900_003  # each step takes 20 ms
STUCK = 900_004  # each step takes 1.5 s, in one phase
CRASH = 900_005  # the process dies in the step
SUDDEN = 900_009  # the process dies as soon as it has said that the step admits the request
LATE = 900_010  # the process dies in the step after the one that gave the request its first tokens of this life
ASTRAY = 900_006  # the rank is found out of step
CRAWL = 900_007  # each phase takes 0.4 s
NOISY = 900_008  # no trouble: the tokens depend on the seed as well
ON = 910_000
PER_STEP = 2
PHASES = ("plan", "draft", "target", "extend")


@dataclass(frozen=True)
class Status(EngineStatus):
    aborted: int = 0


@dataclass(frozen=True)
class Result:
    outputs: list[SequenceOutput]


class Metrics(EngineMetrics):
    """As long in the making as a real engine's, so that a scrape may be given up meanwhile."""

    def serialize(self) -> bytes:
        time.sleep(0.02)
        return super().serialize()


class CountingEngine:
    def __init__(self, config: EngineConfig, rank: int = 0, link: Link | None = None) -> None:
        self.config = config
        self.rank = rank
        self.metrics = Metrics(model_name="counting")
        self.requests: dict[str, list[Any]] = {}
        self.steps = 0
        self.aborted = 0
        self.has_ended = False
        self.position = (0, "start")
        self.progress = (0, False)
        self._on_admitted: Callable[[tuple[str, ...]], None] = lambda ids: None
        self._waiting: dict[str, Request] = {}
        self._link = link
        self._bell = link or _alone()
        self._quiet = True
        self._leaving = False

    def prepare_grammars(self) -> None:
        """It has no grammars."""

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self._waiting)

    @property
    def is_idle(self) -> bool:
        return self._quiet if self._link is not None else not self.has_work

    def check(self, request: Request) -> None:
        if TOO_LONG in request.prompt_token_ids:
            raise ValueError("prompt is too long")

    def submit(self, request: Request) -> None:
        self.check(request)
        assert self._link is None or request.params.seed is not None, "a stream without a seed cannot be resumed"
        self._waiting[request.request_id] = request

    def abort(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        self.aborted += self.requests.pop(request_id, None) is not None

    def _take_in(self) -> None:
        """Begin as many of those that wait as there is room for, the oldest first."""
        room = max(0, self.config.max_running_requests - len(self.requests))
        taken = list(self._waiting)[:room]
        for name in taken:
            request = self._waiting.pop(name)
            self.requests[name] = [request, request.resumed_tokens, 0]
        if taken:
            self._on_admitted(tuple(taken))
        if any(_trouble(self.requests[name][0], self.rank) == (SUDDEN, self.rank) for name in taken):
            os.kill(os.getpid(), signal.SIGKILL)

    def _exchange(self, row: dict[str, Any], phase: str) -> list[Any]:
        assert self._link is not None
        self.progress = (self.progress[0] + 1, True)
        every = self._link.exchange(row, self.steps, phase)
        self.progress = (self.progress[0] + 1, False)
        return every

    def sleep(self) -> None:
        self._bell.sleep(self.steps)

    def wake_ranks(self) -> None:
        self._bell.ring(self.steps)

    def leave(self) -> None:
        self._leaving = True

    def close(self, reason: str = "") -> None:
        self._bell.close()

    def step(self) -> Result:
        self._take_in()
        troubles = [_trouble(request, self.rank, trees) for request, _, trees in self.requests.values()]
        every = []
        for phase in PHASES:
            self.position = (self.steps, phase)
            if phase == "target":
                self._suffer({kind for kind, rank in troubles if rank == self.rank})
            if self._link is not None:
                row = {"work": self.has_work, "leave": self._leaving, "troubles": troubles}
                every = self._exchange(row, phase)
                if phase == "plan":
                    troubles = [tuple(trouble) for row in every for trouble in row["troubles"]]
            if any(kind == CRAWL and rank == self.rank for kind, rank in troubles):
                time.sleep(0.4)
        self.steps += 1
        outputs = self._outputs()
        self.metrics.observe_step(StepStats(committed_tokens=sum(len(o.token_ids) for o in outputs)))
        if self._link is not None:  # one row more, as what is left after the step counts
            after = self._exchange({"work": self.has_work}, "commit")
            self._quiet = not any(row["work"] for row in after)
            self.has_ended = any(row["leave"] for row in every)
        else:
            self.has_ended = self._leaving
        return Result(outputs)

    def _suffer(self, kinds: set[int]) -> None:
        if POISON in kinds:
            raise RuntimeError("poisoned")
        if ASTRAY in kinds:
            raise OutOfStepError(f"rank {self.rank} has another plan", self.rank, *self.position)
        if kinds & {CRASH, LATE}:
            os.kill(os.getpid(), signal.SIGKILL)
        if STUCK in kinds:
            time.sleep(1.5)
        time.sleep(0.02 if SLOW in kinds else 0.001)

    def _outputs(self) -> list[SequenceOutput]:
        outputs = []
        for name, state in list(self.requests.items()):
            request, done, trees = state
            count = min(PER_STEP, request.params.max_tokens - done)
            prompt = request.prompt_token_ids[: len(request.prompt_token_ids) - request.resumed_tokens]
            tokens = tuple(token_at(request, prompt[-1], at) for at in range(done, done + count))
            ended = done + count == request.params.max_tokens
            state[1:] = done + count, trees + 1
            counts = SpeculationCounts(trees, 3 * trees, (0, trees)) if ended and trees else None
            finish = "length" if ended else None
            outputs.append(SequenceOutput(name, tokens, finish_reason=finish, speculation=counts))
            if ended:
                del self.requests[name]
        return outputs

    def status(self) -> Status:
        return Status(self.steps, len(self.requests), aborted=self.aborted)

    def on_admitted(self, call: Callable[[tuple[str, ...]], None]) -> None:
        self._on_admitted = call

    def info(self) -> RankInfo:
        return rank_info(self.config.page_size, speculative_num_draft_tokens=4)


def token_at(request: Request, last: int, at: int) -> int:
    """The token number `at` of a request whose prompt ends with `last`."""
    if request.prompt_token_ids[0] != NOISY:
        return last + at + 1
    assert request.params.seed is not None
    return (request.params.seed * 31 + last * 17 + at * at) % 800_000


def _trouble(request: Request, rank: int, trees: int = 0) -> tuple[int, int]:
    """(kind, the rank that has it) of a request that has had so many outputs."""
    kind, *rest = request.prompt_token_ids
    kind = 0 if kind == LATE and not trees else kind
    return kind, rest[0] - ON if rest and rest[0] >= ON else rank


def _alone() -> Link:
    return Link(0, 1, Rendezvous("", 0), Store("127.0.0.1"))


def open_store(host: str) -> Store:
    return Store(host)


def build(
    config: EngineConfig, rank: int = 0, rendezvous: Rendezvous | None = None, store: Store | None = None
) -> CountingEngine:
    if "missing" in config.model_path:
        raise ConfigError(f"model_path {config.model_path!r} does not exist; give the folder of a checkpoint")
    if config.model_path == f"bad-on-{rank}":
        raise ConfigError(f"rank {rank}: the checkpoint differs")
    if config.model_path == f"dies-on-{rank}":
        os.kill(os.getpid(), signal.SIGKILL)
    link = None if rendezvous is None else Link(rank, config.tp_size, rendezvous, store)
    return CountingEngine(config, rank, link)
