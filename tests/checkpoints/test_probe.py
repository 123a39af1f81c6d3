"""Tests of `aerie probe-draft`: it finds the overrides that a wrong draft config needs, and none for a correct one."""

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
from tests.checkpoints.demo import DRAFT, TARGET
from tests.support.tiny_checkpoints import draft_folder, target_folder
from tests.unit.models.checkpoints import copy_of

pytestmark = pytest.mark.timeout(1800)  # decoding takes minutes on a busy machine, and cannot hang

ROUNDING = 1e-4
"""The tolerance for samples. The sample in the repository was computed in float32 on one machine, and another machine
adds in another order. A wrong reading of a config is off by 0.1.
"""


def draft_without_sample(parent: Path, **config: object) -> str:
    """Copy the demo draft without its sample, with changed config values, and return the folder of the copy."""
    folder = copy_of(DRAFT, parent / "draft", None, **config)
    (parent / "draft" / SAMPLE_FILE).unlink()
    return folder


@pytest.mark.slow
def test_probe_draft_finds_no_override_for_a_correct_config(tmp_path: Path) -> None:
    readings: list[Reading] = []
    assert probe_draft(draft_without_sample(tmp_path), TARGET, "EAGLE3", readings.append) == {}
    assert {key for reading in readings for key in reading.overrides} >= {"rope_layout", "recurrent"}
    assert all(reading.accept_length > 1 for reading in readings)


def test_probe_draft_finds_two_wrong_facts_and_the_new_sample_is_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = draft_without_sample(tmp_path, norm_before_residual=True, norm_output=True)
    assert main(["probe-draft", draft, "--target", TARGET, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["speculative_draft_overrides"] == {"norm_before_residual": False, "recurrent": "pre"}
    override_args = ["--draft-override", "norm_before_residual=false", "--draft-override", "recurrent=pre"]
    assert main(["sample-draft", draft, "--target", TARGET, *override_args]) == 0
    new_sample, demo_sample = (json.loads((Path(folder) / SAMPLE_FILE).read_text()) for folder in (draft, DRAFT))
    assert (new_sample["tokens"], new_sample["token"]) == (demo_sample["tokens"], demo_sample["token"])
    hidden_distance = math.dist(new_sample["hidden"], demo_sample["hidden"]) / math.hypot(*demo_sample["hidden"])
    assert hidden_distance < ROUNDING and abs(new_sample["logprob"] - demo_sample["logprob"]) < ROUNDING
    settings = pair_settings(draft, TARGET, "EAGLE3") | {"context_length": 128, "max_running_requests": 1}
    with pytest.raises(ConfigError, match="is off by"):
        build_engine(EngineConfig.from_kwargs(settings))
    build_engine(
        EngineConfig.from_kwargs(settings | {"speculative_draft_overrides": report["speculative_draft_overrides"]})
    )


def test_probe_draft_refuses_drafts_that_cannot_be_probed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="settles how it is read"):
        probe_draft(DRAFT, TARGET, "EAGLE3", print)
    target = target_folder()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        probe_draft(draft_folder(target), target, "EAGLE3", print)
    with pytest.raises(ConfigError, match="does not fit the draft"):
        probe_draft(draft_without_sample(tmp_path), TARGET, "NEXTN", print)
