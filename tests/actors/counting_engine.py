"""An engine without tensors, in the shape of `cluster.engine.Engine`: it counts, so every stream can be checked.

A request with prompt (.., p) gets the tokens p+1, p+2, ..., two per step. Some prompts ask for trouble: token id
`POISON` makes the step raise, `TOO_LONG` is refused at submit, `SLOW` makes each step take 20 ms.
"""

import time
from dataclasses import dataclass
from typing import Any

from cluster.config import ConfigError, EngineConfig
from cluster.metrics import EngineMetrics, StepStats
from cluster.request import Request, RequestOutput

POISON, TOO_LONG, SLOW, STUCK = 900_001, 900_002, 900_003, 900_004
PER_STEP = 2


@dataclass(frozen=True)
class Status:
    steps: int
    running: int
    aborted: int


@dataclass(frozen=True)
class Result:
    outputs: list[RequestOutput]


class CountingEngine:
    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.metrics = EngineMetrics(model_name="counting")
        self.requests: dict[str, list[Any]] = {}
        self.steps = 0
        self.aborted = 0

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def check(self, request: Request) -> None:
        if TOO_LONG in request.prompt_token_ids:
            raise ValueError("prompt is too long")

    def submit(self, request: Request) -> None:
        self.check(request)
        self.requests[request.request_id] = [request, 0]

    def abort(self, request_id: str) -> None:
        self.aborted += self.requests.pop(request_id, None) is not None

    def step(self) -> Result:
        prompts = [request.prompt_token_ids for request, _ in self.requests.values()]
        if any(POISON in prompt for prompt in prompts):
            raise RuntimeError("poisoned")
        if any(STUCK in prompt for prompt in prompts):
            time.sleep(1.5)
        time.sleep(0.02 if any(SLOW in prompt for prompt in prompts) else 0.001)
        self.steps += 1
        outputs = []
        for name, state in list(self.requests.items()):
            request, done = state
            count = min(PER_STEP, request.params.max_tokens - done)
            first = request.prompt_token_ids[-1] + done + 1
            ended = done + count == request.params.max_tokens
            state[1] += count
            outputs.append(
                RequestOutput(name, tuple(range(first, first + count)), finish_reason="length" if ended else None)
            )
            if ended:
                del self.requests[name]
        self.metrics.observe_step(StepStats(committed_tokens=sum(len(o.token_ids) for o in outputs)))
        return Result(outputs)

    def status(self) -> Status:
        return Status(self.steps, len(self.requests), self.aborted)

    def info(self) -> dict[str, Any]:
        return {"model": self.config.model_path, "context_length": 4096, "vocab_size": 1_000_000}


def build(config: EngineConfig) -> CountingEngine:
    if "missing" in config.model_path:
        raise ConfigError(f"model_path {config.model_path!r} does not exist; give the folder of a checkpoint")
    return CountingEngine(config)
