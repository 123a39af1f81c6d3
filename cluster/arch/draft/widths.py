"""Sizes of a draft's layers and vocabulary, read from shapes and config, which must agree."""

import re
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from cluster.arch.draft.facts import FactResolver
from cluster.arch.families.deepseek import deepseek_v3
from cluster.arch.keys import ConfigKeys, Shapes
from cluster.arch.layer import LayerGeometry, geometry_of, sliding_layers, with_sliding_window
from cluster.arch.safetensors.stored import name_on_disk, stored_tensors
from cluster.arch.target import TargetArch
from cluster.config import ConfigError


def count_layers(folder: str, keys: ConfigKeys, shapes: Shapes) -> int:
    """Return the number of layers by the config, 1 by default. The checkpoint must not hold more layers. If its only
    layer is named `midlayer`, the number is 1 whatever the config says, as some configs are copies of the target's.

    Raises:
        ConfigError: a tensor belongs to a later layer; the message names it.
    """
    layer_numbers = {int(match[1]) for name in shapes if (match := re.match(r"layers\.(\d+)\.", name))}
    num_layers = keys.integer("num_hidden_layers", 1)
    if (
        num_layers > 1
        and layer_numbers == {0}
        and any(raw_name.startswith("midlayer.") for _, raw_name, _ in stored_tensors(folder).values())
    ):
        num_layers = 1
    extra_tensors = sorted(
        name for name in shapes if name.startswith(tuple(f"layers.{i}." for i in layer_numbers if i >= num_layers))
    )
    if extra_tensors:
        disk_name = name_on_disk(folder, extra_tensors[0])
        raise ConfigError(f"draft {folder!r} has num_hidden_layers {num_layers} but holds {disk_name!r}")
    return num_layers


def draft_geometry(
    folder: str, keys: ConfigKeys, shapes: Shapes, prefix: str = "layers.0", allow_partial_rotary: bool = False
) -> LayerGeometry:
    """Return the geometry of the layer whose tensors begin with `prefix`. The number of heads comes from the config,
    biases from tensors, head_dim from the config or, if missing there, from `q_proj`. `allow_partial_rotary`: the
    format may rotate only a part of each head.

    Raises:
        ConfigError: config and tensors disagree on a bias.
    """
    if is_latent(shapes, prefix):
        return latent_geometry(keys)
    data: dict[str, Any] = {k: v for k, v in keys.data.items() if k not in ("attention_bias", "mlp_bias")}
    if data.get("model_type") == "llama4_text" and data.get("intermediate_size_mlp"):
        data["intermediate_size"] = data["intermediate_size_mlp"]
    query = shapes.get(f"{prefix}.self_attn.q_proj.weight", ())
    heads = data.get("num_attention_heads")
    if data.get("head_dim") is None and query and isinstance(heads, int) and heads > 0 and query[0] % heads == 0:
        data["head_dim"] = query[0] // heads
    out_bias_name, mlp_bias_name = f"{prefix}.self_attn.o_proj.bias", f"{prefix}.mlp.up_proj.bias"
    has_qkv_bias = f"{prefix}.self_attn.q_proj.bias" in shapes
    is_qwen2 = str(keys.data.get("model_type")) in ("qwen2", "mimo")  # here `attention_bias` means q, k and v only
    bias_means_qkv_only = is_qwen2 and has_qkv_bias and keys.data.get("attention_bias") is True
    return replace(
        geometry_of(ConfigKeys(data, keys.folder), allow_partial_rotary=allow_partial_rotary),
        attention_bias=has_qkv_bias,
        out_bias=out_bias_name in shapes
        if bias_means_qkv_only
        else confirm_flag(folder, keys, "attention_bias", out_bias_name, out_bias_name in shapes),
        qk_norm=any(f"{prefix}.self_attn.{part}_norm.weight" in shapes for part in "qk"),
        mlp_bias=confirm_flag(folder, keys, "mlp_bias", mlp_bias_name, mlp_bias_name in shapes),
    )


def is_latent(shapes: Shapes, prefix: str) -> bool:
    """Whether the layer has a tensor that only latent attention has."""
    return any(
        f"{prefix}.self_attn.{part}.weight" in shapes for part in ("q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj")
    )


def latent_geometry(keys: ConfigKeys, has_dense_mlp: bool = True) -> LayerGeometry:
    """Return the geometry of one layer with latent attention, read from DeepSeek-V3's keys. Its MLP is dense if
    `has_dense_mlp`, otherwise experts.
    """
    data = dict(keys.data) | {"num_hidden_layers": 1, "first_k_dense_replace": int(has_dense_mlp)}
    return deepseek_v3(keys.with_data(data)).layer


def layers_with_windows(
    keys: ConfigKeys, geometry: LayerGeometry, num_layers: int, facts: FactResolver
) -> tuple[LayerGeometry, ...]:
    """Return every layer's geometry. `layer_types` lists which layers have the `sliding_window`. Without `layer_types`,
    either all layers have the window or none: in Qwen's configs all if `use_sliding_window` is true, in other configs
    all unless it is false.

    If `use_sliding_window` is false, as it is by default in Qwen's configs, no layer has a window. The model type
    "llama" does not define a window. If a config of this type has the key `sliding_window`, but neither `layer_types`
    nor `use_sliding_window`, the window is applied to all layers and recorded as a doubt.
    """
    model_type = str(keys.data.get("model_type"))
    uses_window = keys.flag("use_sliding_window", not model_type.startswith("qwen"))
    if keys.data.get("sliding_window") is None:
        return (geometry,) * num_layers
    if model_type == "llama" and uses_window and not {"layer_types", "use_sliding_window"} & keys.data.keys():
        remedy = "set it to null if the draft was trained with full attention"
        record_window_doubt(facts, keys, keys.integer("sliding_window"), "every layer sees so many tokens", remedy)
    is_sliding = sliding_layers(keys, num_layers, [True] * num_layers)
    return with_sliding_window(
        geometry, keys.integer("sliding_window"), [slides and uses_window for slides in is_sliding]
    )


def record_window_doubt(
    facts: FactResolver, keys: ConfigKeys, used_window: int | None, interpretation: str, remedy: str
) -> None:
    """Record the window that the layers get, and a doubt (a sentence about what is odd in the draft). Call this for a
    config that has the key `sliding_window` although the draft's format does not define it. `used_window` is None for
    full attention. `interpretation` and `remedy` are parts of the doubt's text.
    """
    model_type, configured_window = keys.data.get("model_type"), keys.data["sliding_window"]
    facts.choose(
        "sliding_window", used_window, f"config.json has {configured_window}, which type {model_type} does not define"
    )
    facts.doubts.append(
        f"its config.json has sliding_window {configured_window}, which type {model_type} does not define; "
        f"{interpretation}; {remedy}"
    )


def with_rope_layout(geometry: LayerGeometry, facts: FactResolver, convention: str, source: str) -> LayerGeometry:
    """Return `geometry` with the rotary layout of the checkpoint: the override of `rope_layout` or, without one,
    `convention`. A geometry with latent attention is returned unchanged, because it always rotates neighbouring pairs.
    """
    if geometry.latent is not None:
        return geometry
    layout = facts.choose("rope_layout", convention, source)
    return replace(geometry, interleaved=layout == "interleaved")


def confirm_flag(folder: str, keys: ConfigKeys, key: str, tensor_name: str, is_present: bool) -> bool:
    """Return `is_present`: whether the tensor `tensor_name` exists. If the config has the flag `key`, both must agree.

    Raises:
        ConfigError: the config says the opposite.
    """
    if keys.data.get(key) is not None and keys.flag(key) != is_present:
        presence = "is there" if is_present else "is missing"
        raise ConfigError(
            f"draft {folder!r}: config.json says {key} {keys.data[key]} but tensor {tensor_name!r} {presence}"
        )
    return is_present


class DraftVocabulary(NamedTuple):
    """Whose embedding and head the draft uses ("tied": its own embedding as head), how many ids it ranks (`size`), and
    whether a `d2t` maps these ids to target ids.
    """

    embed: Literal["own", "target"]
    head: Literal["own", "target", "tied"]
    size: int
    has_d2t: bool


def read_vocabulary(
    folder: str, keys: ConfigKeys, shapes: Shapes, target: TargetArch, hidden: int, allow_d2t: bool = False
) -> DraftVocabulary:
    """Return the draft's vocabulary. Its size is `draft_vocab_size` or, without this key, the number of rows of the
    draft's own head or, without such a head, the target's size. That the head has so many rows is checked on load.

    If `allow_d2t`, a `d2t` may pick rows of the target's head. Otherwise a draft that ranks fewer ids than the target
    must have its own head.

    Raises:
        ConfigError: the sizes of head and vocabulary disagree, or the draft needs the target's embedding or head, which
            does not fit the draft.
    """
    own_embed, own_head = "embed_tokens.weight" in shapes, "lm_head.weight" in shapes
    size = keys.integer("draft_vocab_size", target.vocab_size)
    head: Literal["own", "target", "tied"] = "own" if own_head else "target"
    if not own_head and own_embed and keys.flag("tie_word_embeddings"):
        head = "tied"
    if own_head and keys.data.get("draft_vocab_size") is None:
        size = shapes["lm_head.weight"][0]
        if size != target.vocab_size and "d2t" not in shapes:
            raise ConfigError(
                f"draft {folder!r}: tensor 'lm_head.weight' has {size} rows, but without draft_vocab_size it ranks "
                f"all {target.vocab_size} ids of the target"
            )
    if not own_embed and hidden != target.hidden:
        raise ConfigError(
            f"draft {folder!r}: hidden_size {hidden} differs from the target's {target.hidden}, so it cannot "
            "share the target's embedding; the draft's checkpoint must hold embed_tokens.weight"
        )
    if head == "target" and (
        hidden != target.hidden or (size != target.vocab_size and not (allow_d2t and "d2t" in shapes))
    ):
        raise ConfigError(
            f"draft {folder!r}: without lm_head.weight it shares the target's head, which needs hidden_size "
            f"{target.hidden} and draft_vocab_size {target.vocab_size}; tensor 'lm_head.weight' is missing"
        )
    return DraftVocabulary("own" if own_embed else "target", head, size, "d2t" in shapes)


def check_same_width(folder: str, hidden: int, target: TargetArch) -> None:
    """Raise unless the draft's layers have the target's width.

    Raises:
        ConfigError: the message gives both widths.
    """
    if hidden != target.hidden:
        raise ConfigError(
            f"draft {folder!r} does not fit the target: its width is {hidden}, the target's {target.hidden}"
        )


def check_same_target(folder: str, keys: ConfigKeys, target: TargetArch) -> None:
    """Raise if the draft was made for a target with another width or vocabulary.

    Raises:
        ConfigError: the message gives both numbers.
    """
    target_hidden_size = keys.integer("target_hidden_size", target.hidden)
    if target_hidden_size != target.hidden:
        raise ConfigError(
            f"draft {folder!r} does not fit the target: target_hidden_size {target_hidden_size} against {target.hidden}"
        )
    if keys.integer("vocab_size", target.vocab_size) != target.vocab_size:
        raise ConfigError(
            f"draft {folder!r} does not fit the target: vocab_size {keys.data['vocab_size']} against "
            f"{target.vocab_size}"
        )
