"""Llama 2 and 3.x; Mistral (one sliding window for all layers); Ministral 3 (position-dependent query scaling)."""

from dataclasses import replace

from cluster.arch.keys import ConfigKeys
from cluster.arch.layer import QueryScaling, geometry_of, with_sliding_window
from cluster.arch.rope import original_length, scaling_of
from cluster.arch.target import TargetArch, target_of


def llama(keys: ConfigKeys) -> TargetArch:
    """Return the target of `LlamaForCausalLM`."""
    layers = (geometry_of(keys),) * keys.integer("num_hidden_layers")
    return target_of(keys, "LlamaForCausalLM", layers)


def mistral(keys: ConfigKeys) -> TargetArch:
    """Return the target of `MistralForCausalLM`. All layers have the config's sliding window, by default 4096; null
    means no window.
    """
    num_layers = keys.integer("num_hidden_layers")
    window = None
    if keys.data.get("sliding_window", 4096) is not None:
        window = keys.integer("sliding_window", 4096)
    layers = with_sliding_window(geometry_of(keys), window, [window is not None] * num_layers)
    return target_of(keys, "MistralForCausalLM", layers)


def ministral3(keys: ConfigKeys) -> TargetArch:
    """Return the target of `Ministral3ForCausalLM`: Mistral with scaling of queries, without a default window."""
    scaling, unwindowed_keys = scaling_of(keys), keys.with_data({"sliding_window": None, **keys.data})
    query_scaling = None
    if scaling.data.get("llama_4_scaling_beta"):
        query_scaling = QueryScaling(original_length(keys), scaling.number("llama_4_scaling_beta", 0.1))
    return replace(mistral(unwindowed_keys), family="Ministral3ForCausalLM", query_scaling=query_scaling)
