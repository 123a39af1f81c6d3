"""A fake of `cluster.engine.Engine` without tensors. It counts, so a test can check every stream.

A request with prompt (.., p) gets the tokens p+1, p+2, ..., two per step. The ranks of a gang step together. The first
token of a prompt may name a trouble, see the constants. A prompt `(TROUBLE, ..)` causes the trouble on the rank that
gets the request; a prompt `(TROUBLE, RANK_BASE + rank, ..)` causes it on that rank.
"""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster.config import ConfigError, EngineConfig
from cluster.observability.metrics import EngineMetrics
from cluster.observability.step_stats import StepStats
from cluster.request import Request, SequenceOutput, SpeculationCounts
from cluster.status import EngineStatus, RankInfo
from tests.serving.actors.fake_link import Link, OutOfStepError, PeerLostError, Rendezvous, Store
from tests.support.rank_info import rank_info

__all__ = ["PeerLostError", "Rendezvous", "build", "open_store"]

POISON = 900_001  # the step raises
TOO_LONG = 900_002  # the engine refuses the request at submit
SLOW = 900_003  # each step takes 20 ms
STUCK = 900_004  # each step takes 1.5 s, in one phase
CRASH = 900_005  # the process dies in the step
CRASH_ON_ADMISSION = 900_009  # the process dies as soon as it has reported that the step admits the request
# The process dies one step after the step that gave the request its first tokens in this incarnation.
CRASH_AFTER_FIRST_TOKENS = 900_010
OUT_OF_STEP = 900_006  # the step raises OutOfStepError
SLOW_PHASES = 900_007  # each phase takes 0.4 s
SEED_DEPENDENT = 900_008  # not a trouble: the tokens depend on the seed as well
RANK_BASE = 910_000  # as the second token of a prompt, this number plus a rank chooses the rank that has the trouble
TOKENS_PER_STEP = 2  # tokens that a request gets in a step
PHASES = ("plan", "draft", "target", "extend")


@dataclass(frozen=True)
class Status(EngineStatus):
    aborted: int = 0


@dataclass(frozen=True)
class Result:
    outputs: list[SequenceOutput]


class Metrics(EngineMetrics):
    """Metrics that take as long to serialise as a real engine's, so that a client may cancel a scrape meanwhile."""

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
        self._wake_link = link or _single_rank_link()
        self._gang_is_idle = True
        self._stop_requested = False

    def prepare_grammars(self) -> None:
        """Do nothing: this engine has no grammars."""

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self._waiting)

    @property
    def is_idle(self) -> bool:
        return self._gang_is_idle if self._link is not None else not self.has_work

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

    def _admit_waiting(self) -> None:
        """Admit waiting requests while slots are free, the oldest first, and report the admitted ids."""
        free_slots = max(0, self.config.max_running_requests - len(self.requests))
        admitted_ids = list(self._waiting)[:free_slots]
        for request_id in admitted_ids:
            request = self._waiting.pop(request_id)
            self.requests[request_id] = [request, request.resumed_tokens, 0]
        if admitted_ids:
            self._on_admitted(tuple(admitted_ids))
        if any(
            _trouble_of(self.requests[request_id][0], self.rank) == (CRASH_ON_ADMISSION, self.rank)
            for request_id in admitted_ids
        ):
            os.kill(os.getpid(), signal.SIGKILL)

    def _exchange(self, row: dict[str, Any], phase: str) -> list[Any]:
        assert self._link is not None
        self.progress = (self.progress[0] + 1, True)
        gathered_rows = self._link.exchange(row, self.steps, phase)
        self.progress = (self.progress[0] + 1, False)
        return gathered_rows

    def sleep(self) -> None:
        self._wake_link.sleep(self.steps)

    def wake_ranks(self) -> None:
        self._wake_link.wake_ranks(self.steps)

    def leave(self) -> None:
        self._stop_requested = True

    def close(self, reason: str = "") -> None:
        self._wake_link.close()

    def step(self) -> Result:
        self._admit_waiting()
        troubles = [
            _trouble_of(request, self.rank, output_count) for request, _, output_count in self.requests.values()
        ]
        gathered_rows = []
        for phase in PHASES:
            self.position = (self.steps, phase)
            if phase == "target":
                self._cause_troubles({kind for kind, rank in troubles if rank == self.rank})
            if self._link is not None:
                row = {"work": self.has_work, "leave": self._stop_requested, "troubles": troubles}
                gathered_rows = self._exchange(row, phase)
                if phase == "plan":
                    troubles = [tuple(trouble) for row in gathered_rows for trouble in row["troubles"]]
            if any(kind == SLOW_PHASES and rank == self.rank for kind, rank in troubles):
                time.sleep(0.4)
        self.steps += 1
        outputs = self._outputs()
        self.metrics.observe_step(StepStats(committed_tokens=sum(len(o.token_ids) for o in outputs)))
        if self._link is not None:  # exchange one more row: the gang is idle if no rank has work after the step
            rows_after_step = self._exchange({"work": self.has_work}, "commit")
            self._gang_is_idle = not any(row["work"] for row in rows_after_step)
            self.has_ended = any(row["leave"] for row in gathered_rows)
        else:
            self.has_ended = self._stop_requested
        return Result(outputs)

    def _cause_troubles(self, kinds: set[int]) -> None:
        if POISON in kinds:
            raise RuntimeError("poisoned")
        if OUT_OF_STEP in kinds:
            raise OutOfStepError(f"rank {self.rank} has another plan", self.rank, *self.position)
        if kinds & {CRASH, CRASH_AFTER_FIRST_TOKENS}:
            os.kill(os.getpid(), signal.SIGKILL)
        if STUCK in kinds:
            time.sleep(1.5)
        time.sleep(0.02 if SLOW in kinds else 0.001)

    def _outputs(self) -> list[SequenceOutput]:
        outputs = []
        for request_id, state in list(self.requests.items()):
            request, token_count, output_count = state
            count = min(TOKENS_PER_STEP, request.params.max_tokens - token_count)
            prompt = request.prompt_token_ids[: len(request.prompt_token_ids) - request.resumed_tokens]
            tokens = tuple(token_at(request, prompt[-1], index) for index in range(token_count, token_count + count))
            is_finished = token_count + count == request.params.max_tokens
            state[1:] = token_count + count, output_count + 1
            counts = (
                SpeculationCounts(output_count, 3 * output_count, (0, output_count))
                if is_finished and output_count
                else None
            )
            finish = "length" if is_finished else None
            outputs.append(SequenceOutput(request_id, tokens, finish_reason=finish, speculation=counts))
            if is_finished:
                del self.requests[request_id]
        return outputs

    def status(self) -> Status:
        return Status(self.steps, len(self.requests), aborted=self.aborted)

    def on_admitted(self, callback: Callable[[tuple[str, ...]], None]) -> None:
        self._on_admitted = callback

    def info(self) -> RankInfo:
        return rank_info(self.config.page_size, speculative_num_draft_tokens=4)


def token_at(request: Request, last_prompt_token: int, index: int) -> int:
    """Output token number `index` of a request whose prompt ends with `last_prompt_token`."""
    if request.prompt_token_ids[0] != SEED_DEPENDENT:
        return last_prompt_token + index + 1
    assert request.params.seed is not None
    return (request.params.seed * 31 + last_prompt_token * 17 + index * index) % 800_000


def _trouble_of(request: Request, rank: int, output_count: int = 0) -> tuple[int, int]:
    """(kind of trouble, rank that has the trouble) of a request with `output_count` outputs in this incarnation."""
    kind, *following_tokens = request.prompt_token_ids
    kind = 0 if kind == CRASH_AFTER_FIRST_TOKENS and not output_count else kind
    return kind, following_tokens[0] - RANK_BASE if following_tokens and following_tokens[0] >= RANK_BASE else rank


def _single_rank_link() -> Link:
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
