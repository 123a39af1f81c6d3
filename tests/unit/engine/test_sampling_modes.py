"""What a step needs follows from what each request asks for; forgotten, it is drawn as if nobody had asked."""

from typing import Any

import pytest

from cluster.batch import SamplingMode
from cluster.engine.schedule import mode_of
from cluster.request import LogitAdjustments, RequestParams

NOISY, FILTERED = SamplingMode.RANDOM, SamplingMode.RANDOM | SamplingMode.FILTERED
ASKED: list[tuple[dict[str, Any], SamplingMode]] = [
    ({}, NOISY),
    ({"top_k": 5}, FILTERED),
    ({"top_p": 0.9}, FILTERED),
    ({"min_p": 0.1}, FILTERED),
    ({"temperature": 0.0, "top_k": 5, "top_p": 0.9, "min_p": 0.1}, SamplingMode(0)),
    ({"temperature": 0.0, "logprobs": 0}, SamplingMode.LOGPROBS),
    ({"adjustments": LogitAdjustments(presence_penalty=0.5)}, NOISY | SamplingMode.ADJUSTED),
    (
        {"adjustments": LogitAdjustments(bad_words_token_ids=((4, 5),))},
        NOISY | SamplingMode.ADJUSTED | SamplingMode.BAD_WORDS,
    ),
    ({"grammar": "{}"}, NOISY | SamplingMode.CONSTRAINED),
    ({"return_tree": True}, NOISY | SamplingMode.TREES),
]


@pytest.mark.parametrize(("asked", "mode"), ASKED)
def test_mode_of_step_is_the_union_of_request_modes(asked: dict[str, Any], mode: SamplingMode) -> None:
    one, plain = RequestParams(**{"temperature": 1.0, **asked}), RequestParams(temperature=0.0)
    assert mode_of([one]) == mode_of([plain, one]) == mode_of([one, plain]) == mode
    assert mode_of([]) == mode_of([plain]) == SamplingMode(0)
