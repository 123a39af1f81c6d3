"""Run an engine over prompts, and compute speeds and acceptance of the run."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from cluster.bench.report import ratio
from cluster.engine import Engine
from cluster.request import Request, RequestParams

TokenLists = Sequence[Sequence[int]]  # prompts or continuations, as token ids


@dataclass(slots=True)
class EngineRun:
    """The generated tokens of each prompt, and the cost of the run. `steps` counts verified trees: one per request and
    step with speculation. `accepted_tokens` counts the accepted draft tokens of these trees, and `accept_counts[j]`
    the trees with exactly j accepted draft tokens. `forward_seconds` is the time of model forwards, and of steps
    replayed as one captured program.
    """

    tokens: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    forward_seconds: float = 0.0
    steps: int = 0
    accepted_tokens: int = 0
    accept_counts: Counter[int] = field(default_factory=Counter)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of the whole run, prefill included."""
        return sum(map(len, self.tokens)) / self.seconds if self.seconds else 0.0

    @property
    def accept_length(self) -> float:
        """Tokens committed per verified tree, bonus token included; 1.0 without speculation."""
        return 1.0 + self.accepted_tokens / self.steps if self.steps else 1.0

    def acceptance_by_depth(self, levels: int) -> list[float]:
        """Return a share for each depth d from 1 to `levels`: of the trees with at least d - 1 accepted draft tokens,
        the share that have at least d. The share is 0.0 if no tree has d - 1.
        """
        reached = [
            sum(count for accepted, count in self.accept_counts.items() if accepted >= depth)
            for depth in range(levels + 1)
        ]
        return [ratio(deeper, shallower) for shallower, deeper in pairwise(reached)]

    @property
    def outside_forward_share(self) -> float:
        """The share of `seconds` that is not in `forward_seconds`."""
        return 1.0 - self.forward_seconds / self.seconds if self.seconds else 0.0

    def add(self, other: "EngineRun") -> None:
        """Append a later run to this one."""
        self.tokens += other.tokens
        self.seconds += other.seconds
        self.forward_seconds += other.forward_seconds
        self.steps += other.steps
        self.accepted_tokens += other.accepted_tokens
        self.accept_counts += other.accept_counts


def fixed_length_params(new_tokens: int, temperature: float = 0.0, seed: int = 0) -> RequestParams:
    """Return sampling parameters that generate exactly `new_tokens` tokens: EOS is ignored."""
    return RequestParams(temperature=temperature, seed=seed, max_tokens=new_tokens, ignore_eos=True)


def run_batch(engine: Engine, prompts: TokenLists, params: Sequence[RequestParams]) -> EngineRun:
    """Run all prompts as one batch until all have finished."""
    engine_run = EngineRun(tokens=[[] for _ in prompts])
    requests = [
        Request(str(i), tuple(prompt), prompt_params)
        for i, (prompt, prompt_params) in enumerate(zip(prompts, params, strict=True))
    ]
    started_at = time.perf_counter()
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        step_result = engine.step()
        replay_seconds = sum(step_result.stats.device_phases.values()) if step_result.stats.replayed else 0.0
        engine_run.forward_seconds += step_result.stats.forward_seconds + replay_seconds
        for output in step_result.outputs:
            engine_run.tokens[int(output.request_id)] += output.token_ids
            if output.speculation is not None:
                engine_run.steps += output.speculation.steps
                engine_run.accepted_tokens += output.speculation.accepted_tokens
                engine_run.accept_counts.update(dict(enumerate(output.speculation.accepted)))
    engine_run.seconds = time.perf_counter() - started_at
    return engine_run


def run_batch_greedily(engine: Engine, prompts: TokenLists, new_tokens: int) -> EngineRun:
    """Run all prompts as one batch, at temperature 0."""
    return run_batch(engine, prompts, [fixed_length_params(new_tokens)] * len(prompts))


class TimedDecoding(NamedTuple):
    """A run, prefill included, and its verified trees per second of decoding, prefill excluded."""

    run: EngineRun
    steps_per_second: float


def time_decoding(engine: Engine, prompts: TokenLists, params: Sequence[RequestParams], batch: int) -> TimedDecoding:
    """Run prompts in batches of `batch` (at batch 1, only the first half of the prompts) and time their decoding."""
    # Each batch runs twice: until its first tokens, and until its end. The difference in time is that of decoding.
    until_first_token, until_end = EngineRun(), EngineRun()
    for start in range(0, len(prompts) if batch > 1 else len(prompts) // 2, batch):
        batch_slice = slice(start, start + batch)
        until_first_token.add(
            run_batch(
                engine,
                prompts[batch_slice],
                [replace(request_params, max_tokens=1) for request_params in params[batch_slice]],
            )
        )
        until_end.add(run_batch(engine, prompts[batch_slice], params[batch_slice]))
    return TimedDecoding(until_end, until_end.steps / (until_end.seconds - until_first_token.seconds))
