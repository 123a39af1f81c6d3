"""Load models once, and build several engines on them that differ in tree shape and capture settings."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from cluster.arch.resolve import ResolvedConfig, resolve_models
from cluster.config import EngineConfig
from cluster.engine import Engine
from cluster.engine.build import allocate_memory, engine_of, prepare_single_rank
from cluster.engine.memory import RankMemory
from cluster.engine.models import device_facts
from cluster.spec.draft import Draft

WrapDraft = Callable[[Draft, ResolvedConfig], Draft]
"""A function that takes an engine's draft and returns the draft to use in its place. If the engine's draft has several
layers, each with its own runner, prefix reuse must be off: such a draft keeps hidden states outside its KV pools, and
these are not copied along with KV pages if the draft is wrapped.
"""


class LoadedModels:
    """The loaded models of a single rank: their `device`, the `dtype` that they compute in, the target's `vocab_size`,
    and descriptions of the kernels and of how quantised weights are stored in memory.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Load the models of `config`. No engine made later may have a deeper tree or a longer context than `config`.

        Raises:
            ConfigError: as `build_engine`.
        """
        overrides = {"max_running_requests": 1, "max_total_tokens": 4 * max(config.page_size, 128), "capture": "off"}
        self._prepared = prepare_single_rank(config.model_copy(update=overrides))
        models = self._prepared.models
        self.device, self.vocab_size = self._prepared.device, self._prepared.resolved.target.vocab_size
        self.dtype, self.kernels_description, self.quantised_descriptions = (
            models.dtype,
            models.kernels.description,
            models.quantised,
        )

    def engine(
        self, config: EngineConfig, wrap: WrapDraft | None = None, cached_prompts: Sequence[Sequence[int]] = ()
    ) -> tuple[Engine, ResolvedConfig]:
        """Return an engine of `config` on these models, and the resolved config. `wrap`, if given, replaces the
        engine's draft. The prefix cache initially contains the prompts `cached_prompts`; their K and V are random.

        Raises:
            ConfigError: as `build_engine`.
        """
        loaded = self._prepared
        resolved = resolve_models(config, *device_facts(config, loaded.device))
        models = replace(loaded.models, resolved=resolved, drafts=loaded.models.drafts[: resolved.num_draft_runners])
        memory = allocate_memory(models, loaded.mesh, loaded.device, loaded.device_memory, loaded.weights)
        adapted = replace(loaded, models=models, memory=memory)
        draft = adapted.draft()
        engine = engine_of(adapted, draft if wrap is None else wrap(draft, resolved))
        if cached_prompts:
            _cache_prompts(memory, cached_prompts)
        return engine, resolved


def _cache_prompts(memory: RankMemory, prompts: Sequence[Sequence[int]]) -> None:
    for pools in (memory.target_runner.pools, *(runner.pools for runner in memory.draft_runner_list)):
        for pool in pools.all:
            pool.kv.normal_()
    for tokens in prompts:
        lease = memory.cache.open(tokens, len(tokens))
        assert lease is not None, "the cache has pages for all prompts"
        memory.cache.close(lease, tokens, len(tokens))
