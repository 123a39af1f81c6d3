"""Configs of published models, where they differ from the configs that `transformers` writes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cluster.arch import read_target
from cluster.arch.draft.widths import count_layers, draft_geometry
from cluster.arch.rope import Rope, mscale, rope_of
from cluster.arch.target import read_eos_token_ids
from cluster.config import ConfigError
from tests.support.config_keys import config_keys
from tests.support.families import family_checkpoint
from tests.support.family_sizes import rope
from tests.support.loading import check_target
from tests.unit.models.checkpoints import copy_of

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def test_attn_factor_multiplies_the_yarn_attention_factor() -> None:
    """In DeepSeek-R1-0528-Qwen3-8B, attn_factor 0.878 cancels the attention factor that follows from a factor of 4."""
    scaled_yarn = rope_of(config_keys(rope_scaling={**YARN, "attn_factor": 0.8782488562869419})).yarn
    assert scaled_yarn is not None and scaled_yarn.attention_factor == pytest.approx(1.0, abs=1e-4)
    plain_yarn = rope_of(config_keys(rope_scaling=YARN)).yarn
    assert plain_yarn is not None and plain_yarn.attention_factor == mscale(4.0, 1.0)
    explicit_yarn = rope_of(config_keys(rope_scaling={**YARN, "attn_factor": 0.5, "attention_factor": 1.25})).yarn
    assert explicit_yarn is not None and explicit_yarn.attention_factor == 1.25


def test_rope_scaling_is_used_together_with_rope_parameters() -> None:
    keys = config_keys(rope_parameters={"rope_type": "default", "rope_theta": 1e6}, rope_scaling=YARN)
    assert rope_of(keys) == rope_of(config_keys(rope_theta=1e6, rope_scaling=YARN))


def test_rope_parameters_by_layer_type_require_a_layer_type() -> None:
    nested_parameters = {"full_attention": {**YARN, "rope_theta": 1e6}, "sliding_attention": {"rope_type": "default"}}
    with pytest.raises(ConfigError, match=r"rope_parameters by layer type .* are not served here"):
        rope_of(config_keys(rope_parameters=nested_parameters))
    full_attention_rope = rope_of(config_keys(rope_parameters=nested_parameters), layer_type="full_attention")
    assert full_attention_rope.yarn is not None and full_attention_rope.theta == 1e6
    with_rope_scaling = config_keys(
        rope_parameters=nested_parameters, rope_scaling={"rope_type": "linear", "factor": 4.0}
    )
    assert rope_of(with_rope_scaling, layer_type="full_attention") == Rope(1e6, linear=4.0)


def test_yarn_factor_sets_max_position(tmp_path: Path) -> None:
    folder = copy_of(
        family_checkpoint("qwen2", "tied").folder, tmp_path / "long", **rope(YARN), max_position_embeddings=64
    )
    assert read_target(folder).max_position == 128


def test_dual_chunk_attention_limits_max_position(tmp_path: Path) -> None:
    """Qwen2.5-1M uses another kind of attention beyond a chunk."""
    chunks = {"chunk_size": 40, "local_size": 8, "original_max_position_embeddings": 40}
    changes = {"max_position_embeddings": 64, "dual_chunk_attention_config": chunks}
    assert (
        read_target(copy_of(family_checkpoint("qwen2", "tied").folder, tmp_path / "long", **changes)).max_position == 32
    )


@pytest.mark.parametrize("listed", [True, False])
def test_eos_token_ids_are_collected_from_all_files(listed: bool, tmp_path: Path) -> None:
    assert read_eos_token_ids(str(tmp_path), {"eos_token_id": 5}) == (5,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    assert read_eos_token_ids(str(tmp_path), {"eos_token_id": 7}) == (2, 5, 7)
    added_tokens = {"9": {"content": "<|im_end|>"}, "8": {"content": "<pad>"}}
    malformed_tokens = {"x": {"content": "<|im_end|>"}, "7": None}
    config = {
        "eos_token": {"content": "<|im_end|>"},
        "added_tokens_decoder": added_tokens if listed else malformed_tokens,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokens = [{"id": int(at), **entry} for at, entry in added_tokens.items()]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    assert read_eos_token_ids(str(tmp_path), {}) == (2, 5, 9)


def test_mimo_draft_has_biases_on_q_k_and_v_only() -> None:
    """In MiMo's config, `attention_bias` means the biases of q, k and v."""
    shapes = {f"layers.0.self_attn.{part}_proj.weight": (32, 32) for part in "qkvo"}
    shapes |= {f"layers.0.self_attn.{part}_proj.bias": (32,) for part in "qkv"}
    data = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "attention_bias": True}
    for kind in ("mimo", "qwen2"):
        geometry = draft_geometry("folder", config_keys(model_type=kind, **data), shapes)
        assert geometry.attention_bias and not geometry.out_bias
    with pytest.raises(ConfigError, match=r"attention_bias True but tensor .*o_proj\.bias' is missing"):
        draft_geometry("folder", config_keys(model_type="llama", **data), shapes)


def test_draft_with_a_midlayer_has_one_layer(tmp_path: Path) -> None:
    """The config of EAGLE3-Vicuna1.3-13B says 40 layers, which is the number of its target."""
    save_file({"midlayer.input_layernorm.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    shapes = {"layers.0.input_layernorm.weight": (2,)}
    assert count_layers(str(tmp_path), config_keys(num_hidden_layers=40), shapes) == 1


def test_pickled_weights_are_refused_with_a_remedy(tmp_path: Path) -> None:
    folder = Path(copy_of(family_checkpoint("qwen2", "tied").folder, tmp_path / "pickled"))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"only safetensors are read; \['pytorch_model.bin'\] are pickles: write"):
        check_target(str(folder))
