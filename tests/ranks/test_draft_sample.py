"""A draft's sample, made by one rank, holds on every mesh; a wrong one keeps every rank of the gang from starting."""

import json
import shutil
from pathlib import Path

import pytest

from cluster.arch.draft.sample import SAMPLE_FILE
from cluster.tools.sample_draft import sample_draft
from tests.parity.harness import tiny_pair
from tests.ranks.gang import Case, Life, Lost
from tests.ranks.test_parity import Gangs, config


@pytest.fixture
def sampled(tmp_path: Path) -> tuple[str, str]:
    """A pair whose draft has a sample."""
    target, draft = tiny_pair()
    folder = shutil.copytree(draft, tmp_path / "draft")
    sample_draft(str(folder), target, "EAGLE3", "float64")
    return target, str(folder)


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("draft_parallel", ["sharded", "replicated"])
def test_draft_sample_made_by_one_rank_is_accepted_on_two_ranks(
    ranks: Gangs, sampled: tuple[str, str], dp: int, draft_parallel: str
) -> None:
    given = config(*sampled, tp_size=2, attn_dp_size=dp, speculative_draft_parallel=draft_parallel)
    gang = ranks(2)
    for answer in gang.run(Case(given)):
        assert isinstance(answer, Life), answer


def test_wrong_draft_sample_keeps_every_rank_from_starting(ranks: Gangs, sampled: tuple[str, str]) -> None:
    file = Path(sampled[1]) / SAMPLE_FILE
    sample = json.loads(file.read_text())
    file.write_text(json.dumps({**sample, "hidden": [*sample["hidden"][1:], sample["hidden"][0]]}))
    given = config(*sampled, tp_size=2, attn_dp_size=2)
    for answer in ranks(2).run(Case(given), timeout_s=10):
        assert isinstance(answer, Lost) and answer.kind == "ConfigError", answer
        assert "is off by" in answer.error


def test_rank_whose_draft_has_no_sample_is_refused(ranks: Gangs, sampled: tuple[str, str]) -> None:
    given = config(*sampled, tp_size=2, attn_dp_size=2)
    for answer in ranks(2).run(Case(given, own={1: {"speculative_draft_model_path": tiny_pair()[1]}}), timeout_s=10):
        assert isinstance(answer, Lost) and answer.kind == "ConfigError", answer
        assert "draft is" in answer.error
