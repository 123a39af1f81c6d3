"""`check_models` reads only the headers of checkpoints, and refuses settings with which a start would fail."""

import json
from pathlib import Path

import pytest

from cluster.arch.resolve import check_models
from cluster.arch.safetensors.stored import stored_shapes
from cluster.config import ConfigError, EngineConfig
from cluster.models.checkpoint import Checkpoint
from tests.support.families import family_checkpoint
from tests.support.tiny_checkpoints import draft_folder, target_folder


def settings(**changes: object) -> EngineConfig:
    target = target_folder()
    pair = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": draft_folder(target)}
    return EngineConfig.model_validate({"model_path": target, **pair, **changes})


def test_stored_shapes_match_the_shapes_of_the_checkpoint() -> None:
    for folder in (target_folder(), draft_folder(target_folder())):
        assert stored_shapes(folder) == Checkpoint(folder).shapes


@pytest.mark.parametrize("tp, dp", [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (8, 8)])
def test_check_models_accepts_valid_tp_and_dp_sizes(tp: int, dp: int) -> None:
    check_models(settings(tp_size=tp, attn_dp_size=dp))


def test_check_models_refuses_heads_that_do_not_split_over_ranks() -> None:
    with pytest.raises(ConfigError, match="the target: 4 attention heads and 2 KV heads cannot be split over 3 ranks"):
        check_models(settings(tp_size=3))
    check_models(settings(tp_size=3, attn_dp_size=3))


def test_check_models_refuses_tp_size_beyond_the_mlp_width() -> None:
    with pytest.raises(ConfigError, match="cannot be split over tp_size 1024; lower tp_size"):
        check_models(settings(tp_size=1024, attn_dp_size=1024))


def sparse(case: str = "two of four", family: str = "mixtral", **changes: object) -> EngineConfig:
    return EngineConfig.model_validate({"model_path": family_checkpoint(family, case).folder, **changes})


@pytest.mark.parametrize("mesh", [(2, 1, 2), (4, 4, 4), (4, 2, 2)])
def test_check_models_accepts_ep_sizes_that_divide_the_experts(mesh: tuple[int, int, int]) -> None:
    tp, dp, ep = mesh
    check_models(sparse(tp_size=tp, attn_dp_size=dp, ep_size=ep))


def test_check_models_refuses_ep_sizes_without_enough_experts() -> None:
    with pytest.raises(ConfigError, match="ep_size 8 leaves ranks without any of 4 experts; lower it"):
        check_models(sparse(tp_size=8, attn_dp_size=8, ep_size=8))
    for settings_without_experts in (
        settings(tp_size=2, ep_size=2),
        EngineConfig(model_path=target_folder(), tp_size=2, ep_size=2),
    ):
        with pytest.raises(ConfigError, match="ep_size 2 is for experts, and no model that is sharded has several"):
            check_models(settings_without_experts)


def test_check_models_refuses_expert_columns_that_do_not_split() -> None:
    """An expert's 12 columns cannot be split over 24 ranks. With ep_size 4 an expert is split over only 6 ranks."""
    narrow_experts = {"family": "deepseek_v3", "case": "low-rank queries", "attn_dp_size": 24, "tp_size": 24}
    with pytest.raises(ConfigError, match="an expert of 12 columns cannot be split over tp_size 24; lower tp_size"):
        check_models(sparse(**narrow_experts))  # type: ignore[arg-type]
    check_models(sparse(**narrow_experts, ep_size=4))  # type: ignore[arg-type]


def test_only_a_sharded_draft_must_split_over_the_ranks(tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    source = Path(draft_folder(target_folder()))
    (draft / "model.safetensors").symlink_to(source / "model.safetensors")
    keys = json.loads((source / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**keys, "num_attention_heads": 3, "num_key_value_heads": 3}))
    changes = {"tp_size": 4, "speculative_draft_model_path": str(draft)}
    with pytest.raises(ConfigError, match=r"the draft: 3 .* or set speculative_draft_parallel to replicated"):
        check_models(settings(**changes))
    check_models(settings(**changes, speculative_draft_parallel="replicated"))


def test_check_models_refuses_a_draft_of_another_target_width() -> None:
    wide = target_folder(hidden=64)
    with pytest.raises(ConfigError, match="does not fit the target: target_hidden_size 32 against 64"):
        check_models(settings(model_path=wide))


def test_check_models_refuses_topk_above_the_draft_vocabulary() -> None:
    narrow = draft_folder(target_folder(), draft_vocab=16)
    with pytest.raises(ConfigError, match="speculative_eagle_topk 20 is more than the draft's vocabulary of 16; lower"):
        check_models(
            settings(speculative_draft_model_path=narrow, speculative_eagle_topk=20, speculative_num_draft_tokens=21)
        )
