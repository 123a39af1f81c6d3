"""Load models once, and build several engines on them that differ in tree shape and capture settings."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from cluster.arch.resolve import ResolvedConfig, resolve_models
from cluster.config import EngineConfig
from cluster.engine import Engine
from cluster.engine.build import allocated, engine_of, prepare_alone
from cluster.engine.memory import RankMemory
from cluster.engine.models import device_facts
from cluster.spec.draft import Draft

Wrap = Callable[[Draft, ResolvedConfig], Draft]
"""Maps an engine's draft to the draft to use in its place. Prefix reuse must be off: the state that a multi-layer draft
keeps outside its pools is not copied with pages if the draft is wrapped."""


class Loaded:
    """The loaded models of a single rank: their `device`, the `dtype` that they compute in, the target's `vocab_size`,
    and descriptions of their `kernels` and of how `quantised` weights are stored in memory.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Load the models of `config`. Its tree must be as deep, and its context as long, as those of any later engine.

        Raises:
            ConfigError: as `build_engine`.
        """
        small = {"max_running_requests": 1, "max_total_tokens": 4 * max(config.page_size, 128), "capture": "off"}
        self._prepared = prepare_alone(config.model_copy(update=small))
        models = self._prepared.models
        self.device, self.vocab_size = self._prepared.device, self._prepared.resolved.target.vocab_size
        self.dtype, self.kernels, self.quantised = models.dtype, models.kernels.about, models.quantised

    def engine(
        self, config: EngineConfig, wrap: Wrap | None = None, held: Sequence[Sequence[int]] = ()
    ) -> tuple[Engine, ResolvedConfig]:
        """Return an engine of `config` on these models, and the resolved models. `wrap` replaces the engine's draft.
        The prefix cache initially contains the prompts `held`; their KV cells are random numbers.

        Raises:
            ConfigError: as `build_engine`.
        """
        prepared = self._prepared
        resolved = resolve_models(config, *device_facts(config, prepared.device))
        models = replace(prepared.models, resolved=resolved, drafts=prepared.models.drafts[: resolved.runners])
        memory = allocated(models, prepared.mesh, prepared.device, prepared.device_memory, prepared.weights)
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
