"""Llama-4's language model. Most layers use rotary embeddings, and a token attends only to tokens of its own chunk of
the text. The other layers use no rotary embeddings, and a token attends to all tokens before it. A layer has a dense
MLP, or experts whose inputs are multiplied by the scores of the router.
"""

from dataclasses import replace
from typing import Any

from cluster.arch.keys import ConfigKeys
from cluster.arch.layer import Moe, QueryScaling, geometry_of
from cluster.arch.target import TargetArch, target_of

DEFAULTS: dict[str, Any] = {
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 202048,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
}
"""The values of these keys if a config leaves them out. They are those of `transformers`."""
CHUNK = 8192
"""The size of a chunk if a config leaves it out, and the length by which queries of full layers grow."""
NAMES = (
    (r"\.mlp\.shared_experts\.", ".feed_forward.shared_expert."),
    (r"\.mlp\.experts\.", ".feed_forward.experts."),
    (r"\.mlp\.", ".feed_forward."),
)


def llama4(keys: ConfigKeys) -> TargetArch:
    """Return the target of `Llama4ForCausalLM`.

    Raises:
        ConfigError: a value is wrong or not served.
    """
    full_keys = keys.with_defaults(DEFAULTS)
    num_layers = full_keys.integer("num_hidden_layers")
    is_rotated = _rotated_layers(full_keys, num_layers)
    is_chunked = _chunked_layers(full_keys, is_rotated)
    has_experts = _expert_layers(full_keys, num_layers)
    layer = replace(geometry_of(full_keys, theta=500000.0), interleaved=True, mlp_bias=False)
    dense = replace(layer, intermediate=full_keys.integer("intermediate_size_mlp"))
    sparse = replace(layer, moe=_moe(full_keys))
    chunk_size = None  # if the key is null: no layer has chunks
    if keys.data.get("attention_chunk_size", CHUNK) is not None:
        chunk_size = keys.integer("attention_chunk_size", CHUNK)
    bare_norms = full_keys.flag("use_qk_norm", True)
    layers = tuple(
        replace(
            sparse if has_experts[index] else dense,
            rotated=is_rotated[index],
            bare_qk_norm=bare_norms and is_rotated[index],
            sliding_window=chunk_size if is_chunked[index] else None,
            chunked=is_chunked[index] and chunk_size is not None,
        )
        for index in range(num_layers)
    )
    unrotated = tuple(index for index, rotated in enumerate(is_rotated) if not rotated)
    query_scaling = None
    if full_keys.flag("attn_temperature_tuning", True) and unrotated:
        scale = full_keys.number("attn_scale", 0.1)
        query_scaling = QueryScaling(full_keys.integer("floor_scale", CHUNK), scale, 1, unrotated)
    return target_of(
        full_keys,
        "Llama4ForCausalLM",
        layers,
        tensor_name_rules=NAMES,
        query_scaling=query_scaling,
    )


def _rotated_layers(keys: ConfigKeys, num_layers: int) -> list[bool]:
    """Return for each layer whether it is rotated: by `no_rope_layers`, in which 0 stands for a layer that is not, or
    all but each `no_rope_layer_interval`-th.
    """
    marks = keys.integers("no_rope_layers") or []
    interval = keys.integer("no_rope_layer_interval", 4)
    if not marks:
        return [(index + 1) % interval != 0 for index in range(num_layers)]
    if len(marks) != num_layers or not set(marks) <= {0, 1}:
        raise keys.error(f"no_rope_layers must have 0 or 1 for each of the {num_layers} layers, got {marks}")
    return [bool(mark) for mark in marks]


def _chunked_layers(keys: ConfigKeys, is_rotated: list[bool]) -> list[bool]:
    """Return for each layer whether it sees only its chunk: by `layer_types`, or those that are rotated."""
    types = keys.data.get("layer_types")
    if types is None:
        return is_rotated
    is_chunked = {"full_attention": False, "chunked_attention": True}
    if not isinstance(types, list) or len(types) != len(is_rotated):
        raise keys.error(f"layer_types must list the {len(is_rotated)} layers, got {types!r}")
    unknown_types = sorted({str(t) for t in types if t not in is_chunked})
    if unknown_types:
        raise keys.error(f"layer_types {unknown_types} are recognised and not served; known: {list(is_chunked)}")
    return [is_chunked[t] for t in types]


def _expert_layers(keys: ConfigKeys, num_layers: int) -> list[bool]:
    """Return for each layer whether it has experts: by `moe_layers`, or each `interleave_moe_layer_step`-th."""
    numbers, step = keys.integers("moe_layers"), keys.integer("interleave_moe_layer_step", 1)
    if numbers is None:
        numbers = list(range(step - 1, num_layers, step))
    if any(not 0 <= number < num_layers for number in numbers):
        raise keys.error(f"moe_layers must be numbers of the {num_layers} layers, got {numbers}")
    return [index in numbers for index in range(num_layers)]


def _moe(keys: ConfigKeys) -> Moe:
    """Return the experts of a layer that has some."""
    experts, active = keys.integer("num_local_experts"), keys.integer("num_experts_per_tok")
    if active > experts:
        raise keys.error(f"num_experts_per_tok {active} exceeds num_local_experts {experts}")
    return Moe(
        experts=experts,
        active=active,
        intermediate=keys.integer("intermediate_size"),
        scoring="sigmoid",
        renormalise=False,
        scales_inputs=True,
        shared=keys.integer("intermediate_size"),
        storage="transposed",
    )
