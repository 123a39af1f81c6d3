"""The facts of an engine: all values that follow from its settings, the headers of its checkpoints and its device.

Facts are resolved once. No weights are loaded. `resolve_models` checks that target and draft fit each other.
`check_models`, which `aerie serve` calls before it starts any process, also checks that they can be split over the
ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from cluster.arch.draft import DraftSpec, read_draft
from cluster.arch.draft.sample import Sample, read_sample
from cluster.arch.dtypes import cache_dtype, compute_dtype
from cluster.arch.layer import LayerGeometry, Moe, moe_of
from cluster.arch.read import read_target
from cluster.arch.safetensors.stored import stored_shapes
from cluster.arch.safetensors.tensors import check_tensors
from cluster.arch.target import TargetArch
from cluster.config import MAX_CONTEXT_LENGTH, ConfigError, EngineConfig
from cluster.config.resolved import UNLIMITED, ResolvedSettings
from cluster.config.tree_shape import DEFAULT_NUM_STEPS

FORCED_ROWS = {"cpu": 4, "cuda": 256}
"""By device, the most rows of an attention group (ranks that serve the same requests) in a step for tree nodes that
grammars add. On a GPU these rows cost almost nothing.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig(ResolvedSettings):
    """All facts (values that follow from the settings, the checkpoints and the device) of an engine.

    `settings` are completed by values that follow from the draft. `device` is `cpu` or `cuda`. `draft` is None without
    a draft model. `sample` is the recorded output in the draft's folder (`draft_sample.json`), or None if there is no
    such file. `dtype` is what models compute in, `kv_cache_dtype` what KV caches hold. `context_length` is the most
    tokens of one request. A step spends up to `forced_rows` rows of an attention group (ranks that serve the same
    requests) on tree nodes that grammars add. The host runs `steps_ahead` steps ahead of the device: 1 on a GPU with
    the setting `overlap`, otherwise 0.
    """

    device: str
    target: TargetArch
    draft: DraftSpec | None
    sample: Sample | None
    dtype: str
    kv_cache_dtype: str
    context_length: int
    forced_rows: int
    steps_ahead: int

    @property
    def experts(self) -> tuple[Moe | None, Moe | None]:
        """The experts of the target and of the draft. A model without experts has None."""
        draft_layers = () if self.draft is None else (layer.geometry for layer in self.draft.layers)
        return moe_of(self.target.layers), moe_of(draft_layers)

    @property
    def num_draft_runners(self) -> int:
        """The number of draft runners (a runner is a model with its KV pool): one that drafts every level of the tree,
        or one per level. 0 without a draft.
        """
        return 0 if self.draft is None else min(self.draft.runners, max(1, self.shape.drafted_shape.num_steps))

    def with_limits(self, max_requests: int, max_prompt_rows: int) -> Self:
        """Return the facts for at most `max_requests` running requests, and `max_prompt_rows` prompt rows in a step."""
        settings = self.settings.model_copy(
            update={"max_running_requests": max_requests, "chunked_prefill_size": max_prompt_rows}
        )
        return replace(
            self,
            settings=settings,
            chunk_rows=max_prompt_rows,
            mixed_chunk_rows=min(self.mixed_chunk_rows, max_prompt_rows),
        )


def resolve_models(
    config: EngineConfig, device: str = "cpu", has_c_kernels: Callable[[], bool] = lambda: True
) -> ResolvedConfig:
    """Return the facts of an engine with these settings. A rank gives its `device`, and `has_c_kernels`, which returns
    whether the kernels of a CPU are in C. A caller that only checks models before ranks start may leave both at their
    defaults.

    Raises:
        ConfigError: a folder holds no model served here, the draft does not fit the target, the draft cannot fill the
            tree, `speculative_algorithm` is not the draft's, or the sample is malformed.
    """
    target, folder = read_target(config.model_path), config.speculative_draft_model_path
    draft = sample = None
    if folder is not None:
        overrides, token_map = config.speculative_draft_overrides, config.speculative_token_map
        draft = read_draft(folder, stored_shapes(folder), target, overrides, token_map)
        config = _complete_settings(config, draft)
        sample = read_sample(folder, draft.vocab_size, draft.hidden)
    if config.speculative_mode is None:  # on a GPU adaptive trees are not faster
        config = config.model_copy(update={"speculative_mode": "adaptive" if device == "cpu" else "fixed"})
    dtype = compute_dtype(target, config.dtype, device, has_c_kernels)
    forced_rows = config.speculative_forced_rows
    context_length = config.context_length or min(target.max_position, MAX_CONTEXT_LENGTH)
    resolved = ResolvedConfig.from_settings(
        config,
        # Requests share the rows of a step only with kernels in C. On a GPU the effect was not measured. Attention by
        # torch would copy the cells of every tree node, even of nodes that a step does not verify: these cells hold
        # what an earlier step left.
        share_rows=device == "cpu" and config.speculative_mode == "adaptive" and has_c_kernels(),
        device=device,
        target=target,
        draft=draft,
        sample=sample,
        dtype=dtype,
        kv_cache_dtype=cache_dtype(config.kv_cache_dtype, dtype),
        context_length=context_length,
        forced_rows=FORCED_ROWS[device] if forced_rows is None else forced_rows,
        steps_ahead=int(config.overlap and device == "cuda"),
    )
    # Memory is measured for a step with `chunk_rows` prompt rows, so this number must be finite. If the settings do not
    # limit it, it becomes the length of the longest prompt.
    max_rows = context_length if resolved.chunk_rows == UNLIMITED else config.max_running_requests * context_length
    resolved = replace(
        resolved,
        chunk_rows=min(resolved.chunk_rows, max_rows),
        mixed_chunk_rows=min(resolved.mixed_chunk_rows, max_rows),
    )
    topk, steps = resolved.shape.topk, resolved.shape.drafted_shape.num_steps
    if draft is not None and topk > draft.draft_vocab_size:
        raise ConfigError(
            f"speculative_eagle_topk {topk} is more than the draft's vocabulary of {draft.draft_vocab_size}; lower it"
        )
    if draft is not None and 1 < draft.runners < steps:
        raise ConfigError(
            f"speculative_num_steps {steps} is more than the {draft.runners} MTP layers of {folder!r}, each of which "
            f"makes one level; lower it to {draft.runners}"
        )
    return resolved


def check_models(
    config: EngineConfig, device: str = "cpu", has_c_kernels: Callable[[], bool] = lambda: True
) -> ResolvedConfig:
    """Return what `resolve_models` returns, after two more checks: the target's headers hold every tensor, and heads,
    MLPs and experts can be split over the ranks.

    Raises:
        ConfigError: a check failed; the message names the setting and the remedy.
    """
    resolved = resolve_models(config, device, has_c_kernels)
    check_tensors(config.model_path, resolved.target)
    target_moe, draft_moe = resolved.experts
    check_expert_shards(config.ep_size, target_moe, draft_moe if resolved.draft_is_sharded else None)
    _check_split(resolved, "the target", resolved.target.layers)
    reads_target_kv = resolved.draft is not None and not resolved.draft.keeps_kv
    if reads_target_kv and not resolved.draft_is_sharded and resolved.group_size > 1:
        raise ConfigError(
            "speculative_draft_parallel replicated is not possible with this draft: it reads the target's keys and "
            "values, of which each rank has some heads; set it to sharded"
        )
    if resolved.draft is not None and resolved.draft_is_sharded:
        hint = ", or set speculative_draft_parallel to replicated"
        _check_split(resolved, "the draft", [layer.geometry for layer in resolved.draft.layers], hint)
    return resolved


def check_heads(geometry: LayerGeometry, ranks: int) -> None:
    """Raise if attention cannot be split over `ranks` ranks. If there are fewer KV heads than ranks, several ranks hold
    the same KV head.

    Raises:
        ConfigError: the heads cannot be divided; the message gives both numbers.
    """
    heads, kv_heads = geometry.heads, geometry.kv_heads
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise ConfigError(
            f"{heads} attention heads and {kv_heads} KV heads cannot be split over {ranks} ranks of an "
            "attention group (tp_size / attn_dp_size); lower tp_size or raise attn_dp_size"
        )


def check_expert_shards(ep_size: int, *moes: Moe | None) -> None:
    """Raise if some of the `ep_size` expert-parallel shards would hold no expert. `moes` has None for a model without
    experts.

    Raises:
        ConfigError: `ep_size` is too large; the message says whether to lower it or set it to 1.
    """
    fewest = min((moe.experts for moe in moes if moe is not None), default=1)
    if fewest == 1 < ep_size:
        raise ConfigError(f"ep_size {ep_size} is for experts, and no model that is sharded has several; set it to 1")
    if fewest < ep_size:
        raise ConfigError(f"ep_size {ep_size} leaves ranks without any of {fewest} experts; lower it")


def _complete_settings(config: EngineConfig, draft: DraftSpec) -> EngineConfig:
    """Return the settings with the draft's algorithm. If `speculative_num_steps` is not set, and the draft has more
    than one MTP layer but fewer than `DEFAULT_NUM_STEPS`, it becomes the number of MTP layers.

    Raises:
        ConfigError: the setting `speculative_algorithm` does not fit the draft.
    """
    configured = config.speculative_algorithm
    allowed = ("NEXTN", "EAGLE") if draft.algorithm == "NEXTN" else (draft.algorithm,)
    if configured is not None and configured not in allowed:
        raise ConfigError(
            f"speculative_algorithm {configured} does not fit the draft, which is {draft.dialect}; set it to "
            f"{allowed[0]} or leave it out"
        )
    updates: dict[str, object] = {"speculative_algorithm": configured or allowed[0]}
    if config.speculative_num_steps is None and 1 < draft.runners < DEFAULT_NUM_STEPS:
        updates["speculative_num_steps"] = draft.runners
    return config.model_copy(update=updates)


def _check_split(resolved: ResolvedConfig, name: str, layers: Sequence[LayerGeometry], hint: str = "") -> None:
    tp, ep, group = resolved.settings.tp_size, resolved.settings.ep_size, resolved.group_size
    for layer in layers:
        try:
            check_heads(layer, group)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}{hint}") from None
        splits = [("an MLP", layer.intermediate, tp, f"tp_size {tp}; lower tp_size")]
        if (moe := layer.moe) is not None:
            divisor = f"tp_size {tp}" if ep == 1 else f"tp_size / ep_size, {tp // ep}"
            splits = [("an expert", moe.intermediate, tp // ep, f"{divisor}; lower tp_size or raise ep_size")]
            if moe.shared and ep == 1:
                splits.append(("a shared expert", moe.shared, tp, f"tp_size {tp}; lower tp_size"))
            elif moe.shared:
                divisor = f"the {group} ranks of an attention group"
                splits.append(("a shared expert", moe.shared, group, f"{divisor}; lower tp_size or raise attn_dp_size"))
        for part_name, columns, ranks, remedy in splits:
            if columns < ranks:
                raise ConfigError(f"{name}: {part_name} of {columns} columns cannot be split over {remedy}{hint}")
