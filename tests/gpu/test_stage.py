"""Tests of `Stage`: how a stage records a failed check."""

from pathlib import Path

import pytest

from tests.gpu.stages.stage import Stage
from tests.gpu.stages.summary import read_results


def failing(stage: Stage, name: str) -> None:
    with stage.check(name):
        raise ValueError("wrong")


def test_failed_check_is_recorded_and_the_stage_continues(tmp_path: Path) -> None:
    stage = Stage("one", tmp_path, True, 0)
    failing(stage, "first")
    with stage.check("second") as facts:
        facts["number"] = 1
    lines = read_results(tmp_path / "results.jsonl")
    assert [(line["check"], line["passed"]) for line in lines] == [("first", False), ("second", True)]
    assert lines[0]["why"] == "ValueError: wrong" and lines[1]["number"] == 1 and stage.failed == ["first"]


def test_check_that_loses_the_device_is_recorded_and_ends_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(_: Stage) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Stage, "wait", lost)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        failing(Stage("one", tmp_path, False, 0), "first")
    assert [line["why"] for line in read_results(tmp_path / "results.jsonl")] == ["ValueError: wrong"]
