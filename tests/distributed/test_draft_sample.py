"""A draft's sample that a single rank made passes its check on every mesh. With a wrong sample no rank starts."""

import json
import shutil
from pathlib import Path

import pytest

from cluster.arch.draft.sample import SAMPLE_FILE
from cluster.tools.sample_draft import sample_draft
from tests.distributed.gang import Case, RankFailure, RankReport
from tests.distributed.test_parity import RanksFactory, config
from tests.parity.harness import tiny_pair
from tests.support.slow_cases import diagonals_fast


@pytest.fixture
def pair_with_sample(tmp_path: Path) -> tuple[str, str]:
    """The paths of a target and a draft; the draft's folder has a sample."""
    target, draft = tiny_pair()
    folder = shutil.copytree(draft, tmp_path / "draft")
    sample_draft(str(folder), target, "EAGLE3", "float64")
    return target, str(folder)


@pytest.mark.parametrize(("dp", "draft_parallel"), diagonals_fast(2, [1, 2], ["sharded", "replicated"]))
def test_draft_sample_made_by_one_rank_is_accepted_on_two_ranks(
    ranks: RanksFactory, pair_with_sample: tuple[str, str], dp: int, draft_parallel: str
) -> None:
    config_dict = config(*pair_with_sample, tp_size=2, attn_dp_size=dp, speculative_draft_parallel=draft_parallel)
    gang = ranks(2)
    for answer in gang.run(Case(config_dict)):
        assert isinstance(answer, RankReport), answer


def test_wrong_draft_sample_keeps_every_rank_from_starting(
    ranks: RanksFactory, pair_with_sample: tuple[str, str]
) -> None:
    file = Path(pair_with_sample[1]) / SAMPLE_FILE
    sample = json.loads(file.read_text())
    file.write_text(json.dumps({**sample, "hidden": [*sample["hidden"][1:], sample["hidden"][0]]}))
    config_dict = config(*pair_with_sample, tp_size=2, attn_dp_size=2)
    for answer in ranks(2).run(Case(config_dict)):
        assert isinstance(answer, RankFailure) and answer.kind == "ConfigError", answer
        assert "is off by" in answer.error


def test_rank_whose_draft_has_no_sample_is_refused(ranks: RanksFactory, pair_with_sample: tuple[str, str]) -> None:
    config_dict = config(*pair_with_sample, tp_size=2, attn_dp_size=2)
    for answer in ranks(2).run(Case(config_dict, own={1: {"speculative_draft_model_path": tiny_pair()[1]}})):
        assert isinstance(answer, RankFailure) and answer.kind == "ConfigError", answer
        assert "draft is" in answer.error
