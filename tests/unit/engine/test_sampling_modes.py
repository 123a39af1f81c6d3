"""The sampling mode of a step follows from the settings of its requests. A setting without its mode has no effect."""

from typing import Any

import pytest

from cluster.batch import SamplingMode
from cluster.engine.schedule import mode_of
from cluster.request import LogitAdjustments, RequestParams

RANDOM, FILTERED = SamplingMode.RANDOM, SamplingMode.RANDOM | SamplingMode.FILTERED
CASES: list[tuple[dict[str, Any], SamplingMode]] = [
    ({}, RANDOM),
    ({"top_k": 5}, FILTERED),
    ({"top_p": 0.9}, FILTERED),
    ({"min_p": 0.1}, FILTERED),
    ({"temperature": 0.0, "top_k": 5, "top_p": 0.9, "min_p": 0.1}, SamplingMode(0)),
    ({"temperature": 0.0, "logprobs": 0}, SamplingMode.LOGPROBS),
    ({"adjustments": LogitAdjustments(presence_penalty=0.5)}, RANDOM | SamplingMode.ADJUSTED),
    (
        {"adjustments": LogitAdjustments(bad_words_token_ids=((4, 5),))},
        RANDOM | SamplingMode.ADJUSTED | SamplingMode.BAD_WORDS,
    ),
    ({"grammar": "{}"}, RANDOM | SamplingMode.CONSTRAINED),
    ({"return_tree": True}, RANDOM | SamplingMode.TREES),
]


@pytest.mark.parametrize(("settings", "mode"), CASES)
def test_mode_of_step_is_the_union_of_request_modes(settings: dict[str, Any], mode: SamplingMode) -> None:
    params, plain = RequestParams(**{"temperature": 1.0, **settings}), RequestParams(temperature=0.0)
    assert mode_of([params]) == mode_of([plain, params]) == mode_of([params, plain]) == mode
    assert mode_of([]) == mode_of([plain]) == SamplingMode(0)
