"""Whether the models fit the ranks and each other, told from the heads of the checkpoints; nothing is loaded."""

from cluster.arch.draft import DraftSpec, read_draft
from cluster.arch.draft.sample import read_sample
from cluster.arch.layer import LayerGeometry
from cluster.arch.read import read_target
from cluster.arch.safetensors.stored import stored_shapes
from cluster.arch.safetensors.tensors import check_tensors
from cluster.arch.target import TargetArch
from cluster.config import DEFAULT_NUM_STEPS, ConfigError, EngineConfig, tree_shape


def check_models(config: EngineConfig) -> None:
    """Refuse models that cannot run as configured: a tree that the draft cannot fill, a target with a wrong
    tensor, a draft that does not fit it, a malformed sample, heads or an MLP that cannot be split over the ranks.

    Raises:
        ConfigError: naming the setting and the remedy.
    """
    target = read_target(config.model_path)
    check_tensors(config.model_path, target)
    config = settle(config, target)
    shape = tree_shape(config)
    geometries = {"the target": min(target.layers, key=lambda layer: layer.mlp_columns)}
    folder = config.speculative_draft_model_path
    if folder is not None:
        draft = draft_of(config, folder, target)
        read_sample(folder, draft.vocab_size, draft.hidden)
        if shape.topk > draft.draft_vocab_size:
            raise ConfigError(
                f"speculative_eagle_topk {shape.topk} is more than the draft's vocabulary of {draft.draft_vocab_size}; "
                "lower it"
            )
        if config.speculative_draft_parallel == "sharded":
            geometries["the draft"] = draft.layer
    for name, geometry in geometries.items():
        hint = ", or set speculative_draft_parallel to replicated" if name == "the draft" else ""
        try:
            check_heads(geometry, config.tp_size // config.attn_dp_size)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}{hint}") from None
        if geometry.mlp_columns < config.tp_size:
            raise ConfigError(
                f"{name}: an MLP of {geometry.mlp_columns} columns cannot be split over tp_size {config.tp_size}; "
                f"lower tp_size{hint}"
            )


def draft_of(config: EngineConfig, folder: str, target: TargetArch) -> DraftSpec:
    """The draft in `folder` as the settings have it, from its headers.

    Raises:
        ConfigError: as `read_draft`.
    """
    given = (config.speculative_draft_overrides, config.speculative_token_map)
    return read_draft(folder, stored_shapes(folder), target, *given)


def settle(config: EngineConfig, target: TargetArch) -> EngineConfig:
    """The config with what the draft's folder decides: the algorithm, and a depth that its layers can make.

    Raises:
        ConfigError: a `speculative_algorithm` that is not the draft's.
    """
    folder = config.speculative_draft_model_path
    if folder is None:
        return config
    draft, given = draft_of(config, folder, target), config.speculative_algorithm
    fits = ("NEXTN", "EAGLE") if draft.kind == "mtp" else (draft.algorithm,)
    if given is not None and given not in fits:
        raise ConfigError(
            f"speculative_algorithm {given} does not fit the draft, which is {draft.dialect}; set it to {fits[0]} or "
            "leave it out"
        )
    found: dict[str, object] = {"speculative_algorithm": given or fits[0]}
    if config.speculative_num_steps is None and 1 < draft.runners < DEFAULT_NUM_STEPS:
        found["speculative_num_steps"] = draft.runners
    return config.model_copy(update=found)


def check_heads(geometry: LayerGeometry, ranks: int) -> None:
    """Refuse attention that cannot be split over so many ranks; KV heads are replicated where there are fewer.

    Raises:
        ConfigError: with both numbers of heads.
    """
    heads, kv_heads = geometry.heads, geometry.kv_heads
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise ConfigError(
            f"{heads} attention heads and {kv_heads} KV heads cannot be split over {ranks} ranks of an "
            "attention group (tp_size / attn_dp_size); lower tp_size or raise attn_dp_size"
        )
