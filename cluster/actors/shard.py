"""The actor of one rank: target shard, draft runners and the step loop, behind a handful of calls.

Importing this module is cheap on purpose: only the actor's own process loads torch and the engine. No call arrives
inside a step; commands wait in the loop's inbox, and one streaming generator carries what the steps gave.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import ray

from cluster.actors.loop import EngineLoop, StepEngine
from cluster.actors.messages import Commands, Heartbeat, StepItem
from cluster.config import EngineConfig

FACTORY = "cluster.engine:build_engine"
ACTOR_OPTIONS: dict[str, Any] = {
    "max_restarts": 0,
    "max_task_retries": 0,
    "concurrency_groups": {"commands": 1, "outputs": 1, "control": 2},
}
SWITCH_INTERVAL_S = 0.001  # a thread that carries items out waits this long for the step thread's interpreter lock


class ShardActor:
    """One rank of a gang. The constructor is light; `load` does the work, so that all ranks load side by side.

    `commands` and `outputs` have a thread each: commands keep their order, and the outputs stream stays open.
    """

    def __init__(self, rank: int, world: int, neighbours: int = 1, factory: str = FACTORY) -> None:
        self._rank = rank
        self._world = world
        self._neighbours = neighbours  # ranks on this node, this one included: they share its cores
        self._factory = factory
        self._loop: EngineLoop | None = None
        self._info: dict[str, Any] = {}
        self._serving: bytes | None = None

    @ray.method(concurrency_group="control")
    def load(self, config: EngineConfig) -> dict[str, Any]:
        """Load the models, start stepping, and return the resolved config.

        Raises:
            ConfigError: the config or a checkpoint cannot be served; the message names the setting.
        """
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        threads = config.num_threads or max(
            1, (len(os.sched_getaffinity(0)) - 1) // self._neighbours
        )  # one core for REST
        os.environ["OMP_NUM_THREADS"] = str(threads)  # Ray sets it to the actor's CPUs; torch reads it when imported
        engine = _resolve(self._factory)(config.model_copy(update={"num_threads": threads}))
        self._info = engine.info() | {"world": self._world, "pid": os.getpid()}
        self._loop = EngineLoop(engine, self._rank)
        self._loop.start()
        return self._info

    @ray.method(concurrency_group="commands")
    def put(self, commands: Commands) -> None:
        """Pass submits and aborts to the loop, in the order of the calls."""
        self._running.put(commands)

    @ray.method(concurrency_group="outputs")
    def outputs(self) -> Iterator[tuple[StepItem, ...]]:
        """Stream what the steps gave: one entry per step, several at once when the reader was slower."""
        loop = self._running
        while not loop.stopping:
            if items := loop.drain():
                yield tuple(items)

    @ray.method(concurrency_group="control")
    def heartbeat(self) -> Heartbeat:
        """The pulse of the rank, without waiting for a step."""
        return self._running.heartbeat()

    @ray.method(concurrency_group="control")
    def info(self) -> dict[str, Any]:
        """The resolved config."""
        return self._info

    @ray.method(concurrency_group="control")
    def metrics(self) -> list[bytes]:
        """The rank's registry sample and, where one was left here, that of its replica."""
        own = self._running.engine.metrics.serialize()
        return [own] if self._serving is None else [own, self._serving]

    @ray.method(concurrency_group="commands")
    def keep_serving_sample(self, sample: bytes) -> None:
        """Hold the replica's own registry sample, so that other replicas can read it here."""
        self._serving = sample

    @ray.method(concurrency_group="control")
    def stop(self) -> bool:
        """End the loop after its step; True when it ended in time."""
        return self._loop is None or self._loop.stop()

    @property
    def _running(self) -> EngineLoop:
        if self._loop is None:
            raise RuntimeError(f"rank {self._rank} has no engine yet; call load first")
        return self._loop


def _resolve(factory: str) -> Callable[[EngineConfig], StepEngine]:
    """The function behind `package.module:name`."""
    module, _, name = factory.partition(":")
    found: Callable[[EngineConfig], StepEngine] = getattr(importlib.import_module(module), name)
    return found
