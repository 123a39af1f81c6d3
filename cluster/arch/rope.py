"""Rotary embeddings as configs describe them: base, scaling, and the effect of scaling on the softmax."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from cluster.arch.keys import ConfigKeys

ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "proportional", "yarn")


class Yarn(NamedTuple):
    """YaRN (arXiv 2309.00071): frequencies that turn less than `beta_slow` times over `original_length` are divided by
    `factor`.

    Frequencies that turn more than `beta_fast` times are kept; frequencies between the two limits are blended.
    `original_length` is the original context length. `attention_factor` multiplies cos and sin. Unless the config gives
    it, it is computed, and includes the config's `attn_factor` (as in vLLM and SGLang; `transformers` has no such key).
    `truncate`: the blended range is rounded to whole dimensions.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_length: int
    truncate: bool
    attention_factor: float


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding in the half-split (neox) layout, with at most one kind of scaling.

    `llama3` is (factor, low_freq_factor, high_freq_factor, original length). `linear` divides every frequency.
    `dynamic` is (factor, length): from position `length` on, frequencies decrease with the position; a position has the
    frequencies that `transformers` uses for a text that ends at that position. `partial` is the share of a head's
    dimensions, from the first on, that is rotated. `proportional` is the share of the pairs that turn, from the first
    on: the frequencies are those of a whole head, and the other pairs have frequency 0 (Gemma-4).
    """

    theta: float
    llama3: tuple[float, float, float, int] | None = None
    linear: float = 1.0
    yarn: Yarn | None = None
    partial: float = 1.0
    dynamic: tuple[float, int] | None = None
    proportional: float = 1.0

    def max_positions(self, stated_positions: int) -> int:
        """Return the maximum number of positions, as in vLLM, if the config states `stated_positions`.

        Linear and dynamic scaling multiply `stated_positions` by their factor. YaRN multiplies its original length,
        because `stated_positions` may or may not include the extension; the larger number is returned.
        """
        if self.yarn is not None:
            return max(stated_positions, int(self.yarn.factor * self.yarn.original_length))
        return int(stated_positions * (self.linear if self.dynamic is None else self.dynamic[0]))


def rope_of(
    keys: ConfigKeys, theta: float = 10000.0, layer_type: str | None = None, allow_partial_rotary: bool = False
) -> Rope:
    """Return the rotary embedding that the config asks for; `theta` is the base if the config has none.

    `layer_type` picks one entry of a config that lists embeddings by layer type. Both spellings are read: `rope_theta`
    with `rope_scaling`, and `rope_parameters`. If a config has both, `rope_scaling` decides, since users add that key.
    `allow_partial_rotary`: the family may rotate only a part of each head (`partial_rotary_factor`); in other families
    that key has no defined meaning and is refused.

    Raises:
        ConfigError: a scaling or factor is not served, or a key that the scaling needs is missing.
    """
    scaling = scaling_of(keys, layer_type)
    if by_layer_type := [name for name, value in scaling.data.items() if isinstance(value, Mapping)]:
        raise keys.error(f"rope_parameters by layer type ({by_layer_type}) are not served here")
    scaling_type = scaling.data.get("rope_type") or scaling.data.get("type") or "default"
    theta = scaling.number("rope_theta", keys.number("rope_theta", theta))
    rotary_factor = scaling.number("partial_rotary_factor", keys.number("partial_rotary_factor", 1.0))
    if scaling_type == "proportional":
        if not 0 < rotary_factor <= 1:
            raise keys.error(f"partial_rotary_factor must be above 0 and at most 1, got {rotary_factor}")
        return Rope(theta, linear=scaling.number("factor", 1.0), proportional=rotary_factor)
    if rotary_factor != 1.0 and not (allow_partial_rotary and rotary_factor < 1.0):
        requirement = "must be at most 1" if allow_partial_rotary else "other than 1 is not served"
        raise keys.error(f"partial_rotary_factor {requirement}, got {rotary_factor}")
    if scaling_type == "default":
        return Rope(theta, partial=rotary_factor)
    if scaling_type == "dynamic":
        if scaling.data.get("alpha") is not None:
            raise keys.error("rope_scaling dynamic with alpha is not served")
        factor = _required_numbers(scaling, scaling_type, "factor")[0]
        return Rope(theta, partial=rotary_factor, dynamic=(factor, max_positions_of(keys)))
    if scaling_type == "linear":
        return Rope(theta, linear=_required_numbers(scaling, scaling_type, "factor")[0], partial=rotary_factor)
    if scaling_type == "llama3":
        factor, low, high = _required_numbers(scaling, scaling_type, "factor", "low_freq_factor", "high_freq_factor")
        return Rope(theta, (factor, low, high, original_length(keys, layer_type)), partial=rotary_factor)
    if scaling_type == "yarn":
        return Rope(theta, yarn=_read_yarn(keys, scaling, layer_type), partial=rotary_factor)
    raise keys.error(f"rope_scaling type {scaling_type!r} is not served; known: {', '.join(ROPE_TYPES)}")


def _read_yarn(keys: ConfigKeys, scaling: ConfigKeys, layer_type: str | None) -> Yarn:
    """Return YaRN's numbers as `scaling` gives them, with YaRN's defaults for missing keys."""
    original_positions = original_length(keys, layer_type)
    if scaling.data.get("factor") is None and original_positions != max_positions_of(keys):
        # DeepSeek-V3's config implies the factor by these two lengths; `transformers` computes it in the same way.
        factor = max_positions_of(keys) / original_positions
    else:
        factor = _required_numbers(scaling, "yarn", "factor")[0]
    attention = mscale(factor, 1.0)
    if scaling.data.get("mscale") and scaling.data.get("mscale_all_dim"):
        all_dims_scale = mscale(factor, scaling.number("mscale_all_dim", 1.0))
        attention = mscale(factor, scaling.number("mscale", 1.0)) / all_dims_scale
    attention *= scaling.number("attn_factor", 1.0)
    return Yarn(
        factor,
        scaling.number("beta_fast", 32.0),
        scaling.number("beta_slow", 1.0),
        original_positions,
        scaling.flag("truncate", True),
        scaling.number("attention_factor", attention),
    )


def scaling_of(keys: ConfigKeys, layer_type: str | None = None) -> ConfigKeys:
    """Return `rope_scaling`, completed from `rope_parameters`; without `rope_scaling`, return `rope_parameters`. If
    they are listed by layer type, return those of `layer_type`.
    """
    parameters, scaling = keys.section("rope_parameters"), keys.section("rope_scaling")
    if layer_type is not None:
        parameters, scaling = (
            section.section(layer_type) if layer_type in section.data else section for section in (parameters, scaling)
        )
    if not scaling.data:
        return parameters
    return scaling.with_defaults(
        {name: parameters.data[name] for name in ("rope_theta", "partial_rotary_factor") if name in parameters.data}
    )


def original_length(keys: ConfigKeys, layer_type: str | None = None) -> int:
    """Return the context length that a scaling starts from, by the rules of `transformers`.

    The first of these keys that exists decides: `original_max_position_embeddings` at the top of the config (ignored if
    scaling is listed by layer type), the same key inside the scaling, `max_position_embeddings`.
    """
    name = "original_max_position_embeddings"
    by_type = layer_type is not None and any(
        layer_type in keys.section(section).data for section in ("rope_parameters", "rope_scaling")
    )
    if keys.data.get(name) is not None and not by_type:
        return keys.integer(name)
    return scaling_of(keys, layer_type).integer(name, max_positions_of(keys))


def max_positions_of(keys: ConfigKeys) -> int:
    """Return the maximum text length that a config states, before scaling; 2048 if it states none."""
    return keys.integer("max_position_embeddings", 2048)


def mscale(factor: float, weight: float) -> float:
    """Return YaRN's factor for the magnitude of q and k, for a scaling of `factor`; attention logits grow by its
    square. `weight` is the config's `mscale` or `mscale_all_dim`.
    """
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _required_numbers(scaling: ConfigKeys, scaling_type: str, *names: str) -> list[float]:
    missing = [name for name in names if scaling.data.get(name) is None]
    if missing:
        raise scaling.error(f"rope_scaling {scaling_type} lacks {missing}")
    return [scaling.number(name, 1.0) for name in names]
