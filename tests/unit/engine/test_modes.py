"""What a step needs follows from what each request asks for; forgotten, it is drawn as if nobody had asked."""

from typing import Any

import pytest

from cluster.batch import Mode
from cluster.engine.scheduler import mode_of
from cluster.request import Adjustments, SamplingParams

NOISY, FILTERED = Mode.NOISY, Mode.NOISY | Mode.FILTERED
ASKED: list[tuple[dict[str, Any], Mode]] = [
    ({}, NOISY),
    ({"top_k": 5}, FILTERED),
    ({"top_p": 0.9}, FILTERED),
    ({"min_p": 0.1}, FILTERED),
    ({"temperature": 0.0, "top_k": 5, "top_p": 0.9, "min_p": 0.1}, Mode(0)),
    ({"temperature": 0.0, "logprobs": 0}, Mode.LOGPROBS),
    ({"adjustments": Adjustments(presence_penalty=0.5)}, NOISY | Mode.ADJUSTED),
    ({"adjustments": Adjustments(bad_words_token_ids=((4, 5),))}, NOISY | Mode.ADJUSTED | Mode.WORDS),
    ({"grammar": "{}"}, NOISY | Mode.CONSTRAINED),
    ({"return_tree": True}, NOISY | Mode.TREES),
]


@pytest.mark.parametrize(("asked", "mode"), ASKED)
def test_what_one_request_needs_all_have(asked: dict[str, Any], mode: Mode) -> None:
    one, plain = SamplingParams(**{"temperature": 1.0, **asked}), SamplingParams(temperature=0.0)
    assert mode_of([one]) == mode_of([plain, one]) == mode_of([one, plain]) == mode
    assert mode_of([]) == mode_of([plain]) == Mode(0)
