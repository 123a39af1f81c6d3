"""Only the resolving modules turn settings into resolved values. All other modules read the resolved values."""

import ast
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from cluster.arch.resolve import resolve_models
from cluster.config import ConfigError, EngineConfig
from cluster.config.resolved import UNLIMITED, ResolvedSettings, tokenizer_folder
from cluster.config.tree_shape import NO_SPECULATION
from tests.parity.harness import tiny_pair
from tests.support.sources import ROOT, SOURCES, nodes_of

RESOLVING_MODULES = ("cluster/config/", "cluster/arch/resolve.py")
RESOLVED_SETTINGS = {
    "chunked_prefill_size",
    "context_length",
    "dtype",
    "kv_cache_dtype",
    "mixed_prefill_size",
    "overlap",
    "speculative_algorithm",
    "speculative_batch_tiers",
    "speculative_draft_parallel",
    "speculative_eagle_topk",
    "speculative_forced_rows",
    "speculative_forced_tokens",
    "speculative_mode",
    "speculative_num_draft_tokens",
    "speculative_num_steps",
}
"""Settings that the resolving modules resolve: no other module reads them from the settings."""
ALLOWED_READS = {
    ("cluster/engine/rank_info.py", "speculative_batch_tiers"),  # `RankInfo` contains the setting
    ("cluster/engine/workspace.py", "chunked_prefill_size"),  # a message quotes the setting
}
ALLOWED_AUTO_COMPARISONS = {
    "cluster/arch/dtypes.py": "dtype and kv_cache_dtype: the resolving modules call it",
    "cluster/engine/backends.py": "attention_backend: a machine knows its backends when it starts",
    "cluster/engine/captures.py": "capture: whether kernels can capture is known when models are loaded",
    "cluster/dp_attention/plan.py": "dp_padding: decided again for every step",
    "cluster/api/serve/settings.py": "device of a gang: depends on the devices of the cluster",
    "cluster/chat/formats/choose.py": "not a setting of the engine",
    "cluster/api/core/tools.py": "tool_choice of a request",
    "cluster/api/openai/responses/tools.py": "tool_choice of a request",
}
SETTINGS_VARIABLES = {"config", "settings", "_config", "engine_config"}  # names of variables that hold the settings


def syntax_nodes() -> Iterator[tuple[str, ast.AST]]:
    for path in SOURCES:
        module_path = str(path.relative_to(ROOT))
        if not module_path.startswith(RESOLVING_MODULES):
            yield from ((module_path, node) for node in nodes_of(path))


def test_only_resolving_modules_read_resolved_settings() -> None:
    reads = {
        (module_path, node.attr)
        for module_path, node in syntax_nodes()
        if isinstance(node, ast.Attribute)
        and node.attr in RESOLVED_SETTINGS
        and ast.unparse(node.value).split(".")[-1] in SETTINGS_VARIABLES
    }
    assert reads == ALLOWED_READS, "read the field of ResolvedSettings or ResolvedConfig instead"


def test_only_listed_modules_compare_with_auto() -> None:
    comparing_modules = {
        module_path
        for module_path, node in syntax_nodes()
        if isinstance(node, ast.Compare)
        and any(
            isinstance(part, ast.Constant) and part.value == "auto"
            for operand in (node.left, *node.comparators)
            for part in ast.walk(operand)
        )
    }
    assert comparing_modules == ALLOWED_AUTO_COMPARISONS.keys()


def test_only_resolving_modules_build_tree_shapes() -> None:
    calls = [(module_path, node.func) for module_path, node in syntax_nodes() if isinstance(node, ast.Call)]
    building_modules = {
        module_path for module_path, call in calls if isinstance(call, ast.Name) and call.id in ("tree_shape", "tiers")
    }
    forcing_modules = {
        module_path
        for module_path, call in calls
        if isinstance(call, ast.Attribute) and call.attr == "with_forced_nodes"
    }
    assert (building_modules, forcing_modules) == (
        set(),
        {"cluster/dp_attention/plan.py"},
    )  # a step has as many forced nodes as it needs


def config(**settings: Any) -> EngineConfig:
    return EngineConfig.model_validate({"model_path": "m", **settings})


def eagle(**settings: Any) -> EngineConfig:
    return config(speculative_draft_model_path="d", **settings)


@pytest.mark.parametrize(
    ("kwargs", "rows"),
    [
        ({}, (512, 512, True)),
        ({"chunked_prefill_size": -1}, (UNLIMITED, UNLIMITED, True)),
        ({"chunked_prefill_size": 64, "mixed_prefill_size": 16}, (64, 16, False)),
        ({"chunked_prefill_size": 64, "mixed_prefill_size": 100}, (64, 64, False)),
        ({"chunked_prefill_size": -1, "mixed_prefill_size": 100}, (UNLIMITED, 100, False)),
    ],
)
def test_prefill_settings_give_the_prompt_rows_of_a_step(kwargs: dict[str, int], rows: tuple[int, int, bool]) -> None:
    resolved = ResolvedSettings.from_settings(config(**kwargs))
    assert (resolved.chunk_rows, resolved.mixed_chunk_rows, resolved.prefill_time_limited) == rows


def test_tree_shapes_are_resolved_by_tier_and_with_forced_nodes() -> None:
    plain = ResolvedSettings.from_settings(config())
    assert (plain.shape, plain.tiers, plain.forced_shape) == (NO_SPECULATION, (NO_SPECULATION,), NO_SPECULATION)
    deep = ResolvedSettings.from_settings(
        eagle(speculative_num_steps=3, speculative_eagle_topk=2, speculative_forced_tokens=5)
    )
    assert [tier.num_steps for tier in deep.tiers] == [0, 1, 2, 3] and deep.tiers[-1] is deep.shape
    assert [tier.num_draft_tokens for tier in deep.tiers] == [1, 3, 7, 11]
    assert (deep.forced_shape.num_steps, deep.forced_shape.num_draft_tokens) == (8, 16)
    assert deep.max_positions_ahead == 19


@pytest.mark.parametrize(("device", "mode"), [("cpu", "adaptive"), ("cuda", "fixed")])
def test_trees_are_adaptive_on_a_cpu_and_fixed_on_a_gpu_unless_set(device: str, mode: str) -> None:
    target, draft = tiny_pair()
    unset = EngineConfig(model_path=target, speculative_draft_model_path=draft, speculative_eagle_topk=2)
    assert resolve_models(unset, device).adaptive_trees == (mode == "adaptive")
    assert resolve_models(unset, device).settings.speculative_mode == mode
    for setting in ("adaptive", "fixed"):
        resolved = resolve_models(unset.model_copy(update={"speculative_mode": setting}), device)
        assert resolved.adaptive_trees == (setting == "adaptive")
        shares = device == "cpu" and setting == "adaptive"
        assert any(tier.selects_nodes for tier in resolved.tiers) == shares, "on a GPU nobody shares rows"
        chain = resolve_models(resolved.settings.model_copy(update={"speculative_eagle_topk": 1}), device)
        drafted = chain.tiers[: chain.last_drafted_tier + 1]
        assert not any(tier.max_nodes for tier in drafted), "nor do chains of a draft"
        assert (chain.lookup_tokens > 0) == shares
        no_c = resolve_models(resolved.settings, device, lambda: False)
        assert not any(tier.max_nodes for tier in no_c.tiers), "nor where the kernels are not in C"
    assert not resolve_models(EngineConfig(model_path=target), device).adaptive_trees, "there is nothing to choose"


def test_adaptive_trees_have_smaller_shapes_of_each_depth() -> None:
    resolved = ResolvedSettings.from_settings(
        eagle(
            speculative_num_steps=2, speculative_eagle_topk=3, speculative_mode="adaptive", speculative_lookup_tokens=0
        )
    )
    shapes = [(tier.num_steps, tier.num_draft_tokens) for tier in resolved.tiers]
    assert (
        shapes == [(0, 1), (1, 2), (1, 3), (1, 4), (2, 3), (2, 4), (2, 6), (2, 8)]
        and [tier.max_nodes for tier in resolved.tiers] == [0, 4, 4, 4, 8, 8, 8, 8]
        and resolved.tiers[-1] is resolved.shape
    )
    flashinfer = eagle(speculative_num_steps=2, speculative_mode="adaptive", attention_backend="flashinfer")
    assert all(tier.max_nodes == 0 for tier in ResolvedSettings.from_settings(flashinfer).tiers)
    limited = eagle(speculative_num_steps=2, speculative_mode="adaptive", speculative_batch_tiers={4: 1, 8: 0})
    resolved = ResolvedSettings.from_settings(limited)
    assert [resolved.tiers[resolved.max_tier(decodes)].num_steps for decodes in (1, 4, 8)] == [8, 1, 0]


def test_looked_up_tokens_add_tiers_after_all_drafted_trees() -> None:
    settings = {"speculative_mode": "adaptive", "speculative_lookup_tokens": 6, "speculative_forced_tokens": 5}
    chain = ResolvedSettings.from_settings(eagle(speculative_num_steps=3, **settings))
    labels = [tier.label for tier in chain.tiers]
    assert labels[:4] == [(0, 1, 0), (1, 2, 0), (2, 3, 0), (3, 4, 0)] and chain.last_drafted_tier == 3
    assert labels[4:] == [(2, 4, 6), (2, 6, 6), (2, 9, 6)]
    assert {tier.num_steps for tier in chain.tiers[4:]} == {6} and chain.looks_up_tokens and chain.lookup_tokens == 6
    assert [tier.max_nodes for tier in chain.tiers] == [0] * 4 + [9] * 3
    drafted = [(tier.drafted_shape.num_steps, tier.drafted_shape.num_draft_tokens) for tier in chain.tiers[4:]]
    assert drafted == [(2, 3)] * 3
    assert chain.shape.label == (3, 10, 6) and chain.shape.window == 10, "the bounds of all tiers"
    assert (chain.shape.drafted_shape.num_steps, chain.shape.drafted_shape.num_draft_tokens) == (3, 4)
    assert all(chain.shape.window >= tier.window for tier in chain.tiers)
    forced = chain.forced_shape
    assert forced.label == chain.shape.label and (forced.num_steps, forced.num_draft_tokens) == (11, 15)
    unshared = ResolvedSettings.from_settings(eagle(speculative_num_steps=3, **settings), share_rows=False)
    assert [tier.label for tier in unshared.tiers[4:]] == [(2, 9, 6)]
    assert not any(tier.max_nodes for tier in unshared.tiers)
    deep = ResolvedSettings.from_settings(eagle(speculative_num_steps=8, **settings))
    assert deep.lookup_tokens == 8, "a branch is at least as deep as the drafted tree"
    single = ResolvedSettings.from_settings(eagle(speculative_num_steps=1, **settings))
    assert {tier.lookup_drafted_steps for tier in single.tiers if tier.lookup_tokens} == {1}


def test_looked_up_tokens_are_the_default_only_where_requests_share_rows() -> None:
    adaptive = eagle(speculative_num_steps=3, speculative_mode="adaptive")
    assert ResolvedSettings.from_settings(adaptive).lookup_tokens == 8
    assert ResolvedSettings.from_settings(adaptive, share_rows=False).lookup_tokens == 0
    assert ResolvedSettings.from_settings(eagle(speculative_num_steps=3)).lookup_tokens == 0
    ngram = config(speculative_algorithm="NGRAM", speculative_mode="adaptive")
    assert ResolvedSettings.from_settings(ngram).lookup_tokens == 0
    with pytest.raises(ConfigError, match="speculative_lookup_tokens needs trees that each step chooses"):
        ResolvedSettings.from_settings(eagle(speculative_mode="fixed", speculative_lookup_tokens=4))


def test_last_tier_falls_with_the_number_of_decodes() -> None:
    resolved = ResolvedSettings.from_settings(
        eagle(speculative_num_steps=4, speculative_batch_tiers={4: 3, 8: 0, 16: 9})
    )
    assert [resolved.max_tier(decodes) for decodes in (0, 3, 4, 7, 8, 16)] == [4, 4, 3, 3, 0, 0]


def test_last_tier_is_no_deeper_than_the_most_drafted_tokens_of_all_requests() -> None:
    resolved = ResolvedSettings.from_settings(eagle(speculative_num_steps=4, speculative_batch_tiers={4: 3}))
    assert [resolved.max_tier(1, limit) for limit in (0, 2, 4, 9, None)] == [0, 2, 4, 4, 4]
    assert [resolved.max_tier(4, limit) for limit in (0, 2, 4, 9, None)] == [0, 2, 3, 3, 3]


def test_group_size_and_replicated_draft_are_resolved() -> None:
    resolved = ResolvedSettings.from_settings(eagle(tp_size=8, attn_dp_size=2, speculative_draft_parallel="replicated"))
    assert (resolved.group_size, resolved.draft_is_sharded) == (4, False)


def test_tokenizer_folder_defaults_to_the_target() -> None:
    assert (tokenizer_folder(config()), tokenizer_folder(config(tokenizer_path="t"))) == ("m", "t")


@pytest.mark.parametrize(("device", "rows", "ahead"), [("cpu", 4, 0), ("cuda", 256, 1)])
def test_device_sets_forced_rows_and_steps_ahead(device: str, rows: int, ahead: int) -> None:
    target = tiny_pair()[0]
    resolved = resolve_models(config(model_path=target), device)
    assert (resolved.device, resolved.forced_rows, resolved.steps_ahead) == (device, rows, ahead)
    without_overlap = config(model_path=target, overlap=False)
    assert resolve_models(without_overlap, device).steps_ahead == 0
    with_draft = config(model_path=target, speculative_draft_model_path=tiny_pair()[1], speculative_forced_rows=0)
    assert resolve_models(with_draft, device).forced_rows == 0


def test_checkpoint_sets_dtype_and_context_length() -> None:
    target = tiny_pair()[0]
    resolved = resolve_models(config(model_path=target))
    max_position = resolved.target.max_position
    assert (resolved.dtype, resolved.kv_cache_dtype, resolved.fp8_cache) == ("float32", "float32", False)
    assert resolved.context_length == max_position and resolved.chunk_rows == min(512, max_position)
    fp8_config = resolve_models(config(model_path=target, dtype="float64", kv_cache_dtype="fp8_e4m3"))
    assert (fp8_config.dtype, fp8_config.kv_cache_dtype, fp8_config.fp8_cache) == ("float64", "fp8_e4m3", True)
    longer_config = resolve_models(config(model_path=target, context_length=2 * max_position, chunked_prefill_size=-1))
    assert longer_config.context_length == longer_config.chunk_rows == 2 * max_position
    limited_config = longer_config.with_limits(3, 16)
    assert (limited_config.settings.max_running_requests, limited_config.chunk_rows) == (3, 16)


def test_resolved_config_is_frozen() -> None:
    resolved = resolve_models(config(model_path=tiny_pair()[0]))
    for name in ("dtype", "chunk_rows", "settings"):
        with pytest.raises(FrozenInstanceError):
            setattr(resolved, name, None)
