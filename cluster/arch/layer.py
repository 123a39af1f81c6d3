"""One decoder layer as plain values: sizes, kind of attention, norms, and the MLP, dense or of experts."""

from dataclasses import dataclass, replace
from typing import Literal

from cluster.arch.keys import Keys
from cluster.arch.rope import Rope, rope_of
from cluster.config import ConfigError

Activation = Literal["silu", "gelu_tanh"]
PLAIN = Rope(10000.0)


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (arXiv 2405.04434): k and v of all heads come from one latent of `kv_rank`.

    `q_rank` None: queries are projected at once. `nope` and `rope` are a query head's two parts, `value` a head's
    output. `eps` is that of the norms of the latents, which do not follow the config.
    """

    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int
    eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class Moe:
    """A mixture of `experts` MLPs of `intermediate` columns, `active` of them per token.

    `scoring` softmax over all experts, or sigmoid; `renormalise` divides the chosen ones' weights by their sum;
    `scale` multiplies them. With `groups` only the experts of the best `top_groups` groups can be chosen, and
    `correction` is a bias that counts for the choice alone. `shared` columns belong to an MLP that every token takes,
    with `shared_gate` times the sigmoid of a learnt projection of the token.
    `stacked`: a checkpoint holds all experts in one tensor, gate and up interleaved, with biases. `clamp` (alpha,
    limit) is the clamped SwiGLU of gpt-oss.
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
    stacked: bool = False
    clamp: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """One decoder layer: attention heads of `head_dim`, and a gated MLP of `intermediate`, or `moe`.

    `attention_bias` belongs to q, k and v, `out_bias` to the output. `sliding_window` tokens are seen, itself included;
    None: all. `scale` None is `head_dim ** -0.5`. `sinks`: one learnt logit per head joins the softmax. `qk_norm`:
    RMSNorm per head before rope. `unit_offset`: norms scale by 1 + weight. `sandwich`: norms after attention and MLP
    too. `interleaved`: the checkpoint's q and k are made for rope over neighbouring pairs. `gated`: `q_proj` gives each
    head a gate beside its query, whose sigmoid multiplies what the head's attention gives (Qwen3-Next).
    With `latent`, `kv_heads` is 1 and `head_dim` the width of what is cached.
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
    rope: Rope = PLAIN
    sliding_window: int | None = None
    scale: float | None = None
    sinks: bool = False
    qk_norm: bool = False
    unit_offset: bool = False
    sandwich: bool = False
    interleaved: bool = False
    gated: bool = False
    activation: Activation = "silu"
    moe: Moe | None = None
    latent: Latent | None = None

    @property
    def softmax_scale(self) -> float:
        """What attention logits are multiplied by."""
        return float(self.head_dim**-0.5) if self.scale is None else self.scale

    @property
    def cell(self) -> tuple[int, int, int]:
        """What one token leaves in a pool: `[2, nkv, d]`, or one latent `[1, 1, d]`."""
        return (2 if self.latent is None else 1), self.kv_heads, self.head_dim

    @property
    def value_dim(self) -> int:
        """Width of what attention gives per head."""
        return self.head_dim if self.latent is None else self.latent.kv_rank

    @property
    def rope_dim(self) -> int:
        """Width of the rotated part of a head."""
        return int(self.head_dim * self.rope.partial) if self.latent is None else self.latent.rope

    @property
    def mlp_columns(self) -> int:
        """The narrowest MLP of the layer, which has to be cut over ranks."""
        if self.moe is None:
            return self.intermediate
        return min(self.moe.intermediate, self.moe.shared or self.moe.intermediate)


def geometry_of(
    keys: Keys, activation: Activation = "silu", theta: float = 10000.0, partial: bool = False
) -> LayerGeometry:
    """The sizes of one plain layer; families change what is theirs. `partial` as for `rope_of`."""
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    kv_heads = keys.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(f"{keys.file} of {keys.where!r}: num_key_value_heads {kv_heads} must divide {heads} heads")
    known = {"silu": ("silu", "swish"), "gelu_tanh": ("gelu_pytorch_tanh",)}[activation]
    key = "hidden_activation" if keys.data.get("hidden_activation") is not None else "hidden_act"
    if keys.data.get(key, known[0]) not in known:
        raise ConfigError(f"{keys.file} of {keys.where!r}: {key} must be {known[0]}, got {keys.data[key]!r}")
    head_dim = keys.integer("head_dim", max(1, hidden // heads))
    if head_dim % 2:
        raise ConfigError(f"{keys.file} of {keys.where!r}: head_dim must be even for rotary embeddings, got {head_dim}")
    bias, rope = keys.flag("attention_bias"), rope_of(keys, theta, partial=partial)
    rotated = int(head_dim * rope.partial)
    if rotated % 2 or not rotated:
        raise ConfigError(
            f"{keys.file} of {keys.where!r}: partial_rotary_factor {rope.partial} of head_dim {head_dim} is {rotated} "
            "dimensions, which must be even"
        )
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


def sliding(keys: Keys, count: int, default: list[bool]) -> list[bool]:
    """Which of `count` layers look through a window: `layer_types` where the config lists them, else `default`.

    Raises:
        ConfigError: the list has another length, or a type that is neither full nor sliding attention.
    """
    types = keys.data.get("layer_types")
    if types is None:
        return default
    known = {"full_attention": False, "sliding_attention": True}
    if not isinstance(types, list) or len(types) != count:
        raise ConfigError(f"{keys.file} of {keys.where!r}: layer_types must list the {count} layers, got {types!r}")
    other = sorted({str(t) for t in types if t not in known})
    if other:
        raise ConfigError(
            f"{keys.file} of {keys.where!r}: layer_types {other} are recognised and not served; known: {list(known)}"
        )
    return [known[t] for t in types]


def with_sliding_window(layer: LayerGeometry, window: int | None, which: list[bool]) -> tuple[LayerGeometry, ...]:
    """`layer` once per entry of `which`, looking through `window` where that says so."""
    narrow = replace(layer, sliding_window=window)
    return tuple(narrow if small else layer for small in which)
