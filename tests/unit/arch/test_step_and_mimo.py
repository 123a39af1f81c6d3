"""Reading the configs of Step-3.5 and MiMo-V2: lists with an entry for each layer, the rope of each layer type, and
values that are refused.
"""

from typing import Any

import pytest

from cluster.arch import read_target
from cluster.arch.families.mimo import mimo_v2_layers
from cluster.arch.families.step import step3p5_layer
from cluster.config import ConfigError
from tests.parity.pairs import draft_of
from tests.support.config_keys import config_keys
from tests.support.loading import check_draft, read_draft_spec
from tests.support.tiny_checkpoints import target_folder

STEP: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 4,
    "num_attention_groups": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "layer_types": ["full_attention", "full_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "dense", "sparse"],
}
MIMO: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}


def test_the_types_of_mtp_layers_may_be_in_lists_of_their_own() -> None:
    """`transformers` cuts the lists at `num_hidden_layers`, and writes the rest under `mtp_layer_types`."""
    changes = {
        "layer_types": STEP["layer_types"][:2],
        "mtp_layer_types": STEP["layer_types"][2:],
        "mlp_layer_types": STEP["mlp_layer_types"][:2],
        "mtp_mlp_layer_types": STEP["mlp_layer_types"][2:],
    }
    for index in range(3):
        layer = step3p5_layer(config_keys(**STEP), index)
        assert layer == step3p5_layer(config_keys(**STEP | changes), index)
        assert (layer.sliding_window is not None) is (layer.moe is not None) is (index == 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"] * 2}, "layer_types must have an entry for layer 2"),
        ({"layer_types": 3}, "layer_types must have an entry for layer 2, got 3"),
        ({"layer_types": ["chunked"] * 3}, "layer_types must list full_attention or sliding_attention, got 'chunked'"),
        ({"mlp_layer_types": ["moe"] * 3}, "mlp_layer_types must list dense or sparse, got 'moe' for layer 2"),
        ({"swiglu_limits_shared": [1, 1, -1]}, "swiglu_limits_shared must list numbers from 0, .* got -1 for layer 2"),
        ({"swiglu_limits_shared": [1, 1, "1"]}, "swiglu_limits_shared must list numbers from 0"),
        ({"partial_rotary_factors": [1.0, 1.0, 0.4]}, "partial_rotary_factor 0.4 of head_dim 8 is 3 dimensions"),
    ],
)
def test_invalid_lists_of_step_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        step3p5_layer(config_keys(**STEP | changes), 2)


def test_one_rotary_factor_of_step_is_for_all_layers() -> None:
    assert step3p5_layer(config_keys(**STEP, partial_rotary_factor=0.5), 2).rope.partial == 0.5


def test_rope_parameters_of_mimo_without_layer_types_are_for_both() -> None:
    """Only the base of sliding attention has a key of its own."""
    parameters = {"rope_type": "default", "rope_theta": 3e4, "partial_rotary_factor": 0.5}
    full, sliding = mimo_v2_layers(config_keys(**MIMO, rope_parameters=parameters, swa_rope_theta=2e4))
    assert (full.rope.theta, full.rope.partial) == (3e4, 0.5)
    assert (sliding.rope.theta, sliding.rope.partial) == (2e4, 0.5)
    full, sliding = mimo_v2_layers(config_keys(**MIMO))
    assert (full.rope.theta, sliding.rope.theta, full.rope.partial) == (5e6, 1e4, 0.334)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swa_num_key_value_heads": 3}, "swa_num_key_value_heads 3 must divide swa_num_attention_heads 4"),
        ({"partial_rotary_factor": 0.334, "swa_head_dim": 10}, "0.334 of head_dim 10 is 3 dimensions"),
    ],
)
def test_invalid_sizes_of_mimo_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mimo_v2_layers(config_keys(**MIMO | changes))


@pytest.mark.parametrize("name", ["mimo-v2 x3", "step-3.5 x3"])
def test_their_drafts_read_the_hidden_state_before_the_final_norm(name: str) -> None:
    """SGLang's classes of these targets return it, `hidden_states_before_norm`, for their drafts."""
    folder, target = draft_of(name), read_target(target_folder())
    spec = check_draft(folder, target)
    assert spec.use_aux_hidden_state and spec.aux_boundaries == (target.num_layers,)
    assert {choice.fact: choice.value for choice in spec.choices}["target_hidden"] == "pre"
    overridden = read_draft_spec(folder, target, {"target_hidden": "post"})
    assert not overridden.use_aux_hidden_state and overridden.num_aux == 1
