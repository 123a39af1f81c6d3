"""Models that are loaded once, and engines on them that differ in their trees and in what is captured."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from cluster.arch.resolve import ResolvedModels, resolve_models
from cluster.config import EngineConfig
from cluster.engine import Engine
from cluster.engine.build import allocated, engine_of, prepare_alone
from cluster.engine.memory import RankMemory
from cluster.spec.draft import Draft

Wrap = Callable[[Draft, ResolvedModels], Draft]
"""What makes another draft of an engine's own. Prefix reuse is to be off: what a draft of several layers keeps beside
its pools is not copied with pages when it is wrapped."""


class Loaded:
    """The models of a world of one."""

    def __init__(self, config: EngineConfig) -> None:
        """Load the models of `config`, which has the deepest tree and the longest context of all engines to come.

        Raises:
            ConfigError: as `build_engine`.
        """
        small = {"max_running_requests": 1, "max_total_tokens": 4 * max(config.page_size, 128), "capture": "off"}
        self._prepared = prepare_alone(config.model_copy(update=small))

    @property
    def device(self) -> torch.device:
        """Where the models are."""
        return self._prepared.device

    @property
    def dtype(self) -> torch.dtype:
        """What they compute in."""
        return self._prepared.models.dtype

    @property
    def kernels(self) -> str:
        """What they compute with, in words."""
        return self._prepared.models.kernels.about

    @property
    def vocab_size(self) -> int:
        """How many token ids there are."""
        return self._prepared.resolved.target.vocab_size

    @property
    def quantised(self) -> tuple[str, ...]:
        """What became of quantised weights, in words."""
        return self._prepared.models.quantised

    def engine(
        self, config: EngineConfig, wrap: Wrap | None = None, held: Sequence[Sequence[int]] = ()
    ) -> tuple[Engine, ResolvedModels]:
        """An engine of `config` on these models, whose draft is what `wrap` makes of it; and what was resolved. Its
        prefix cache has the prompts `held` from the beginning, with random numbers for their cells.

        Raises:
            ConfigError: as `build_engine`.
        """
        prepared, resolved = self._prepared, resolve_models(config)
        models = replace(prepared.models, resolved=resolved, drafts=prepared.models.drafts[: resolved.runners])
        where = prepared.mesh, prepared.device, prepared.context_length
        memory = allocated(models, *where, prepared.device_memory, prepared.weights)
        own = replace(prepared, models=models, memory=memory)
        draft = own.draft()
        engine = engine_of(own, draft if wrap is None else wrap(draft, resolved))
        if held:
            _remember(memory, held)
        return engine, resolved


def _remember(memory: RankMemory, prompts: Sequence[Sequence[int]]) -> None:
    for pool in (memory.target_runner.pool, *(runner.pool for runner in memory.draft_runner_list)):
        pool.kv.normal_()
    for tokens in prompts:
        lease = memory.cache.open(tokens, len(tokens))
        assert lease is not None, "the cache has room for all of them"
        memory.cache.close(lease, tokens, len(tokens))
