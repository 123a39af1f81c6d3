"""Two environment variables change all tests of this package.

With `OVERLAP=1` the host is one step ahead of the device, and the device runs each step as late as it can. With
`KV_CACHE_DTYPE=fp8_e4m3` KV caches are in FP8; tests whose oracle has an unquantised cache are then skipped.
"""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.parity.harness import KV_CACHE_DTYPE
from tests.parity.poison import poison_unused_memory  # noqa: F401
from tests.support.late_device import delay_all

torch.set_num_threads(1)
UNQUANTISED_ORACLE_TESTS = {
    "test_penalties": ("plain_decoding_with_penalties_matches_transformers_processors",),
    "test_constrained": ("constrained_outputs_survive_retraction",),  # FP8 gives other texts, and pages do not run out
    "test_distribution": ("sampled_tree_decoding_fits_the_filtered_target_distribution",),
    "test_draft_runners": (
        "each_draft_level_matches_its_mtp_layer_in_the_reference",
        "draft_runner_reads_only_its_own_kv_pool",
    ),
    "test_families": ("greedy_outputs_of_each_family_match_transformers",),
    "test_memory": (
        "kv_cells_match_the_reference_after_retraction_and_prefix_reuse",
        "draft_trees_and_kv_cells_match_the_reference_for_each_draft_type",
    ),
    "test_mtp_experts": ("moe_target_with_mtp_tensors_matches_transformers",),
    "test_planted_bugs": ("every_check_passes_without_a_planted_bug",),
    "test_prompt_logprobs": ("",),
    "test_requests": ("logprobs_ignore_temperature_and_filters",),
    "test_returned_trees": ("returned_tree_nodes_match_the_reference_draft",),
    "test_sharing": ("prompts_with_common_prefixes_match_unshared_runs",),
    "test_transformers": ("",),
}
"""Tests that compare with `transformers` or with a dense reference: the beginnings of their names, by module."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items if KV_CACHE_DTYPE != "auto" else ():
        test_prefixes = tuple(f"test_{name}" for name in UNQUANTISED_ORACLE_TESTS.get(item.path.stem, ()))
        if test_prefixes and item.path.parent.name == "parity" and item.name.startswith(test_prefixes):
            item.add_marker(pytest.mark.skip(reason="the oracle of this test has an unquantised KV cache"))


@pytest.fixture(scope="package", autouse=True)
def delay_device_steps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("OVERLAP") == "1":
            delay_all(patch)
        yield
