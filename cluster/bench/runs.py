"""Run an engine over prompts, and derive the figures of the run."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from cluster.bench.report import ratio
from cluster.engine import Engine
from cluster.request import Request, RequestParams

Texts = Sequence[Sequence[int]]  # prompts or continuations, as token ids


@dataclass(slots=True)
class EngineRun:
    """The generated tokens of each prompt, and the cost of the run. `steps` counts verified trees, `accepted` their
    accepted draft tokens, and `paths[j]` the trees with exactly j accepted draft tokens.
    """

    tokens: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    forward_seconds: float = 0.0
    steps: int = 0
    accepted: int = 0
    paths: Counter[int] = field(default_factory=Counter)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of the whole run, prefill included."""
        return sum(map(len, self.tokens)) / self.seconds if self.seconds else 0.0

    @property
    def accept_length(self) -> float:
        """Tokens committed per step; 1.0 without speculation."""
        return 1.0 + self.accepted / self.steps if self.steps else 1.0

    def by_depth(self, levels: int) -> list[float]:
        """Return a share for each depth d from 1 to `levels`: of the trees accepted to depth d - 1, those accepted at
        d.
        """
        came = [sum(n for right, n in self.paths.items() if right >= depth) for depth in range(levels + 1)]
        return [ratio(deeper, here) for here, deeper in pairwise(came)]

    @property
    def outside_share(self) -> float:
        """Share of the time spent outside model forwards and replayed steps."""
        return 1.0 - self.forward_seconds / self.seconds if self.seconds else 0.0

    def add(self, other: "EngineRun") -> None:
        """Append a later run to this one."""
        self.tokens += other.tokens
        self.seconds += other.seconds
        self.forward_seconds += other.forward_seconds
        self.steps += other.steps
        self.accepted += other.accepted
        self.paths += other.paths


def params_of(new_tokens: int, temperature: float = 0.0, seed: int = 0) -> RequestParams:
    """Return sampling parameters that generate exactly `new_tokens` tokens: EOS is ignored."""
    return RequestParams(temperature=temperature, seed=seed, max_tokens=new_tokens, ignore_eos=True)


def run_together(engine: Engine, prompts: Texts, params: Sequence[RequestParams]) -> EngineRun:
    """Run all prompts as one batch until all have finished."""
    result = EngineRun(tokens=[[] for _ in prompts])
    requests = [Request(str(i), tuple(p), own) for i, (p, own) in enumerate(zip(prompts, params, strict=True))]
    started = time.perf_counter()
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        step = engine.step()
        replay = sum(step.stats.device_phases.values()) if step.stats.replayed else 0.0
        result.forward_seconds += step.stats.forward_seconds + replay
        for output in step.outputs:
            result.tokens[int(output.request_id)] += output.token_ids
            if output.speculation is not None:
                result.steps += output.speculation.steps
                result.accepted += output.speculation.accepted_tokens
                result.paths.update(dict(enumerate(output.speculation.accepted)))
    result.seconds = time.perf_counter() - started
    return result


def run_greedily(engine: Engine, prompts: Texts, new_tokens: int) -> EngineRun:
    """Run all prompts as one batch, at temperature 0."""
    return run_together(engine, prompts, [params_of(new_tokens)] * len(prompts))


class Steady(NamedTuple):
    """A run. `steps_per_second`: the verified trees per second of decoding (prefill excluded)."""

    run: EngineRun
    steps_per_second: float


def steady_steps(engine: Engine, prompts: Texts, params: Sequence[RequestParams], batch: int) -> Steady:
    """Run prompts in batches of `batch` (at batch 1, only the first half of the prompts) and time their decoding."""
    # Each batch runs twice: until its first tokens, and until its end. The difference is the time of decoding.
    first, whole = EngineRun(), EngineRun()
    for start in range(0, len(prompts) if batch > 1 else len(prompts) // 2, batch):
        part = slice(start, start + batch)
        first.add(run_together(engine, prompts[part], [replace(one, max_tokens=1) for one in params[part]]))
        whole.add(run_together(engine, prompts[part], params[part]))
    return Steady(whole, whole.steps / (whole.seconds - first.seconds))
