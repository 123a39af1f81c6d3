"""Requests with token ids or numbers that the model cannot take: they are refused or harmless, and no step fails."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.engine import build_engine
from cluster.request import LogitAdjustments, Request, RequestParams
from tests.parity.automata import with_automata
from tests.parity.harness import config_of, run
from tests.support.tiny_checkpoints import target_folder
from tests.unit.models.checkpoints import copy_of

VOCAB = 64


def make_request(**params: Any) -> Request:
    return Request("one", (3, 4, 5), RequestParams(**{"max_tokens": 4, "temperature": 0.0, **params}))


@pytest.mark.parametrize(
    "adjustments",
    [
        {"bias": ((VOCAB, 1.0),)},
        {"bias": ((-1, 1.0),)},
        {"allowed_token_ids": (3, VOCAB)},
        {"bad_words_token_ids": ((3, VOCAB),)},
    ],
    ids=str,
)
def test_engine_refuses_adjustments_with_tokens_outside_the_vocabulary(adjustments: dict[str, Any]) -> None:
    engine = build_engine(config_of(target_folder()))
    with pytest.raises(ValueError, match=rf"adjustments name token id -?\d+, outside the vocabulary of {VOCAB}"):
        engine.submit(make_request(adjustments=LogitAdjustments(**adjustments)))
    assert run(engine, [make_request()]).tokens["one"]


def test_engine_ignores_end_and_stop_tokens_outside_the_vocabulary(tmp_path: Path) -> None:
    """A model's config may name an end token outside the vocabulary. A client may name any stop token."""
    folder = copy_of(target_folder(), tmp_path / "target", eos_token_id=[1, VOCAB])
    engine = build_engine(config_of(folder))
    adjustments = LogitAdjustments(min_tokens=3)
    assert run(engine, [make_request(adjustments=adjustments, stop_token_ids=(VOCAB + 3,))]).tokens["one"]


@pytest.mark.parametrize(
    ("params", "message"),
    [({"top_k": 2**63}, "top_k must"), ({"temperature": 1e7}, "temperature must"), ({"max_tokens": 2**40}, "max_tok")],
)
def test_request_params_refuse_numbers_beyond_tensor_range(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RequestParams(**params)
    with pytest.raises(ValueError, match="min_tokens must"):
        LogitAdjustments(min_tokens=2**40)


@pytest.mark.parametrize(
    "adjustments",
    [
        LogitAdjustments(allowed_token_ids=(5, 7), bad_words_token_ids=((6,),)),
        LogitAdjustments(allowed_token_ids=(5, 7), repetition_penalty=100.0),
        LogitAdjustments(allowed_token_ids=(5, 7), min_tokens=3, repetition_penalty=100.0, bad_words_token_ids=((6,),)),
    ],
    ids=["bad words and not allowed", "penalty and not allowed", "all"],
)
def test_grammar_overrides_bad_words_allowed_tokens_and_penalties(adjustments: LogitAdjustments) -> None:
    engine = with_automata(build_engine(config_of(target_folder())))
    constrained_request = make_request(adjustments=adjustments, grammar=json.dumps([{"6": 0}]), max_tokens=6)
    assert run(engine, [replace(constrained_request, prompt_token_ids=(3, 6, 4))]).tokens["one"] == [6] * 6
