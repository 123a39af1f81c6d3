"""Runs of one batch of requests, timed while all of them decode. The contenders of a measurement run in turns: each is
an engine in this process (`SingleRanks`), or a gang of several ranks in processes of their own (`Gangs`).
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
from cluster.request import Request

LONGEST = 3
"""A run ends when its requests have generated a given number of tokens on average. A single request may generate up to
`LONGEST` times this number.
"""


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
    generated tokens by request. `times[k]` is the time after step k of the run, on a clock that all processes share,
    and `counts[k]` the number of tokens that the rank has generated until then. After step `begin` all requests of the
    rank have a token, and after step `end` they have as many as wanted; `end` is None for a rank without requests.
    """

    first_step: int
    tokens: dict[int, list[int]]
    times: list[float] = field(default_factory=list)
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


class Contenders(Protocol):
    """Named contenders, which run one at a time."""

    @property
    def names(self) -> list[str]:
        """The names, in the order in which the contenders were given."""
        ...

    def run(self, name: str, prompts: TokenLists, temperature: float, new_tokens: int) -> SteadyRun:
        """Run the prompts as one batch. From the time when all requests have a token, generate `new_tokens` tokens per
        request on average; then abort the requests.
        """
        ...


class SingleRanks:
    """Contenders of one rank each: engines in this process."""

    def __init__(self, configs: Mapping[str, EngineConfig]) -> None:
        self._engines = {name: build_engine(config) for name, config in configs.items()}

    @property
    def names(self) -> list[str]:
        """As `Contenders.names`."""
        return list(self._engines)

    def run(self, name: str, prompts: TokenLists, temperature: float, new_tokens: int) -> SteadyRun:
        """As `Contenders.run`."""
        return run_steadily(self._engines[name], prompts, temperature, new_tokens)


class Gangs:
    """Contenders of several ranks each. `processes` run `cluster.bench.steady_rank`; each process has one rank of every
    contender.
    """

    def __init__(self, configs: Mapping[str, EngineConfig], processes: RankProcesses) -> None:
        self._processes, self._names = processes, list(configs)
        self._stores = [open_store(HOST) for _ in configs]
        for store, (name, config) in zip(self._stores, configs.items(), strict=True):
            message = {"build": name, "settings": config.model_dump(exclude_none=True)}
            processes.meet(message, processes.rank_count, store)

    @property
    def names(self) -> list[str]:
        """As `Contenders.names`."""
        return self._names

    def run(self, name: str, prompts: TokenLists, temperature: float, new_tokens: int) -> SteadyRun:
        """As `Contenders.run`. The ranks share the prompts: rank r gets every `rank_count`th prompt, from r on."""
        ranks = self._processes.rank_count
        loads = [
            asdict(BatchLoad(dict(list(enumerate(prompts))[rank::ranks]), temperature, new_tokens))
            for rank in range(ranks)
        ]
        return joined([RankSteps.of(answer) for answer in self._processes.ask({"run": name, "loads": loads}, ranks)])


def run_steadily(engine: Engine, prompts: TokenLists, temperature: float, new_tokens: int) -> SteadyRun:
    """Run one batch on an engine of one rank, as `Contenders.run` does."""
    return joined([run_rank(engine, BatchLoad(dict(enumerate(prompts)), temperature, new_tokens))])


def run_rank(engine: Engine, load: BatchLoad) -> RankSteps:
    """Run this rank's part of a run. All ranks of the gang must call this, and all return after the same step.

    The rank aborts its requests when they have generated `load.new_tokens` tokens on average since all of them have a
    token. A single request may generate up to `LONGEST` times as many tokens; the first one that reaches this limit
    also ends the rank's part. With a lower limit, contenders that give some requests more rows than others would be
    stopped early.
    """
    record = RankSteps(engine.status().steps, {i: [] for i in load.prompts})
    for i, prompt in load.prompts.items():
        params = fixed_length_params(LONGEST * load.new_tokens, load.temperature, seed=i)
        engine.submit(Request(str(i), tuple(prompt), params))
    wanted, count, has_begun = load.new_tokens * len(load.prompts), 0, not load.prompts
    while not (record.times and engine.is_idle):
        outputs = engine.step().outputs
        count += sum(len(output.token_ids) for output in outputs)
        record.times.append(time.perf_counter())
        record.counts.append(count)
        for output in outputs:
            record.tokens[int(output.request_id)] += output.token_ids
        if not has_begun and all(record.tokens.values()):
            has_begun, record.begin = True, len(record.times) - 1
        has_enough = has_begun and count - record.counts[record.begin] >= wanted
        if record.end is None and load.prompts and (has_enough or any(output.finish_reason for output in outputs)):
            record.end = len(record.times) - 1
            for i in load.prompts:
                engine.abort(str(i))
    return record


def joined(ranks: Sequence[RankSteps]) -> SteadyRun:
    """Return the run of a gang, given what each of its ranks did. The run is timed from the step after which all
    requests of all ranks have a token to the step after which the first rank has as many tokens as wanted.

    Raises:
        ValueError: the ranks did not begin with the same step, so their steps cannot be compared.
    """
    if len({rank.first_step for rank in ranks}) > 1:
        raise ValueError(f"ranks began the run with different steps: {[rank.first_step for rank in ranks]}")
    begin, end = max(rank.begin for rank in ranks), min(rank.end for rank in ranks if rank.end is not None)
    tokens = {i: tokens for rank in ranks for i, tokens in rank.tokens.items()}
    return SteadyRun(
        tokens=[tokens[i] for i in sorted(tokens)],
        steady_tokens=sum(rank.counts[end] - rank.counts[begin] for rank in ranks),
        seconds=ranks[0].times[end] - ranks[0].times[begin],
    )
