"""Reading the config of Llama-4: which layers are rotated, see chunks, and have experts; values that are refused."""

from typing import Any

import pytest

from cluster.arch.families.llama4 import llama4
from cluster.arch.layer import QueryScaling
from cluster.config import ConfigError
from tests.support.config_keys import config_keys

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
}


def test_a_published_config_without_lists_has_the_layers_of_scout() -> None:
    target = llama4(config_keys(**SIZES | {"num_hidden_layers": 8}))
    assert [layer.rotated for layer in target.layers] == [True, True, True, False] * 2
    assert [layer.visible_span for layer in target.layers] == [-8192, -8192, -8192, None] * 2
    assert [layer.bare_qk_norm for layer in target.layers] == [True, True, True, False] * 2
    assert all(layer.moe is not None and layer.interleaved for layer in target.layers)
    assert target.query_scaling == QueryScaling(8192, 0.1, 1, (3, 7))


def test_layers_without_experts_have_the_wide_mlp() -> None:
    """Maverick has experts in every second layer."""
    layers = llama4(config_keys(**SIZES, interleave_moe_layer_step=2, intermediate_size_mlp=48)).layers
    assert [layer.moe is not None for layer in layers] == [False, True, False, True]
    assert [layer.intermediate for layer in layers if layer.moe is None] == [48, 48]
    assert [layer.moe is not None for layer in llama4(config_keys(**SIZES, moe_layers=[0])).layers] == [True] + [
        False
    ] * 3


def test_without_a_chunk_size_all_layers_see_all_of_the_text() -> None:
    layers = llama4(config_keys(**SIZES, attention_chunk_size=None)).layers
    assert {layer.visible_span for layer in layers} == {None} and not any(layer.chunked for layer in layers)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"no_rope_layers": [1, 0]}, "no_rope_layers must have 0 or 1 for each of the 4 layers, got .1, 0."),
        ({"no_rope_layers": [1, 2, 1, 1]}, "no_rope_layers must have 0 or 1"),
        ({"layer_types": ["full_attention"]}, "layer_types must list the 4 layers"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types .'sliding_attention'. are recognised and not served"),
        ({"moe_layers": [4]}, "moe_layers must be numbers of the 4 layers, got .4."),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok 17 exceeds num_local_experts 16"),
        ({"attention_chunk_size": 0}, "attention_chunk_size must be a positive integer, got 0"),
        ({"floor_scale": -1}, "floor_scale must be a positive integer"),
    ],
)
def test_bad_values_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        llama4(config_keys(**SIZES | changes))
