"""Runs of one batch of requests, timed while all of them decode. A contender is an engine in this process
(`SingleRanks`), or a gang of several ranks in processes of their own (`Gangs`).

Contenders that are compared take turns after every few steps (`run_together`). Speeds of a machine that changes its
pace for seconds, because it shares its cores with other machines, would differ by a tenth if whole runs took turns.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, Self

from cluster.bench.ranks import RankProcesses
from cluster.bench.report import ratio
from cluster.bench.runs import TokenLists, fixed_length_params
from cluster.bench.streams import HOST
from cluster.config import EngineConfig
from cluster.distributed.mesh import open_store
from cluster.engine import Engine, build_engine
from cluster.request import Request, SequenceOutput

LONGEST = 3
"""A run ends when its requests have generated a given number of tokens on average. A single request may generate up to
`LONGEST` times this number.
"""
TURN_S = 0.05
"""How long a contender runs before the next one takes its turn, in seconds. A turn is at least one step."""


@dataclass(frozen=True, slots=True)
class BatchLoad:
    """The requests that a rank runs at once: a prompt by the number of each request, which is also its seed. They have
    one temperature. Each of them generates `new_tokens` tokens on average.
    """

    prompts: Mapping[int, Sequence[int]]
    temperature: float
    new_tokens: int

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """Return the load from the JSON object of its fields."""
        return cls(**{**fields, "prompts": {int(i): prompt for i, prompt in fields["prompts"].items()}})


@dataclass(slots=True)
class RankSteps:
    """What one rank did in a run. `first_step` is the number of steps that the rank had run before. `tokens` are the
    generated tokens by request. `seconds[k]` is the time that steps 0 to k of the run have taken, and `counts[k]` the
    number of tokens that the rank has generated in them. After step `begin` all requests of the rank have a token, and
    after step `end` they have as many as wanted; `end` is None for a rank without requests.
    """

    first_step: int
    tokens: dict[int, list[int]]
    seconds: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    begin: int = 0
    end: int | None = None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """Return the record from the JSON object of its fields."""
        return cls(**{**fields, "tokens": {int(i): tokens for i, tokens in fields["tokens"].items()}})


@dataclass(frozen=True, slots=True)
class SteadyRun:
    """One run: all `tokens` of each request. `steady_tokens` is the number of tokens generated while all requests
    decoded, `seconds` the duration of this time.
    """

    tokens: list[list[int]]
    steady_tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second while all requests decoded."""
        return ratio(self.steady_tokens, self.seconds)


class RankBatchRun:
    """A run of one rank, a few steps at a time. All ranks of the gang must run the same steps.

    The rank aborts its requests when they have generated `load.new_tokens` tokens on average since all of them have a
    token. A single request may generate up to `LONGEST` times as many tokens; the first one that reaches this limit
    also ends the rank's part. With a lower limit, contenders that give some requests more rows than others would be
    stopped early.
    """

    def __init__(self, engine: Engine, load: BatchLoad) -> None:
        self._engine, self._load = engine, load
        self.record = RankSteps(engine.status().steps, {i: [] for i in load.prompts})
        self._has_begun, self._paused_at = not load.prompts, time.perf_counter()
        for i, prompt in load.prompts.items():
            params = fixed_length_params(LONGEST * load.new_tokens, load.temperature, seed=i)
            engine.submit(Request(str(i), tuple(prompt), params))

    def advance(self, steps: int) -> bool:
        """Run up to `steps` steps. Return whether the run is over: no rank has requests any more."""
        record, before_s = self.record, self.record.seconds[-1] if self.record.seconds else 0.0
        started = time.perf_counter()
        self._engine.skip_time(started - self._paused_at)
        for _ in range(steps):
            outputs = self._engine.step().outputs
            record.seconds.append(before_s + time.perf_counter() - started)
            self._count(outputs)
            if self._engine.is_idle:
                return True
        self._paused_at = time.perf_counter()
        return False

    def _count(self, outputs: Sequence[SequenceOutput]) -> None:
        """Count the tokens of a step. Abort all requests if the rank now has as many tokens as wanted."""
        record, load = self.record, self._load
        generated = sum(len(output.token_ids) for output in outputs)
        record.counts.append(generated + (record.counts[-1] if record.counts else 0))
        for output in outputs:
            record.tokens[int(output.request_id)] += output.token_ids
        if not self._has_begun and all(record.tokens.values()):
            self._has_begun, record.begin = True, len(record.counts) - 1
        wanted = load.new_tokens * len(load.prompts)
        has_enough = self._has_begun and record.counts[-1] - record.counts[record.begin] >= wanted
        if record.end is None and load.prompts and (has_enough or any(output.finish_reason for output in outputs)):
            record.end = len(record.counts) - 1
            for i in load.prompts:
                self._engine.abort(str(i))


class Contenders(Protocol):
    """The contenders of a measurement, by name. A contender has at most one unfinished run."""

    @property
    def names(self) -> list[str]:
        """The names, in the order in which the contenders were given."""
        ...

    def begin(self, name: str, prompts: TokenLists, temperature: float, new_tokens: int) -> None:
        """Begin a run of a contender with the prompts as one batch. The run ends when, since all requests have a token,
        each has generated `new_tokens` tokens on average.
        """
        ...

    def advance(self, name: str, steps: int) -> bool:
        """Run up to `steps` steps of the contender's run, and return whether the run is over."""
        ...

    def finish(self, name: str) -> SteadyRun:
        """Return the contender's run, which must be over."""
        ...


class SingleRanks:
    """Contenders of one rank each: engines in this process. The methods are those of `Contenders`."""

    def __init__(self, configs: Mapping[str, EngineConfig]) -> None:
        self._engines = {name: build_engine(config) for name, config in configs.items()}
        self._runs: dict[str, RankBatchRun] = {}

    @property
    def names(self) -> list[str]:
        """The names, in the order of the configs."""
        return list(self._engines)

    def begin(self, name: str, prompts: TokenLists, temperature: float, new_tokens: int) -> None:
        """Begin a run."""
        self._runs[name] = RankBatchRun(
            self._engines[name], BatchLoad(dict(enumerate(prompts)), temperature, new_tokens)
        )

    def advance(self, name: str, steps: int) -> bool:
        """Run up to `steps` steps."""
        return self._runs[name].advance(steps)

    def finish(self, name: str) -> SteadyRun:
        """Return the run."""
        return joined([self._runs.pop(name).record])


class Gangs:
    """Contenders of several ranks each. `processes` run `cluster.bench.steady_rank`; each process has one rank of every
    contender. The methods are those of `Contenders`.
    """

    def __init__(self, configs: Mapping[str, EngineConfig], processes: RankProcesses) -> None:
        self._processes, self._names = processes, list(configs)
        self._stores = [open_store(HOST) for _ in configs]
        for store, (name, config) in zip(self._stores, configs.items(), strict=True):
            message = {"build": name, "settings": config.model_dump(exclude_none=True)}
            processes.meet(message, processes.rank_count, store)

    @property
    def names(self) -> list[str]:
        """The names, in the order of the configs."""
        return self._names

    def begin(self, name: str, prompts: TokenLists, temperature: float, new_tokens: int) -> None:
        """Begin a run. The ranks share the prompts: rank r gets every `rank_count`th prompt, from r on."""
        ranks = self._processes.rank_count
        parts = [dict(list(enumerate(prompts))[rank::ranks]) for rank in range(ranks)]
        loads = [asdict(BatchLoad(part, temperature, new_tokens)) for part in parts]
        self._ask({"begin": name, "loads": loads})

    def advance(self, name: str, steps: int) -> bool:
        """Run up to `steps` steps. All ranks end a run with the same step."""
        return all(answer["is_over"] for answer in self._ask({"advance": name, "steps": steps}))

    def finish(self, name: str) -> SteadyRun:
        """Return the run."""
        return joined([RankSteps.of(answer) for answer in self._ask({"finish": name})])

    def _ask(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        return self._processes.ask(message, self._processes.rank_count)


def run_together(
    contenders: Contenders, names: Sequence[str], prompts: TokenLists, temperature: float, new_tokens: int
) -> dict[str, SteadyRun]:
    """Run the same batch with each of the contenders `names`, in turns of about `TURN_S` seconds; return their runs."""
    for name in names:
        contenders.begin(name, prompts, temperature, new_tokens)
    steps, active = dict.fromkeys(names, 1), list(names)
    while active:
        for name in tuple(active):
            started = time.perf_counter()
            if contenders.advance(name, steps[name]):
                active.remove(name)
            step_s = (time.perf_counter() - started) / steps[name]
            steps[name] = max(1, min(2 * steps[name], round(TURN_S / step_s)))
    return {name: contenders.finish(name) for name in names}


def run_steadily(engine: Engine, prompts: TokenLists, temperature: float, new_tokens: int) -> SteadyRun:
    """Run one batch on an engine of one rank. From the time when all requests have a token, generate `new_tokens`
    tokens per request on average; then abort the requests.
    """
    run = RankBatchRun(engine, BatchLoad(dict(enumerate(prompts)), temperature, new_tokens))
    while not run.advance(1):
        pass
    return joined([run.record])


def joined(ranks: Sequence[RankSteps]) -> SteadyRun:
    """Return the run of a gang, given what each of its ranks did. The run is timed from the step after which all
    requests of all ranks have a token to the step after which the first rank has as many tokens as wanted.

    Raises:
        ValueError: the ranks did not begin with the same step, or one had enough tokens before another began.
    """
    if len({rank.first_step for rank in ranks}) > 1:
        raise ValueError(f"ranks began the run with different steps: {[rank.first_step for rank in ranks]}")
    begin, end = max(rank.begin for rank in ranks), min(rank.end for rank in ranks if rank.end is not None)
    if end <= begin:
        raise ValueError(f"after step {end} a rank has enough tokens, before all requests have one (step {begin})")
    tokens = {i: tokens for rank in ranks for i, tokens in rank.tokens.items()}
    return SteadyRun(
        tokens=[tokens[i] for i in sorted(tokens)],
        steady_tokens=sum(rank.counts[end] - rank.counts[begin] for rank in ranks),
        seconds=ranks[0].seconds[end] - ranks[0].seconds[begin],
    )
