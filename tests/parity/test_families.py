"""Every target family in a whole engine gives the greedy texts of `transformers`. `test_pairs` tests law 1 on each."""

import json
from pathlib import Path

import pytest
import torch

from cluster.engine import build_engine
from tests.parity.harness import GREEDY, config_of, make_request, run
from tests.support.families import FAMILIES, VOCAB, all_cases, family_checkpoint
from tests.support.slow_cases import every_nth_fast

NEW_TOKENS = 64
FAMILIES_WITH_FLAT_CONFIG = [name for name, family in FAMILIES.items() if not family.text and family.rewrite is None]
"""Families with a plain config.json, for which a tiny draft can be made."""


def prompt(length: int, seed: int = 1) -> list[int]:
    return torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(
    ("family", "case"),
    every_nth_fast(4, all_cases()),
)
def test_greedy_outputs_of_each_family_match_transformers(family: str, case: str) -> None:
    model = family_checkpoint(family, case)
    engine = build_engine(config_of(model.folder, chunked_prefill_size=16))
    requests = [make_request(f"{n}", prompt(n), GREEDY, max_tokens=NEW_TOKENS, ignore_eos=True) for n in (1, 37)]
    texts = run(engine, requests).tokens
    for sent_request in requests:
        length = len(sent_request.prompt_token_ids)
        assert texts[f"{length}"] == model.oracle.greedy(list(sent_request.prompt_token_ids), NEW_TOKENS)


@pytest.mark.parametrize("family", FAMILIES_WITH_FLAT_CONFIG)
def test_reference_outputs_of_each_family_have_varied_tokens(family: str) -> None:
    """The greedy text of each case has more than 5 different tokens, so that comparing texts means something."""
    for case in FAMILIES[family].cases:
        text = family_checkpoint(family, case).oracle.greedy(prompt(37), NEW_TOKENS)
        assert len(set(text)) > 5, (case, text)


def test_generated_configs_name_their_architecture() -> None:
    for family, case in all_cases():
        folder = Path(family_checkpoint(family, case).folder)
        if FAMILIES[family].rewrite is None:
            assert json.loads((folder / "config.json").read_text())["architectures"] == [FAMILIES[family].architecture]
