"""Architectures read from `config.json`: what a target is, and the one frozen `DraftSpec` of a draft.

Every width, layer number and vocabulary size that speculation needs is resolved here, once, from the config and the
tensor shapes together; nobody else reads those keys.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.config import ConfigError

Shapes = Mapping[str, tuple[int, ...]]
TARGET_FAMILIES = ("LlamaForCausalLM",)
DRAFT_FAMILIES = ("LlamaForCausalLMEagle3",)


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


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """An EAGLE-3 draft, resolved.

    `aux_boundaries[j]` is the residual stream *entering* target layer j (so `num_layers` means before the final norm);
    `fc_in` is the width of the target hidden that the draft takes at extend, `hidden` its own recurrent width.
    """

    family: str
    num_layers: int
    layer: LayerGeometry
    rope: Rope
    target_hidden: int
    aux_boundaries: tuple[int, ...]
    use_aux_hidden_state: bool
    draft_vocab_size: int
    vocab_size: int
    norm_output: bool
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    own_embed: bool
    own_head: bool
    dtype: str

    @property
    def num_aux(self) -> int:
        """How many aux hidden states are concatenated, low to high."""
        return len(self.aux_boundaries)

    @property
    def hidden(self) -> int:
        """The draft's recurrent width H."""
        return self.layer.hidden

    @property
    def fc_in(self) -> int:
        """A: width of the target's hidden at extend, `num_aux * target_hidden` when aux hidden states are used."""
        return self.num_aux * self.target_hidden if self.use_aux_hidden_state else self.target_hidden


def read_json(folder: str, name: str) -> dict[str, Any]:
    """One JSON object of a checkpoint folder.

    Raises:
        ConfigError: the folder or file is missing, or does not hold a JSON object.
    """
    path = Path(folder) / name
    if not Path(folder).is_dir():
        raise ConfigError(f"model folder {folder!r} does not exist; give a local folder with config.json")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{name} is missing in {folder!r}; give the folder of a checkpoint") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{name} in {folder!r} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{name} in {folder!r} must hold a JSON object")
    return data


class _Keys:
    """A config's keys with errors that name file and key."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data, self.where = data, where

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.data.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"config.json of {self.where!r}: {key} must be a positive integer, got {value!r}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.data.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise ConfigError(f"config.json of {self.where!r}: {key} must be a positive number, got {value!r}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.data.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ConfigError(f"config.json of {self.where!r}: {key} must be true or false, got {value!r}")
        return value

    def section(self, key: str) -> "_Keys":
        value = self.data.get(key) or {}
        if not isinstance(value, Mapping):
            raise ConfigError(f"config.json of {self.where!r}: {key} must be an object, got {value!r}")
        return _Keys(value, self.where)

    def numbers(self, key: str) -> list[int] | None:
        value = self.data.get(key)
        if value is None or (isinstance(value, list) and all(type(i) is int for i in value)):
            return value
        raise ConfigError(f"config.json of {self.where!r}: {key} must be a list of integers, got {value!r}")


def _family(keys: _Keys, known: tuple[str, ...], what: str) -> str:
    names = keys.data.get("architectures") or []
    for name in names:
        if name in known:
            return str(name)
    raise ConfigError(f"config.json of {keys.where!r}: architectures {names} is no {what} served here; known: {known}")


def _rope(keys: _Keys) -> Rope:
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


def _geometry(keys: _Keys) -> LayerGeometry:
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


def _dtype(data: Mapping[str, Any]) -> str:
    name = data.get("dtype") or data.get("torch_dtype") or "bfloat16"
    return str(name).removeprefix("torch.")


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


def read_target(folder: str) -> TargetArch:
    """The target in `folder`, from config.json and generation_config.json."""
    keys = _Keys(read_json(folder, "config.json"), folder)
    return TargetArch(
        family=_family(keys, TARGET_FAMILIES, "target"),
        vocab_size=keys.integer("vocab_size"),
        num_layers=keys.integer("num_hidden_layers"),
        layer=_geometry(keys),
        rope=_rope(keys),
        tied=keys.flag("tie_word_embeddings"),
        max_position=keys.integer("max_position_embeddings", 2048),
        dtype=_dtype(keys.data),
        eos_token_ids=_eos(folder, keys.data),
    )


def aux_boundaries(keys: Mapping[str, Any], target_layers: int, where: str) -> tuple[int, ...]:
    """Which residual-stream boundaries the draft reads (draft-checkpoints appendix A3).

    The count: `num_aux_hidden_states`, then the length of `eagle_config.eagle_aux_hidden_state_layer_ids`, then of the
    top-level list, then 3. Ids in `eagle_config` number the layer whose *output* is read, so boundary id + 1; a
    top-level list (speculators) numbers boundaries. Without ids and with 3: (2, L // 2, L - 3), EAGLE-3's own choice.
    """
    top_level = _Keys(keys, where)
    outputs = top_level.section("eagle_config").numbers("eagle_aux_hidden_state_layer_ids")
    top = top_level.numbers("eagle_aux_hidden_state_layer_ids")
    if outputs is not None:
        ids = [i + 1 for i in outputs]
    elif top is not None:
        ids = top
    else:
        ids = [2, target_layers // 2, target_layers - 3]
    count = keys.get("num_aux_hidden_states")
    if count is not None and count != len(ids):
        raise ConfigError(
            f"config.json of {where!r}: num_aux_hidden_states is {count} but {len(ids)} aux layers are named; "
            "list them in eagle_config.eagle_aux_hidden_state_layer_ids"
        )
    if not ids or sorted(set(ids)) != ids or ids[0] < 0 or ids[-1] > target_layers:
        raise ConfigError(
            f"config.json of {where!r}: eagle_aux_hidden_state_layer_ids give boundaries {ids}, which must ascend "
            f"within the target's 0 to {target_layers}"
        )
    return tuple(ids)


def read_draft(folder: str, shapes: Shapes, target: TargetArch) -> DraftSpec:
    """The EAGLE-3 draft in `folder`, from config.json and its tensors' shapes, checked against each other and `target`.

    `shapes` carries normalised names (`layers.0.*`, `fc_norm.i`, no `model.` prefix).

    Raises:
        ConfigError: config and tensors disagree, or the draft does not fit the target; the message gives both numbers.
    """
    keys = _Keys(read_json(folder, "config.json"), folder)
    family = _family(keys, DRAFT_FAMILIES, "draft")
    geometry = _geometry(keys)
    use_aux = keys.section("eagle_config").flag("use_aux_hidden_state", True)
    target_hidden = keys.integer("target_hidden_size", target.hidden)
    if target_hidden != target.hidden:
        raise ConfigError(
            f"draft {folder!r} does not fit the target: target_hidden_size {target_hidden} against {target.hidden}"
        )
    if keys.integer("vocab_size") != target.vocab_size:
        raise ConfigError(
            f"draft {folder!r} does not fit the target: vocab_size {keys.data['vocab_size']} against "
            f"{target.vocab_size}"
        )
    boundaries = aux_boundaries(keys.data, target.num_layers, folder) if use_aux else (target.num_layers,)
    spec = DraftSpec(
        family=family,
        num_layers=keys.integer("num_hidden_layers", 1),
        layer=geometry,
        rope=_rope(keys),
        target_hidden=target_hidden,
        aux_boundaries=boundaries,
        use_aux_hidden_state=use_aux,
        draft_vocab_size=keys.integer("draft_vocab_size", target.vocab_size),
        vocab_size=target.vocab_size,
        norm_output=keys.flag("norm_output"),
        norm_before_residual=keys.flag("norm_before_residual"),
        norm_before_fc="input_norm.weight" in shapes,
        fc_norm="fc_norm.0.weight" in shapes,
        own_embed="embed_tokens.weight" in shapes,
        own_head="lm_head.weight" in shapes,
        dtype=_dtype(keys.data),
    )
    if use_aux and "fc.weight" in shapes and shapes["fc.weight"] != (spec.hidden, spec.fc_in):
        raise ConfigError(
            f"draft {folder!r}: fc.weight is {list(shapes['fc.weight'])} but {spec.num_aux} aux hidden states of "
            f"{target_hidden} make it [{spec.hidden}, {spec.fc_in}]; correct num_aux_hidden_states or the layer ids"
        )
    if not use_aux and spec.hidden != target.hidden:
        raise ConfigError(
            f"draft {folder!r}: use_aux_hidden_state is false, so it takes the target's hidden of {target.hidden} as "
            f"it is, but its hidden_size is {spec.hidden}"
        )
    if not spec.own_embed and spec.hidden != target.hidden:
        raise ConfigError(
            f"draft {folder!r}: hidden_size {spec.hidden} differs from the target's {target.hidden}, so it cannot "
            "share the target's embedding; the draft's checkpoint must hold embed_tokens.weight"
        )
    if not spec.own_head and (spec.draft_vocab_size != target.vocab_size or spec.hidden != target.hidden):
        raise ConfigError(
            f"draft {folder!r}: without lm_head.weight it shares the target's head, which needs draft_vocab_size "
            f"{target.vocab_size} and hidden_size {target.hidden}"
        )
    return spec
