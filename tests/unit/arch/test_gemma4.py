"""Reading the config of Gemma-4: the sizes of full layers, layers that borrow, and values that are refused."""

from typing import Any

import pytest

from cluster.arch.families.gemma4 import gemma4, gemma4_layers
from cluster.arch.rope import Rope
from cluster.config import ConfigError
from tests.support.config_keys import config_keys

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "head_dim": 8,
    "global_head_dim": 16,
    "vocab_size": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}
MOE = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}


def test_sizes_of_full_layers_are_read_from_both_spellings() -> None:
    """`transformers` writes them layer by layer; published configs have keys for all full layers."""
    changes = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    published = gemma4_layers(config_keys(**SIZES, **changes))
    own = {str(index): {"head_dim": 16, "num_key_value_heads": 1} for index in (1, 3, 5)}
    sizes = {key: value for key, value in SIZES.items() if key != "global_head_dim"}
    assert gemma4_layers(config_keys(**sizes, attention_k_eq_v=True, per_layer_config=own)) == published
    assert (published[0].head_dim, published[0].kv_heads) == (8, 2)
    assert (published[1].head_dim, published[1].kv_heads) == (16, 1)
    assert published[1].keys_as_values and not published[0].keys_as_values
    assert published[1].rope == Rope(1e6, proportional=0.25) and published[0].rope == Rope(1e4)


def test_layers_borrow_from_the_last_own_layer_of_their_type() -> None:
    layers = gemma4_layers(config_keys(**SIZES, num_kv_shared_layers=3, use_double_wide_mlp=True))
    assert [layer.borrows for layer in layers] == [None, None, None, 1, 2, 1]
    assert [layer.intermediate for layer in layers] == [48, 48, 48, 96, 96, 96]


def test_the_last_layer_is_always_a_full_one() -> None:
    layers = gemma4_layers(config_keys(**SIZES | {"layer_types": ["full_attention"] + ["sliding_attention"] * 5}))
    assert [layer.sliding_window for layer in layers] == [None, 512, 512, 512, 512, None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not served"),
        ({"num_kv_shared_layers": 7}, "num_kv_shared_layers 7 must be below num_hidden_layers 6"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers 5: layer 1 has type full_attention, and no layer before"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers must be an integer from 0"),
        ({**MOE, "top_k_experts": 5}, "top_k_experts 5 exceeds num_experts 4"),
        ({**MOE, "num_experts": None}, "num_experts must be a positive integer"),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "num_key_value_heads 3 of layer 1 must divide 4"),
        ({"hidden_activation": "silu"}, "hidden_activation must be gelu_pytorch_tanh"),
        ({"layer_types": ["chunked_attention"] * 6}, "layer_types .'chunked_attention'. are recognised and not served"),
        ({"hidden_size_per_layer_input": -2}, "hidden_size_per_layer_input must be an integer from 0"),
    ],
)
def test_bad_values_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gemma4_layers(config_keys(**SIZES | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers 6 must be below num_hidden_layers 6"),
        ({"vocab_size_per_layer_input": 63}, "vocab_size_per_layer_input must be at least vocab_size"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2}}},
            "partial_rotary_factor must be above 0 and at most 1, got 2",
        ),
    ],
)
def test_bad_values_of_a_target_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gemma4(config_keys(**SIZES | changes))
