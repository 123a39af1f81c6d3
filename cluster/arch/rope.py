"""Rotary embeddings as configs describe them: base, scaling, and the effect of scaling on the softmax."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from cluster.arch.keys import ConfigKeys

KINDS = ("default", "dynamic", "linear", "llama3", "yarn")


class Yarn(NamedTuple):
    """YaRN (arXiv 2309.00071): frequencies that turn less than `beta_slow` times over `length` are divided by `factor`.

    Frequencies that turn more than `beta_fast` times are kept; frequencies between the two limits are blended. `length`
    is the original context length. `attention` multiplies cos and sin, and includes a config's `attn_factor` (as in
    vLLM and SGLang; `transformers` has no such key). `truncate`: the blended range is rounded to whole dimensions.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    length: int
    truncate: bool
    attention: float


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding in the half-split (neox) layout, with at most one kind of scaling.

    `llama3` is (factor, low, high, original length). `linear` divides every frequency. `dynamic` is (factor, length):
    from position `length` on, frequencies decrease with the position; a position has the frequencies that
    `transformers` uses for a text that ends at that position. `partial` is the share of a head's dimensions, from the
    first on, that is rotated.
    """

    theta: float
    llama3: tuple[float, float, float, int] | None = None
    linear: float = 1.0
    yarn: Yarn | None = None
    partial: float = 1.0
    dynamic: tuple[float, int] | None = None

    def longest(self, positions: int) -> int:
        """Return the maximum number of positions, as in vLLM, if the config states `positions`.

        Linear and dynamic scaling multiply `positions` by their factor. YaRN multiplies its original length, because
        `positions` need not include the extension; the larger of both counts.
        """
        if self.yarn is not None:
            return max(positions, int(self.yarn.factor * self.yarn.length))
        return int(positions * (self.linear if self.dynamic is None else self.dynamic[0]))


def rope_of(keys: ConfigKeys, theta: float = 10000.0, layer_type: str | None = None, partial: bool = False) -> Rope:
    """Return the rotary embedding that the config asks for; `theta` is the base if the config has none.

    `layer_type` picks one entry of a config that lists embeddings by layer type. Both spellings are read: `rope_theta`
    with `rope_scaling`, and `rope_parameters`. If a config has both, `rope_scaling` decides, since users add that key.
    `partial`: the family may rotate only a part of each head (`partial_rotary_factor`); in other families that key has
    no defined meaning and is refused.

    Raises:
        ConfigError: a scaling or factor is not served, or a key that the scaling needs is missing.
    """
    scaling = scaling_of(keys, layer_type)
    if several := [name for name, given in scaling.data.items() if isinstance(given, Mapping)]:
        raise keys.error(f"rope_parameters by layer type ({several}) are not served here")
    kind = scaling.data.get("rope_type") or scaling.data.get("type") or "default"
    theta = scaling.number("rope_theta", keys.number("rope_theta", theta))
    share = scaling.number("partial_rotary_factor", keys.number("partial_rotary_factor", 1.0))
    if share != 1.0 and not (partial and share < 1.0):
        wanted = "must be at most 1" if partial else "other than 1 is not served"
        raise keys.error(f"partial_rotary_factor {wanted}, got {share}")
    if kind == "default":
        return Rope(theta, partial=share)
    if kind == "dynamic":
        if scaling.data.get("alpha") is not None:
            raise keys.error("rope_scaling dynamic with alpha is not served")
        factor = _required(scaling, kind, "factor")[0]
        return Rope(theta, partial=share, dynamic=(factor, longest_of(keys)))
    if kind == "linear":
        return Rope(theta, linear=_required(scaling, kind, "factor")[0], partial=share)
    if kind == "llama3":
        factor, low, high = _required(scaling, kind, "factor", "low_freq_factor", "high_freq_factor")
        return Rope(theta, (factor, low, high, original_length(keys, layer_type)), partial=share)
    if kind == "yarn":
        return Rope(theta, yarn=_yarn(keys, scaling, layer_type), partial=share)
    raise keys.error(f"rope_scaling type {kind!r} is not served; known: {', '.join(KINDS)}")


def _yarn(keys: ConfigKeys, scaling: ConfigKeys, layer_type: str | None) -> Yarn:
    """Return YaRN's numbers as `scaling` gives them."""
    length = original_length(keys, layer_type)
    if scaling.data.get("factor") is None and length != longest_of(keys):
        # DeepSeek-V3's config implies the factor in this way; `transformers` reads the config so too
        factor = longest_of(keys) / length
    else:
        factor = _required(scaling, "yarn", "factor")[0]
    attention = mscale(factor, 1.0)
    if scaling.data.get("mscale") and scaling.data.get("mscale_all_dim"):
        whole = mscale(factor, scaling.number("mscale_all_dim", 1.0))
        attention = mscale(factor, scaling.number("mscale", 1.0)) / whole
    attention *= scaling.number("attn_factor", 1.0)
    return Yarn(
        factor,
        scaling.number("beta_fast", 32.0),
        scaling.number("beta_slow", 1.0),
        length,
        scaling.flag("truncate", True),
        scaling.number("attention_factor", attention),
    )


def scaling_of(keys: ConfigKeys, layer_type: str | None = None) -> ConfigKeys:
    """Return the config's scaling, completed from `rope_parameters`. If scaling is listed by layer type, return that of
    `layer_type`.
    """
    new, old = keys.section("rope_parameters"), keys.section("rope_scaling")
    if layer_type is not None:
        new, old = (one.section(layer_type) if layer_type in one.data else one for one in (new, old))
    if not old.data:
        return new
    return old.over({name: new.data[name] for name in ("rope_theta", "partial_rotary_factor") if name in new.data})


def original_length(keys: ConfigKeys, layer_type: str | None = None) -> int:
    """Return the context length that a scaling starts from, by the rules of `transformers`.

    The first key that exists decides: the key at the top of the config (ignored if scaling is listed by layer type),
    the scaling's own key, `max_position_embeddings`.
    """
    name = "original_max_position_embeddings"
    by_type = layer_type is not None and any(
        layer_type in keys.section(place).data for place in ("rope_parameters", "rope_scaling")
    )
    if keys.data.get(name) is not None and not by_type:
        return keys.integer(name)
    return scaling_of(keys, layer_type).integer(name, longest_of(keys))


def longest_of(keys: ConfigKeys) -> int:
    """Return the maximum text length that a config states, before scaling."""
    return keys.integer("max_position_embeddings", 2048)


def mscale(factor: float, weight: float) -> float:
    """Return YaRN's magnitude factor for q and k at a scaling of `factor`; attention logits grow by its square."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _required(scaling: ConfigKeys, kind: str, *names: str) -> list[float]:
    missing = [name for name in names if scaling.data.get(name) is None]
    if missing:
        raise scaling.error(f"rope_scaling {kind} lacks {missing}")
    return [scaling.number(name, 1.0) for name in names]
