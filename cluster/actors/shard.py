"""The actor of one rank, which holds the rank's models and its engine loop.

Importing this module does not import torch or the engine: the actor's process does that when it loads the rank. No call
interrupts a step: commands wait in the loop's inbox, and one streaming generator returns the steps' outputs.
"""

import importlib
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from threading import Thread
from typing import Any

import ray

from cluster.actors.engine_loop import EngineLoop, StepEngine, failure_kind_of
from cluster.actors.gpus import hide_other_gpus, reserved_gpus
from cluster.actors.grammar_transfer import GrammarCache
from cluster.actors.loading import run_in_temporary_thread
from cluster.actors.messages import Commands, Failure, Heartbeat, LoadError, StepItem
from cluster.actors.network_interface import choose_interface, node_address
from cluster.actors.process_settings import tune_gil_and_gc
from cluster.arch.hub import fetch
from cluster.config import ConfigError, EngineConfig
from cluster.distributed.cpu_progress import ProgressTracker, ThreadCpuTime, disk_waits
from cluster.observability.logs import LogSettings, configure
from cluster.status import RankInfo

logger = logging.getLogger(__name__)

FACTORY = "cluster.engine:build_rank"
# The module with `open_store` and `Rendezvous`, used if the factory's module has none. Given by name, because importing
# it loads torch.
MESH_MODULE = "cluster.distributed.mesh"
ACTOR_OPTIONS: dict[str, Any] = {
    "max_restarts": 0,
    "max_task_retries": 0,
    "concurrency_groups": {"commands": 1, "outputs": 1, "control": 2, "heartbeat": 1, "end": 1, "grammars": 1},
}
LOAD_THREADS = "aerie-load"
# The niceness of the threads that prepare for grammars and read them. This work may take tenths of a second and must
# not slow the steps.
GRAMMAR_THREAD_NICENESS = 10


class ShardActor:
    """One rank of a gang. The constructor is light; `load` does the work, so that all ranks load in parallel.

    The concurrency groups `commands`, `outputs`, `heartbeat`, `end` and `grammars` have one thread each. So commands
    keep their order, long calls (`outputs`, `end`, `read_grammar`) block no other calls, and clients cannot delay a
    heartbeat.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        ranks_on_node: int = 1,
        factory: str = FACTORY,
        epoch: int = 0,
        log: LogSettings | None = None,
    ) -> None:
        if log is not None:
            configure(log, rank=rank)
        self._rank = rank
        self._world = world
        self._ranks_on_node = ranks_on_node  # ranks of the gang on this node, this one included: they share its cores
        self._factory = factory
        self._epoch = epoch
        self._store: Any = None
        self._engine_loop: EngineLoop | None = None
        self._load_cpu_time = ThreadCpuTime(LOAD_THREADS)
        self._load_progress = ProgressTracker(self._load_cpu_time)
        self._replica_sample: bytes | None = None
        self._grammars = GrammarCache()

    @ray.method(concurrency_group="control")
    def open_store(self) -> tuple[str, int]:
        """Open the store through which the ranks meet, on rank 0; return its host and port."""
        self._load_cpu_time.use_current_thread()  # the store's module imports torch, which may take long
        host = node_address()
        self._store = self._from_factory_module("open_store")(host)
        return host, self._store.port

    @ray.method(concurrency_group="control")
    def fetch(self, config: EngineConfig) -> None:
        """Download the files that this node's cache lacks, of the models from a hub that `config` names. The files are
        for all ranks of the node.

        Raises:
            ConfigError: the files cannot be downloaded; the message says what was tried.
        """
        self._load_cpu_time.use_current_thread()
        fetch(config)

    @ray.method(concurrency_group="control")
    def load(self, config: EngineConfig, store_address: tuple[str, int] | None = None) -> RankInfo:
        """Load the models, meet the other ranks, and start stepping; return this rank's settings and hardware.

        `store_address` is the host and port of rank 0's store, or None if the gang has one rank.

        Raises:
            ConfigError: the config or a checkpoint cannot be served; the message names the setting.
            LoadError: any other failure.
        """
        self._load_cpu_time.use_current_thread()
        # The ranks of a node share its cores, but for one, which is left for the replica.
        threads = config.num_threads or max(1, (len(os.sched_getaffinity(0)) - 1) // self._ranks_on_node)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # torch reads it when imported; Ray has set it to the actor's CPUs
        interface, gpus = choose_interface(node_address()), reserved_gpus()
        hide_other_gpus(gpus)
        rank_config = config.model_copy(update={"num_threads": threads})
        try:
            rendezvous = (
                None if store_address is None else self._from_factory_module("Rendezvous")(*store_address, self._epoch)
            )
            build = self._from_factory_module(self._factory.partition(":")[2])
            engine: StepEngine = run_in_temporary_thread(
                lambda: build(rank_config, self._rank, rendezvous, self._store)
            )
        except ConfigError:
            raise
        except Exception as error:
            logger.exception("rank %d could not load", self._rank)
            raise LoadError(f"{type(error).__name__}: {error}", failure_kind_of(error)) from None
        node: str = ray.get_runtime_context().get_node_id()
        info = replace(engine.info(), world=self._world, pid=os.getpid(), node=node, gpus=gpus, interface=interface)
        tune_gil_and_gc()
        self._engine_loop = EngineLoop(engine, self._rank, self._world)
        self._engine_loop.start()
        Thread(target=self._prepare_grammars, args=(engine,), name="grammars", daemon=True).start()
        return info

    @ray.method(concurrency_group="commands")
    def put(self, commands: Commands) -> None:
        """Pass commands to the loop, in the order of the calls. In requests, the names of grammars that `read_grammar`
        got are replaced by the grammars.
        """
        self._running_loop.put(self._grammars.resolve_names(commands))

    @ray.method(concurrency_group="grammars")
    def read_grammar(self, name: str, grammar: str) -> str:
        """Read a compiled grammar while steps go on. Return why the grammar cannot be used, or an empty string if it
        can. Afterwards a request with the grammar's `name` may be submitted to the leader of this rank's group.
        """
        # On Linux this sets the priority of this thread only. The thread does nothing but read grammars.
        os.setpriority(os.PRIO_PROCESS, 0, GRAMMAR_THREAD_NICENESS)
        self._grammars.add(name, grammar)
        try:
            self._running_loop.engine.read_grammar(grammar)
        except ValueError as error:
            return str(error)
        except Exception as error:  # must end this request only, not the whole gang
            logger.exception("rank %d could not read a grammar", self._rank)
            return f"{type(error).__name__}: {error}"
        return ""

    def _prepare_grammars(self, engine: StepEngine) -> None:
        """Prepare the engine for grammars while steps go on; otherwise the first request with a grammar would wait."""
        os.setpriority(os.PRIO_PROCESS, 0, GRAMMAR_THREAD_NICENESS)  # sets the priority of this thread only, on Linux
        try:
            engine.prepare_grammars()
        except ConfigError as error:
            logger.info("rank %d: no output can be held to a grammar: %s", self._rank, error)
        except Exception:  # the first request with a grammar fails with the same error
            logger.exception("rank %d could not prepare for grammars", self._rank)

    @ray.method(concurrency_group="outputs")
    def outputs(self) -> Iterator[tuple[StepItem, ...]]:
        """Stream the items of the steps until the loop ends; several come at once if the reader is slower than the
        steps.
        """
        loop = self._running_loop
        while (items := loop.drain()) or not loop.has_ended:
            if items:
                yield tuple(items)

    @ray.method(concurrency_group="end")
    def end(self) -> Failure | None:
        """Wait for the end of the loop. Return the failure that ended the loop, or None if the loop was stopped."""
        return self._running_loop.wait()

    @ray.method(concurrency_group="heartbeat")
    def heartbeat(self) -> Heartbeat:
        """Return the rank's heartbeat, without waiting for a step. During loading, use of the CPU and reads from disk
        count as progress.
        """
        if self._engine_loop is not None:
            return self._engine_loop.heartbeat()
        self._load_progress.update(disk_waits())
        return Heartbeat(self._rank, 0, True, self._load_progress.idle_s, 0, "load")

    @ray.method(concurrency_group="control")
    def metrics(self) -> list[bytes]:
        """Return the rank's metrics, serialised. If `keep_serving_sample` was called, the replica's metrics follow."""
        rank_sample = self._running_loop.engine.metrics.serialize()
        return [rank_sample] if self._replica_sample is None else [rank_sample, self._replica_sample]

    @ray.method(concurrency_group="commands")
    def keep_serving_sample(self, sample: bytes) -> None:
        """Keep the replica's own metrics, serialised, so that other replicas can read them here."""
        self._replica_sample = sample

    @ray.method(concurrency_group="control")
    def stop(self) -> bool:
        """End the loops of all ranks after a step. Return whether this rank's loop ended in time, or never began."""
        return self._engine_loop is None or self._engine_loop.stop()

    @property
    def _running_loop(self) -> EngineLoop:
        if self._engine_loop is None:
            raise RuntimeError(f"rank {self._rank} has no engine yet; call load first")
        return self._engine_loop

    def _from_factory_module(self, name: str) -> Any:
        """Return the object `name` of the factory's module. If the module lacks it, take `cluster.distributed.mesh`."""
        module = importlib.import_module(self._factory.partition(":")[0])
        return getattr(module, name) if hasattr(module, name) else getattr(importlib.import_module(MESH_MODULE), name)
