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
    "test_adjusted": ("plain_decoding_equals_transformers_own_processors",),
    "test_constrained": ("retraction_changes_nothing",),  # with other texts pages do not run out
    "test_distribution": ("texts_fit_the_filtered_target",),
    "test_draft_runners": ("each_level_is_what_its_layer_proposes", "no_runner_reads_anothers_pool"),
    "test_families": ("greedy_texts_are_those_of_transformers",),
    "test_memory": ("memory_after_long_runs_retraction_and_reuse", "trees_and_memory_equal_the_reference"),
    "test_mtp_experts": ("the_targets_text_is_that_of_transformers",),
    "test_planted_bugs": ("without_a_planted_bug_every_check_passes",),
    "test_prompt_logprobs": ("",),
    "test_requests": ("logprobs_are_those_of_the_raw_logits",),
    "test_returned_trees": ("the_nodes_are_those_that_the_reference_proposes",),
    "test_sharing": ("texts_that_part_ways",),
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
