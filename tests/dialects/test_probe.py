"""`aerie probe-draft` finds what a wrong config hides, and leaves a right one alone."""

import json
import math
from pathlib import Path

import pytest

from cluster.arch.draft.sample import SAMPLE_FILE
from cluster.cli import main
from cluster.config import ConfigError, EngineConfig
from cluster.engine import build_engine
from cluster.tools.probe_draft import Reading, probe_draft
from cluster.tools.sample_draft import pair_settings
from tests.dialects.demo import DRAFT, TARGET
from tests.tiny import draft_folder, target_folder
from tests.unit.models.checkpoints import copy_of

pytestmark = pytest.mark.timeout(1800)  # decoding under every reading takes minutes on a busy machine, and cannot hang

ROUNDING = 1e-4
"""Committed samples are float32 of one machine: another adds up in another order. Wrong readings are off by 0.1."""


def unsampled(to: Path, **config: object) -> str:
    folder = copy_of(DRAFT, to / "draft", None, **config)
    (to / "draft" / SAMPLE_FILE).unlink()
    return folder


@pytest.mark.slow
def test_probe_draft_finds_no_override_for_a_correct_config(tmp_path: Path) -> None:
    readings: list[Reading] = []
    assert probe_draft(unsampled(tmp_path), TARGET, "EAGLE3", readings.append) == {}
    assert {fact for reading in readings for fact in reading.overrides} >= {"rope_layout", "recurrent"}
    assert all(reading.accept_length > 1 for reading in readings)


def test_probe_draft_finds_two_wrong_facts_and_the_new_sample_is_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = unsampled(tmp_path, norm_before_residual=True, norm_output=True)
    assert main(["probe-draft", draft, "--target", TARGET, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["speculative_draft_overrides"] == {"norm_before_residual": False, "recurrent": "pre"}
    words = ["--draft-override", "norm_before_residual=false", "--draft-override", "recurrent=pre"]
    assert main(["sample-draft", draft, "--target", TARGET, *words]) == 0
    mine, ours = (json.loads((Path(folder) / SAMPLE_FILE).read_text()) for folder in (draft, DRAFT))
    assert (mine["tokens"], mine["token"]) == (ours["tokens"], ours["token"])
    off = math.dist(mine["hidden"], ours["hidden"]) / math.hypot(*ours["hidden"])
    assert off < ROUNDING and abs(mine["logprob"] - ours["logprob"]) < ROUNDING
    settings = pair_settings(draft, TARGET, "EAGLE3") | {"context_length": 128, "max_running_requests": 1}
    with pytest.raises(ConfigError, match="is off by"):
        build_engine(EngineConfig.from_kwargs(settings))
    build_engine(
        EngineConfig.from_kwargs(settings | {"speculative_draft_overrides": found["speculative_draft_overrides"]})
    )


def test_probe_draft_refuses_drafts_that_cannot_be_probed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="settles how it is read"):
        probe_draft(DRAFT, TARGET, "EAGLE3", print)
    target = target_folder()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        probe_draft(draft_folder(target), target, "EAGLE3", print)
    with pytest.raises(ConfigError, match="does not fit the draft"):
        probe_draft(unsampled(tmp_path), TARGET, "NEXTN", print)
