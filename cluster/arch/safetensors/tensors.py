"""Lists the tensors that a target needs, and checks a checkpoint's headers against that list; nothing is loaded."""

import re
from collections.abc import Collection, Iterator
from math import prod

from cluster.arch.layer import LayerGeometry, Moe
from cluster.arch.safetensors.stored import missing_tensor, stored_tensors
from cluster.arch.target import TargetArch
from cluster.config import ConfigError

NamedShapes = Iterator[tuple[str, tuple[int, ...]]]
IGNORED_TENSORS = r"rotary_emb\.inv_freq$"
ATTENTION_SCALES = r"\.self_attn\.(q|k|v|kv|prob)_scale$|\.self_attn\.([qkv])_proj\.(\2_scale|output_scale)$"
"""Static scales of FP8 attention and FP8 KV caches from ModelOpt and compressed-tensors. They are ignored, because
this server computes its own scales for FP8 KV caches.
"""
# Suffixes of the scales of a quantised tensor, appended to its name or in place of its `.weight`.
SCALE_SUFFIXES = re.compile(
    r"(\.weight)?(_scale_inv|_scale|_zero_point|_shape|_g_idx|\.(input|activation|act)_scale|\.input_scale_ub|"
    r"\.input_zero_point|\.qscale_(act|weight)|\.scales|\.qzeros|\.g_idx)$"
)


def target_tensors(arch: TargetArch) -> NamedShapes:
    """Yield (name, shape) of every tensor that the target needs. `TargetArch.stored_name` maps such a name to the name
    in the checkpoint.
    """
    yield "embed_tokens.weight", (arch.vocab_size, arch.hidden)
    if arch.layer_input_vocab:
        width, columns = arch.layer.layer_input, arch.num_layers * arch.layer.layer_input
        yield "layer_inputs.embed_tokens.weight", (arch.layer_input_vocab, columns)
        yield "layer_inputs.projection.weight", (columns, arch.hidden)
        yield "layer_inputs.norm.weight", (width,)
    for index, layer in enumerate(arch.layers):
        yield from layer_tensors(f"layers.{index}", layer)
    yield "norm.weight", (arch.hidden,)
    if not arch.tied:
        yield "lm_head.weight", (arch.vocab_size, arch.hidden)


def count_parameters(arch: TargetArch) -> int:
    """Return the number of parameters of the target."""
    return sum(prod(shape) for _, shape in target_tensors(arch))


def layer_tensors(prefix: str, g: LayerGeometry) -> NamedShapes:
    """Yield the tensors of one decoder layer."""
    before_mlp = ("after_attention", "before_mlp", "after_mlp") if g.sandwich else ("post_attention_layernorm",)
    for name in ("input_layernorm", *before_mlp):
        yield f"{prefix}.{name}.weight", (g.hidden,)
    yield from (_attention if g.latent is None else _latent)(f"{prefix}.self_attn", g)
    if g.moe is None or g.moe.beside_mlp:
        yield from _mlp(f"{prefix}.mlp", g.hidden, g.intermediate, g.mlp_bias)
    if g.moe is not None and g.moe.beside_mlp:
        yield from _experts(f"{prefix}.moe", g.hidden, g.moe)
        for name in ("before_experts", "after_dense_mlp", "after_experts"):
            yield f"{prefix}.{name}.weight", (g.hidden,)
    elif g.moe is not None:
        yield from _experts(f"{prefix}.mlp", g.hidden, g.moe)
    if g.layer_input:
        yield f"{prefix}.layer_input.gate.weight", (g.layer_input, g.hidden)
        yield f"{prefix}.layer_input.projection.weight", (g.hidden, g.layer_input)
        yield f"{prefix}.layer_input.norm.weight", (g.hidden,)
    if g.output_scale:
        yield f"{prefix}.output_scale", (1,)


def _linear(name: str, rows: int, columns: int, bias: bool) -> NamedShapes:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _attention(prefix: str, g: LayerGeometry) -> NamedShapes:
    sizes = [("q", g.heads * g.head_dim)]
    if g.borrows is None:
        sizes += [("k", g.kv_heads * g.head_dim)]
        sizes += [] if g.keys_as_values else [("v", g.kv_heads * g.value_dim)]
    for part, rows in sizes:
        yield from _linear(f"{prefix}.{part}_proj", rows, g.hidden, g.attention_bias)
    yield from _linear(f"{prefix}.o_proj", g.hidden, g.heads * g.value_dim, g.out_bias)
    if g.head_gate:
        yield f"{prefix}.g_proj.weight", (g.heads, g.hidden)
    if g.qk_norm:
        yield from ((f"{prefix}.{part}_norm.weight", (g.head_dim,)) for part in ("qk" if g.borrows is None else "q"))
    if g.sinks:
        yield f"{prefix}.sinks", (g.heads,)


def _latent(prefix: str, g: LayerGeometry) -> NamedShapes:
    sizes = g.latent
    assert sizes is not None
    queries = g.heads * (sizes.nope + sizes.rope)
    if sizes.q_rank is None:
        yield from _linear(f"{prefix}.q_proj", queries, g.hidden, False)
    else:
        yield from _linear(f"{prefix}.q_a_proj", sizes.q_rank, g.hidden, g.attention_bias)
        yield f"{prefix}.q_a_layernorm.weight", (sizes.q_rank,)
        yield from _linear(f"{prefix}.q_b_proj", queries, sizes.q_rank, False)
    yield from _linear(f"{prefix}.kv_a_proj_with_mqa", sizes.kv_rank + sizes.rope, g.hidden, g.attention_bias)
    yield f"{prefix}.kv_a_layernorm.weight", (sizes.kv_rank,)
    yield from _linear(f"{prefix}.kv_b_proj", g.heads * (sizes.nope + sizes.value), sizes.kv_rank, False)
    yield from _linear(f"{prefix}.o_proj", g.hidden, g.heads * sizes.value, g.out_bias)


def _mlp(prefix: str, hidden: int, columns: int, bias: bool) -> NamedShapes:
    for name in ("gate", "up"):
        yield from _linear(f"{prefix}.{name}_proj", columns, hidden, bias)
    yield from _linear(f"{prefix}.down_proj", hidden, columns, bias)


def _experts(prefix: str, hidden: int, moe: Moe) -> NamedShapes:
    e, i = moe.experts, moe.intermediate
    yield from _linear(f"{prefix}.router", e, hidden, moe.router_bias)
    if moe.correction:
        yield f"{prefix}.router.correction", (e,)
    if moe.normed_router:
        yield f"{prefix}.router.norm", (hidden,)
    if moe.expert_scale:
        yield f"{prefix}.router.expert_scale", (e,)
    if moe.storage == "stacked":
        for part, shape in (("gate", (i, hidden)), ("up", (i, hidden)), ("down", (hidden, i))):
            yield f"{prefix}.experts.{part}_proj.weight", (e, *shape)
    elif moe.storage == "joined":
        yield f"{prefix}.experts.gate_up_proj", (e, 2 * i, hidden)
        yield f"{prefix}.experts.down_proj", (e, hidden, i)
    elif moe.storage == "transposed":
        yield f"{prefix}.experts.gate_up_proj", (e, hidden, 2 * i)
        yield f"{prefix}.experts.down_proj", (e, i, hidden)
    elif moe.storage == "interleaved":
        yield f"{prefix}.experts.gate_up_proj", (e, hidden, 2 * i)
        yield f"{prefix}.experts.gate_up_proj_bias", (e, 2 * i)
        yield f"{prefix}.experts.down_proj", (e, i, hidden)
        yield f"{prefix}.experts.down_proj_bias", (e, hidden)
    else:
        for expert in range(e):
            yield from _mlp(f"{prefix}.experts.{expert}", hidden, i, False)
    if moe.shared:
        yield from _mlp(f"{prefix}.shared_experts", hidden, moe.shared, False)


def _packed_alternatives(name: str) -> tuple[tuple[str, ...], ...]:
    """Return three tuples of tensor names. Each tuple may replace `name` in a quantised checkpoint: the first in MXFP4,
    the second in compressed-tensors, the third in AWQ and GPTQ.
    """
    stem = name.removesuffix(".weight")
    awq_gptq_names = tuple(f"{stem}.{part}" for part in ("qweight", "qzeros", "scales"))
    return (f"{name}_blocks", f"{name}_scales"), (f"{stem}.weight_packed", f"{stem}.weight_scale"), awq_gptq_names


def packed_matrix_biases(unknown: Collection[str], stored_names: Collection[str]) -> list[str]:
    """Return the names in `unknown` that are biases of packed AWQ or GPTQ matrices in `stored_names`. Quantisation
    tools write zero biases even for models without biases.
    """
    return [
        name for name in unknown if name.endswith(".bias") and f"{name.removesuffix('.bias')}.qweight" in stored_names
    ]


def check_tensors(folder: str, arch: TargetArch) -> None:
    """Check the headers in `folder` against the tensors that `arch` needs. Of the tensors that replace a packed matrix,
    only the names are checked. Their shapes, and scales, are checked later, when the data is read.

    Raises:
        ConfigError: a tensor is missing, unknown or of the wrong shape; the message names tensor and file.
    """
    tensors = stored_tensors(folder)
    expected_names = {arch.stored_name("lm_head.weight")} if arch.tied else set()
    for model_name, shape in target_tensors(arch):
        name = arch.stored_name(model_name)
        if name not in tensors:
            packed_names = next(
                (parts for parts in _packed_alternatives(name) if any(part in tensors for part in parts)), (name,)
            )
            missing = next((part for part in packed_names if part not in tensors), None)
            expected_names |= {name, *packed_names}
            if missing is None:
                continue
            raise missing_tensor(folder, missing)
        path, raw_name, location = tensors[name]
        if location.shape != shape:
            raise ConfigError(
                f"tensor {raw_name!r} in {str(path)!r} is {list(location.shape)} but the config requires {list(shape)}"
            )
        expected_names.add(name)
    ignored = [re.compile(pattern) for pattern in (IGNORED_TENSORS, ATTENTION_SCALES, *arch.ignored_patterns)]
    for name, (path, raw_name, _) in tensors.items():
        base_name = SCALE_SUFFIXES.sub("", name)
        if (
            name in expected_names
            or f"{base_name}.weight" in expected_names
            or any(pattern.search(name) for pattern in ignored)
        ):
            continue
        if packed_matrix_biases([name], tensors):  # loading the weights checks that they are zero
            continue
        raise ConfigError(f"tensors of {str(path)!r} that the model does not know: {[raw_name]}")
