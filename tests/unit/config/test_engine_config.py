"""Settings: aliases, suggestions, limits that depend on several settings, and messages that name the setting."""

from typing import Any

import pytest

from cluster.config import ConfigError, EngineConfig
from cluster.config.aliases import ALIASES, SPECULATIVE_CONFIG
from cluster.config.resolved import ResolvedSettings
from cluster.config.tree_shape import DEFAULT_NUM_STEPS, DEFAULT_TOPK, NO_SPECULATION, TreeShape, tree_shape

EAGLE = {"model_path": "target", "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "draft"}
# A valid value for each setting that has an alias.
VALUES: dict[str, Any] = {
    "model_path": "m",
    "tokenizer_path": "t",
    "tp_size": 2,
    "attn_dp_size": 2,
    "ep_size": 2,
    "page_size": 4,
    "context_length": 128,
    "max_running_requests": 3,
    "chunked_prefill_size": 64,
    "random_seed": 7,
    "mem_fraction_static": 0.5,
    "speculative_draft_model_path": "d",
    "capture_sizes": (1, 2, 4),
}


def alias_value(alias: str, name: str) -> Any:
    """The value to set under `alias`. vLLM's `enable_expert_parallel` is a switch: true sets ep_size to tp_size."""
    return True if alias == "enable_expert_parallel" else VALUES[name]


def config(**kwargs: Any) -> EngineConfig:
    return EngineConfig.from_kwargs({"model_path": "target", **kwargs})


def eagle(**kwargs: Any) -> EngineConfig:
    return EngineConfig.from_kwargs({**EAGLE, **kwargs})


@pytest.mark.parametrize(
    ("typo", "suggestion"),
    [
        ("pagesize", "page_size"),
        ("modelpath", "model_path"),
        ("speculative_numsteps", "speculative_num_steps"),
        ("speculative_eagle_top_k", "speculative_eagle_topk"),
        ("max_num_seq", "max_num_seqs"),
        ("tensor_parallel_sise", "tensor_parallel_size"),
    ],
)
def test_unknown_setting_suggests_the_nearest_name(typo: str, suggestion: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{typo}'; did you mean '{suggestion}'\?"):
        config(**{typo: 1})


def test_unknown_setting_without_similar_name_gets_no_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'zzz'$"):
        config(zzz=1)


def test_model_validate_refuses_unknown_settings() -> None:
    with pytest.raises(ValueError, match=r"'pagesize'; did you mean 'page_size'\?"):
        EngineConfig.model_validate({"model_path": "m", "pagesize": 4})


@pytest.mark.parametrize(("alias", "name"), sorted(ALIASES.items()))
def test_every_alias_sets_its_setting(alias: str, name: str) -> None:
    assert name in EngineConfig.model_fields
    other_settings = {key: value for key, value in {**EAGLE, "tp_size": 2, "capture": "on"}.items() if key != name}
    engine_config = EngineConfig.from_kwargs({**other_settings, alias: alias_value(alias, name)})
    assert getattr(engine_config, name) == VALUES[name]


@pytest.mark.parametrize(("alias", "name"), sorted(ALIASES.items()))
def test_setting_given_together_with_its_alias_is_refused(alias: str, name: str) -> None:
    value = alias_value(alias, name)
    with pytest.raises(ConfigError, match=f"'{alias}' sets '{name}', which is already set"):
        EngineConfig.from_kwargs({name: value, alias: value})
    with pytest.raises(ConfigError, match=f"'{name}' sets '{name}', which is already set"):
        EngineConfig.from_kwargs({alias: value, name: value})


def test_ep_size_must_divide_tp_size() -> None:
    assert [config(tp_size=4, ep_size=parts).ep_size for parts in (1, 2, 4)] == [1, 2, 4]
    for tp, parts in ((1, 2), (4, 3), (2, 4)):
        with pytest.raises(ConfigError, match=f"ep_size {parts} must divide tp_size {tp}; set it to tp_size, or to 1"):
            config(tp_size=tp, ep_size=parts)
    assert config(enable_expert_parallel=True, tensor_parallel_size=4).ep_size == 4
    assert config(enable_expert_parallel=True).ep_size == config(enable_expert_parallel=False, tp_size=4).ep_size == 1
    with pytest.raises(ConfigError, match="enable_expert_parallel must be true or false, got 2; ep_size takes"):
        config(enable_expert_parallel=2, tp_size=2)


def test_capture_sizes_need_capture_and_must_ascend() -> None:
    assert (
        config(cuda_graph_bs=[1, 4]).capture_sizes == config(capture="on", capture_sizes=[1, 4]).capture_sizes == (1, 4)
    )
    with pytest.raises(
        ConfigError, match="capture_sizes is for programs, and with capture off there are none; set cap"
    ):
        config(capture="off", capture_sizes=[1])
    for sizes in ([], [0, 1], [2, 2], [4, 2]):
        with pytest.raises(ConfigError, match=r"capture_sizes must be positive and ascend, got \["):
            config(capture="on", capture_sizes=sizes)


def test_speculative_config_maps_to_the_engine_settings() -> None:
    engine_config = config(speculative_config={"method": "eagle3", "model": "draft", "num_speculative_tokens": 5})
    assert engine_config.speculative_algorithm == "EAGLE3"
    assert engine_config.speculative_draft_model_path == "draft"
    assert engine_config.speculative_num_steps == 5
    assert tree_shape(engine_config) == TreeShape(num_steps=5, topk=1, num_draft_tokens=6, max_forced_nodes=8)
    assert set(SPECULATIVE_CONFIG.values()) <= set(EngineConfig.model_fields)
    for method, algorithm in (("eagle", "EAGLE"), ("deepseek_mtp", "NEXTN"), ("mtp", "NEXTN"), (None, None)):
        engine_config = config(speculative_config={"method": method, "model": "draft"})
        assert engine_config.speculative_algorithm == algorithm
    with pytest.raises(ConfigError, match="speculative_algorithm"):
        config(speculative_config={"method": 3, "model": "draft"})


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"speculative_config": {"methd": "eagle3"}}, r"'speculative_config.methd'; did you mean 'method'\?"),
        ({"speculative_config": "eagle3"}, "speculative_config must be a mapping"),
        (
            {"speculative_config": {"model": "a"}, "speculative_draft_model": "b"},
            "'speculative_draft_model' sets 'speculative_draft_model_path', which is already set",
        ),
        (
            {"speculative_num_steps": 3, "speculative_config": {"num_speculative_tokens": 3}},
            "'speculative_config.num_speculative_tokens' sets 'speculative_num_steps'",
        ),
    ],
)
def test_speculative_config_refuses_unknown_and_duplicate_keys(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**kwargs)


@pytest.mark.parametrize(
    ("kwargs", "message_parts"),
    [
        ({}, ["model_path"]),
        ({"model_path": "m", "page_size": "many"}, ["page_size"]),
        ({"model_path": "m", "kv_cache_dtype": "fp8_e5m2"}, ["kv_cache_dtype: 'fp8_e5m2'", "e5m2", "set fp8_e4m3, or"]),
        ({"model_path": "m", "kv_cache_dtype": "fp8"}, ["kv_cache_dtype: 'fp8' is not served", "set fp8_e4m3"]),
        ({"model_path": "m", "kv_cache_dtype": "int8"}, ["kv_cache_dtype: 'int8'", "auto for the dtype of the model"]),
        (
            {"model_path": "m", "attention_backend": "flashinfer", "kv_cache_dtype": "fp8_e4m3"},
            ["attention_backend flashinfer", "kv_cache_dtype fp8_e4m3", "set kv_cache_dtype to auto, or", "to triton"],
        ),
        (
            {"model_path": "m", "chunked_prefill_size": 0},
            ["chunked_prefill_size", "-1 for as many rows as context_length"],
        ),
        ({"model_path": "m", "prefill_share": 1.0}, ["prefill_share", "less than 1"]),
        ({"model_path": "m", "tp_size": 3, "attn_dp_size": 2}, ["attn_dp_size 2", "tp_size 3"]),
        ({"model_path": "m", "speculative_num_steps": 2}, ["speculative_num_steps", "speculative_draft_model_path"]),
        ({"model_path": "m", "speculative_eagle_topk": 2}, ["speculative_eagle_topk", "speculative_draft_model_path"]),
        ({"model_path": "m", "speculative_batch_tiers": {4: 1}}, ["speculative_batch_tiers needs speculative_draft"]),
        (
            {"model_path": "m", "speculative_draft_overrides": {"recurrent": "pre"}},
            ["speculative_draft_overrides needs speculative_draft_model_path"],
        ),
        ({"model_path": "m", "gpu_memory_utilization": 1.2}, ["mem_fraction_static"]),
        ({"model_path": "m", "max_total_tokens": 9, "kv_cache_gb": 1}, ["max_total_tokens and kv_cache_gb", "one"]),
        ({"model_path": "m", "speculative_num_draft_tokens": 4}, ["speculative_num_draft_tokens"]),
        ({"model_path": "m", "speculative_algorithm": "EAGLE3"}, ["speculative_draft_model_path"]),
    ],
)
def test_invalid_value_error_names_its_setting(kwargs: dict[str, Any], message_parts: list[str]) -> None:
    with pytest.raises(ValueError) as captured_error:
        EngineConfig.from_kwargs(kwargs)
    for message_part in message_parts:
        assert message_part in str(captured_error.value)


def test_batch_tier_begins_at_its_own_number_of_requests() -> None:
    tiered = config(**{**EAGLE, "speculative_num_steps": 3, "speculative_batch_tiers": {3: 1, 5: 0}})
    assert [ResolvedSettings.from_settings(tiered).max_tier(decodes) for decodes in range(1, 7)] == [
        3,
        3,
        1,
        1,
        0,
        0,
    ]


def test_no_speculation_is_a_tree_of_one_node() -> None:
    assert tree_shape(config()) == NO_SPECULATION == TreeShape(num_steps=0, topk=1, num_draft_tokens=1)
    assert NO_SPECULATION.window == 1


@pytest.mark.parametrize(
    ("kwargs", "expected_shape"),
    [
        ({}, (DEFAULT_NUM_STEPS, DEFAULT_TOPK, None)),
        ({"speculative_num_steps": 5, "speculative_eagle_topk": 1}, (5, 1, 6)),
        ({"speculative_num_steps": 5, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 6}, (5, 1, 6)),
        ({"speculative_num_steps": 5, "speculative_eagle_topk": 4}, (5, 4, 20)),
        ({"speculative_num_steps": 1, "speculative_eagle_topk": 2}, (1, 2, 3)),
        ({"speculative_num_steps": 5, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 24}, (5, 4, 24)),
        ({"speculative_num_steps": 5, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 69}, (5, 4, 69)),
    ],
)
def test_tree_shape_fills_in_defaults(kwargs: dict[str, Any], expected_shape: tuple[int, int, int | None]) -> None:
    filled_shape = tree_shape(eagle(**kwargs))
    assert (filled_shape.num_steps, filled_shape.topk) == expected_shape[:2]
    assert filled_shape.num_draft_tokens == (expected_shape[2] or filled_shape.num_draft_tokens) >= 2


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"speculative_num_steps": 5, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 8},
            r"speculative_num_draft_tokens must be speculative_num_steps \+ 1 = 6",
        ),
        (
            {"speculative_num_steps": 5, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 70},
            "speculative_num_draft_tokens 70 is more than the 69 nodes",
        ),
        (
            {"speculative_num_steps": 1, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 6},
            "speculative_num_draft_tokens 6 is more than the 5 nodes",
        ),
    ],
)
def test_impossible_tree_shape_is_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tree_shape(eagle(**kwargs))


@pytest.mark.parametrize(
    ("shape", "window"),
    [((5, 1, 6), 6), ((5, 4, 24), 24), ((5, 8, 16), 32), ((1, 4, 2), 2), ((5, 4, 2), 16), ((8, 1, 2), 9)],
)
def test_window_fits_the_tree_the_branches_and_the_extend_rows(shape: tuple[int, int, int], window: int) -> None:
    assert TreeShape(num_steps=shape[0], topk=shape[1], num_draft_tokens=shape[2]).window == window
