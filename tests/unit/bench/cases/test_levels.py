from collections import Counter

import pytest

from cluster.bench.cases import levels
from cluster.bench.cases.acceptance import Size
from cluster.bench.pair import ModelPair
from cluster.bench.runs import EngineRun
from tests.support.tiny_checkpoints import target_folder
from tests.unit.models import draft_folders as write

PROMPTS = [[(7 * i + 3 * j) % 60 + 2 for j in range(6)] for i in range(5)]


def test_acceptance_by_depth_counts_only_trees_that_reached_the_depth() -> None:
    run = EngineRun(accept_counts=Counter({0: 4, 1: 2, 3: 2}))
    run.add(EngineRun(accept_counts=Counter({0: 2})))
    assert run.acceptance_by_depth(4) == [4 / 10, 2 / 4, 2 / 2, 0.0]
    assert EngineRun().acceptance_by_depth(2) == [0.0, 0.0]


def test_levels_bench_measures_a_draft_of_several_mtp_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft of one layer is measured in `test_quick`, by the quick run of the demo pair."""
    pair = ModelPair(target_folder(spread=0.3), write.mtp("step", 3), "float64", 1)
    monkeypatch.setattr(ModelPair, "prompts", lambda self, count, length: PROMPTS)
    result = levels.measure(pair, Size(prompts=len(PROMPTS), new_tokens=24), log_progress=lambda _: None)
    assert result["identical"]
    assert [(x["name"], x["temperature"]) for x in result["figures"]] == [
        (str(shape), temperature) for temperature in (0.0, 0.8) for shape in levels.SHAPES
    ]
    for figure in result["figures"]:
        expected_accept_length, reached = 1.0, 1.0
        for acceptance in figure["by_depth"]:
            reached *= acceptance
            expected_accept_length += reached
        assert figure["accept_length"] == pytest.approx(expected_accept_length)
    assert "same tokens as plain decoding: yes" in levels.show(result)
