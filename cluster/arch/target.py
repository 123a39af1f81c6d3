"""What a target is, from its config.json and generation_config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.arch.keys import Keys, dtype_of, family_of, read_json
from cluster.config import ConfigError

TARGET_FAMILIES = ("LlamaForCausalLM",)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding in the half-split (neox) layout. `llama3` holds (factor, low, high, original length) or None."""

    theta: float
    llama3: tuple[float, float, float, int] | None = None


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """Sizes of one decoder layer: attention heads of `head_dim`, and a gated MLP of `intermediate` (SwiGLU)."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def qkv_rows(self) -> int:
        """Rows of the packed q, k, v weight."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class TargetArch:
    """A target: `num_layers` equal layers over a vocabulary, and how it ends a text."""

    family: str
    vocab_size: int
    num_layers: int
    layer: LayerGeometry
    rope: Rope
    tied: bool
    max_position: int
    dtype: str
    eos_token_ids: tuple[int, ...]

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.layer.hidden


def read_target(folder: str) -> TargetArch:
    """The target in `folder`, from config.json and generation_config.json."""
    keys = Keys(read_json(folder, "config.json"), folder)
    return TargetArch(
        family=family_of(keys, TARGET_FAMILIES, "target"),
        vocab_size=keys.integer("vocab_size"),
        num_layers=keys.integer("num_hidden_layers"),
        layer=geometry_of(keys),
        rope=rope_of(keys),
        tied=keys.flag("tie_word_embeddings"),
        max_position=keys.integer("max_position_embeddings", 2048),
        dtype=dtype_of(keys.data),
        eos_token_ids=_eos(folder, keys.data),
    )


def rope_of(keys: Keys) -> Rope:
    """The rotary embedding that the config asks for."""
    scaling = keys.section("rope_parameters" if keys.data.get("rope_parameters") else "rope_scaling")
    kind = scaling.data.get("rope_type") or scaling.data.get("type") or "default"
    theta = scaling.number("rope_theta", keys.number("rope_theta", 10000.0))
    if kind == "default":
        return Rope(theta)
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        missing = [name for name in names if name not in scaling.data]
        if missing:
            raise ConfigError(f"config.json of {keys.where!r}: rope_scaling llama3 lacks {missing}")
        factor, low, high, length = (scaling.number(name, 1.0) for name in names)
        return Rope(theta, (factor, low, high, int(length)))
    raise ConfigError(
        f"config.json of {keys.where!r}: rope_scaling type {kind!r} is not served; known: default, llama3"
    )


def geometry_of(keys: Keys) -> LayerGeometry:
    """The sizes of one layer."""
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    kv_heads = keys.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(f"config.json of {keys.where!r}: num_key_value_heads {kv_heads} must divide {heads} heads")
    if keys.data.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"config.json of {keys.where!r}: hidden_act must be silu, got {keys.data['hidden_act']!r}")
    return LayerGeometry(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=keys.integer("head_dim", max(1, hidden // heads)),
        intermediate=keys.integer("intermediate_size"),
        eps=keys.number("rms_norm_eps", 1e-6),
        attention_bias=keys.flag("attention_bias"),
        mlp_bias=keys.flag("mlp_bias"),
    )


def _eos(folder: str, config: Mapping[str, Any]) -> tuple[int, ...]:
    """End tokens: generation_config.json's where it names some, else config.json's."""
    found: tuple[int, ...] = ()
    generation = (
        read_json(folder, "generation_config.json") if (Path(folder) / "generation_config.json").is_file() else {}
    )
    for data in (config, generation):
        ids = data.get("eos_token_id")
        if ids is None:
            continue
        ids = ids if isinstance(ids, list) else [ids]
        if any(type(i) is not int or i < 0 for i in ids):
            raise ConfigError(f"config of {folder!r}: eos_token_id must be token ids, got {ids!r}")
        found = tuple(ids)
    return found
