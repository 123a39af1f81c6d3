"""`OVERLAP=1` runs these tests with the host a step ahead of a device that runs as late as it can,
`KV_CACHE_DTYPE=fp8_e4m3` on caches in FP8, but for those whose oracle is a target with a cache of numbers.
"""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.late import delay_all
from tests.parity.harness import CACHE
from tests.parity.poison import poisoned  # noqa: F401

torch.set_num_threads(1)
AGAINST_NUMBERS = {
    "test_penalties": ("plain_decoding_with_penalties_matches_transformers_processors",),
    "test_constrained": ("constrained_outputs_survive_retraction",),  # with other texts pages do not run out
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
"""By module the beginnings of the names of tests that compare with `transformers`, or with a dense reference."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items if CACHE != "auto" else ():
        begun = tuple(f"test_{name}" for name in AGAINST_NUMBERS.get(item.path.stem, ()))
        if begun and item.path.parent.name == "parity" and item.name.startswith(begun):
            item.add_marker(pytest.mark.skip(reason="its oracle has a cache of numbers"))


@pytest.fixture(scope="package", autouse=True)
def overlapped() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("OVERLAP") == "1":
            delay_all(patch)
        yield
