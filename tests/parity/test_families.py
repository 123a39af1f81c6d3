"""Every target family in a whole engine: greedy texts are those of `transformers`. Law 1 on each: `test_pairs`."""

import json
from pathlib import Path

import pytest
import torch

from cluster.engine import build_engine
from tests.families import FAMILIES, VOCAB, all_cases, made
from tests.parity.harness import GREEDY, config_of, request, run

NEW = 64
FLAT = [name for name, family in FAMILIES.items() if not family.text and family.form is None]
"""Families whose config.json a tiny draft can be made for."""


def prompt(length: int, seed: int = 1) -> list[int]:
    return torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(
    ("family", "case"),
    [pytest.param(*each, marks=pytest.mark.slow if at % 2 else ()) for at, each in enumerate(all_cases())],
)
def test_greedy_outputs_of_each_family_match_transformers(family: str, case: str) -> None:
    one = made(family, case)
    engine = build_engine(config_of(one.folder, chunked_prefill_size=16))
    asked = [request(f"{n}", prompt(n), GREEDY, max_tokens=NEW, ignore_eos=True) for n in (1, 37)]
    texts = run(engine, asked).tokens
    for one_request in asked:
        length = len(one_request.prompt_token_ids)
        assert texts[f"{length}"] == one.oracle.greedy(list(one_request.prompt_token_ids), NEW)


@pytest.mark.parametrize("family", FLAT)
def test_reference_outputs_of_each_family_have_varied_tokens(family: str) -> None:
    """No family's text collapses onto a few tokens."""
    for case in FAMILIES[family].cases:
        text = made(family, case).oracle.greedy(prompt(37), NEW)
        assert len(set(text)) > 5, (case, text)


def test_generated_configs_name_their_architecture() -> None:
    for family, case in all_cases():
        folder = Path(made(family, case).folder)
        if FAMILIES[family].form is None:
            assert json.loads((folder / "config.json").read_text())["architectures"] == [FAMILIES[family].architecture]
