"""The geometry of one decoder layer as plain values: sizes, kind of attention, norms, and a dense or MoE MLP."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from cluster.arch.cell import Cell
from cluster.arch.keys import ConfigKeys
from cluster.arch.rope import Rope, rope_of

Activation = Literal["silu", "gelu_tanh"]
DEFAULT_ROPE = Rope(10000.0)


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Multi-head latent attention (arXiv 2405.04434): v and the unrotated part of k of all heads are computed from one
    latent of width `kv_rank`. All heads share the rotated part of k.

    If `q_rank` is None, queries are projected directly, without a latent. `nope` and `rope` are the widths of the
    unrotated and the rotated part of a head's q and k; `value` is the width of the head's output. The norms of the
    latents use `eps`, not the config's eps.
    """

    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int
    eps: float = 1e-6


class QueryScaling(NamedTuple):
    """The queries of position p are multiplied by 1 + beta log(1 + (p + offset) // length). This is done in the layers
    whose numbers are in `layers`; if `layers` is None, in all layers.
    """

    length: int
    beta: float
    offset: int = 0
    layers: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Moe:
    """A mixture of `experts` MLPs with `intermediate` columns each; `active` of them are used per token.

    - `scoring`: a softmax over all experts, or a sigmoid.
    - `renormalise`: the weights of the chosen experts are divided by their sum.
    - `scale` multiplies the weights of the chosen experts.
    - `groups`, `top_groups`: experts are in `groups` groups, and only experts of the best `top_groups` groups can be
      chosen.
    - `correction`: a bias is added to the scores. It affects which experts are chosen, but not their weights.
    - `router_bias`: the projection that computes the scores has a bias.
    - `shared`: the width of an MLP that every token uses (a shared expert); 0 if there is none.
    - `shared_gate`: the output of the shared expert is multiplied by the sigmoid of a learnt projection of the token.
    - `scales_inputs`: the weights of the chosen experts multiply the rows that enter them, not their outputs (Llama-4).
    - `normed_router`: the router reads the rows after an RMSNorm of its own, divided by the square root of the hidden
      size (Gemma-4). `expert_scale`: the weight of each chosen expert is multiplied by a learnt number of that expert.
    - `beside_mlp`: the layer also has its dense MLP. Both read the residual stream through norms of their own, and the
      norms of both outputs are added (Gemma-4).
    - `storage`: `separate` if each matrix of each expert is a tensor of the checkpoint; `stacked` if three tensors hold
      the gates, ups and downs of all experts, `[E, outputs, inputs]`; `joined` if one tensor holds all gates and ups
      `[E, 2 I, H]`, the gates of an expert before its ups, and another the downs; `transposed` if these two are
      `[E, inputs, outputs]` (Llama-4); `interleaved` if gates and ups alternate in one tensor and another holds the
      downs, both with biases (gpt-oss).
    - `clamp`: (alpha, limit) of the clamped SwiGLU of gpt-oss; None for plain SwiGLU.
    - `limit`: gates, after silu, are at most this, and ups are between -limit and limit; None: no limit.
    """

    experts: int
    active: int
    intermediate: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    correction: bool = False
    router_bias: bool = False
    shared: int = 0
    shared_gate: bool = False
    scales_inputs: bool = False
    normed_router: bool = False
    expert_scale: bool = False
    beside_mlp: bool = False
    storage: Literal["separate", "stacked", "joined", "transposed", "interleaved"] = "separate"
    clamp: tuple[float, float] | None = None
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """One decoder layer: attention heads of `head_dim`, and a gated MLP of width `intermediate`, or `moe`.

    - `attention_bias`: q, k and v have biases. `out_bias`: the attention output has a bias.
    - `sliding_window`: a row sees this many tokens, itself included; if None, all tokens. If `chunked`, the text is
      cut into chunks of this many tokens, and a row sees the tokens of its own chunk (Llama-4).
    - `rotated`: q and k are rotated.
    - `scale`: factor of attention logits; if None, `head_dim ** -0.5`.
    - `sinks`: one learnt logit per head joins the softmax.
    - `qk_norm`: RMSNorm per head before rope. `bare_qk_norm`: the same without weights.
    - `unit_offset`: norms scale by 1 + weight.
    - `sandwich`: there are norms before and after attention, and before and after the MLP.
    - `interleaved`: the checkpoint's q and k expect rope over neighbouring pairs.
    - `gated`: `q_proj` also yields a gate `[head_dim]` per head; the gate's sigmoid multiplies the head's attention
      output (Qwen3-Next). `head_gate`: `g_proj` yields one gate per head for the same purpose (Step-3.5).
    - `limit`: as in `Moe`, for the dense MLP and the shared expert.
    - `latent`: if set, attention is latent, `kv_heads` is 1, and `head_dim` is the width of what the KV cache keeps of
      a token: the latent and the rotated key.
    - `v_head_dim`: the width of v of a head; if None, `head_dim`. `value_scale` multiplies v (MiMo-V2).
    - `value_norm`: RMSNorm without a weight per head of v. `keys_as_values`: there is no `v_proj`; v is what `k_proj`
      yields, before its norm and rope.
    - `borrows`: the number of an earlier layer with the same heads and window, whose keys and values this layer reads
      (Gemma-4). It has none of its own. If None, the layer has its own.
    - `layer_input`: each layer gets an input of this width from the tokens and their embeddings (Gemma-4); 0: none.
      `output_scale`: a learnt number multiplies the residual stream that leaves the layer.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    attention_bias: bool = False
    mlp_bias: bool = False
    out_bias: bool = False
    rope: Rope = DEFAULT_ROPE
    sliding_window: int | None = None
    chunked: bool = False
    rotated: bool = True
    scale: float | None = None
    sinks: bool = False
    qk_norm: bool = False
    bare_qk_norm: bool = False
    unit_offset: bool = False
    sandwich: bool = False
    interleaved: bool = False
    gated: bool = False
    head_gate: bool = False
    activation: Activation = "silu"
    limit: float | None = None
    moe: Moe | None = None
    latent: LatentSizes | None = None
    v_head_dim: int | None = None
    value_scale: float = 1.0
    value_norm: bool = False
    keys_as_values: bool = False
    borrows: int | None = None
    layer_input: int = 0
    output_scale: bool = False

    @property
    def softmax_scale(self) -> float:
        """The factor that multiplies attention logits."""
        return float(self.head_dim**-0.5) if self.scale is None else self.scale

    @property
    def visible_span(self) -> int | None:
        """The size of the sliding window as attention kernels take it: negative if it is that of a chunk."""
        return -self.sliding_window if self.chunked and self.sliding_window is not None else self.sliding_window

    @property
    def cell(self) -> Cell:
        """What a KV pool keeps of one token. For a layer that borrows, this is what it reads."""
        return Cell(self.kv_heads, self.head_dim, self.value_dim, self.latent is not None)

    @property
    def value_dim(self) -> int:
        """Width of the attention output per head. Latent attention then projects this output to `LatentSizes.value`."""
        if self.latent is not None:
            return self.latent.kv_rank
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def rope_dim(self) -> int:
        """Width of the rotated part of a head."""
        return int(self.head_dim * self.rope.partial) if self.latent is None else self.latent.rope


def moe_of(layers: Iterable[LayerGeometry]) -> Moe | None:
    """Return the `Moe` that all MoE layers of a model share. Return None if no layer has experts."""
    return next((layer.moe for layer in layers if layer.moe is not None), None)


def geometry_of(
    keys: ConfigKeys, activation: Activation = "silu", theta: float = 10000.0, allow_partial_rotary: bool = False
) -> LayerGeometry:
    """Return the geometry of a layer, read from the keys that most families share. The function of a family replaces
    the fields in which the family differs. For `theta` and `allow_partial_rotary` see `rope_of`.

    Raises:
        ConfigError: a value has the wrong type, or is not served.
    """
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    kv_heads = keys.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise keys.error(f"num_key_value_heads {kv_heads} must divide {heads} heads")
    accepted_names = {"silu": ("silu", "swish"), "gelu_tanh": ("gelu_pytorch_tanh",)}[activation]
    key = "hidden_activation" if keys.data.get("hidden_activation") is not None else "hidden_act"
    if keys.data.get(key, accepted_names[0]) not in accepted_names:
        raise keys.error(f"{key} must be {accepted_names[0]}, got {keys.data[key]!r}")
    head_dim = keys.integer("head_dim", max(1, hidden // heads))
    if head_dim % 2:
        raise keys.error(f"head_dim must be even for rotary embeddings, got {head_dim}")
    bias, rope = keys.flag("attention_bias"), rope_of(keys, theta, allow_partial_rotary=allow_partial_rotary)
    check_rotated_part(keys, head_dim, rope)
    return LayerGeometry(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=keys.integer("intermediate_size"),
        eps=keys.number("rms_norm_eps", 1e-6),
        attention_bias=bias,
        out_bias=bias,
        mlp_bias=keys.flag("mlp_bias"),
        rope=rope,
        activation=activation,
    )


def check_rotated_part(keys: ConfigKeys, head_dim: int, rope: Rope) -> None:
    """Raise if `rope` rotates an odd number of a head's `head_dim` dimensions, or none.

    Raises:
        ConfigError: the message gives the number.
    """
    rotated_dims = int(head_dim * rope.partial)
    if rotated_dims % 2 or not rotated_dims:
        raise keys.error(
            f"partial_rotary_factor {rope.partial} of head_dim {head_dim} is {rotated_dims} "
            "dimensions, which must be even and not 0"
        )


def sliding_layers(keys: ConfigKeys, num_layers: int, default: list[bool]) -> list[bool]:
    """Return for each of `num_layers` layers whether it has a sliding window, as `layer_types` says. Without that key,
    return `default`.

    Raises:
        ConfigError: the list has another length, or a type that is neither full nor sliding attention.
    """
    types = keys.data.get("layer_types")
    if types is None:
        return default
    is_sliding = {"full_attention": False, "sliding_attention": True}
    if not isinstance(types, list) or len(types) != num_layers:
        raise keys.error(f"layer_types must list the {num_layers} layers, got {types!r}")
    unknown_types = sorted({str(t) for t in types if t not in is_sliding})
    if unknown_types:
        raise keys.error(f"layer_types {unknown_types} are recognised and not served; known: {list(is_sliding)}")
    return [is_sliding[t] for t in types]


def with_sliding_window(layer: LayerGeometry, window: int | None, windowed: list[bool]) -> tuple[LayerGeometry, ...]:
    """Return one layer per entry of `windowed`: for True, `layer` with the sliding window `window`; for False, `layer`
    itself.
    """
    windowed_layer = replace(layer, sliding_window=window)
    return tuple(windowed_layer if slides else layer for slides in windowed)
