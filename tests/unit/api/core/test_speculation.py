"""The field `speculation` of a request, in every API."""

from typing import Any

import pytest

from cluster.api.anthropic.request import MessagesRequest
from cluster.api.core.conversation import ChatRequest
from cluster.api.core.errors import ApiError
from cluster.api.core.generation import CompletionRequest, GenerationFields
from cluster.api.core.limits import ModelInfo
from cluster.api.openai.responses.request import ResponseRequest
from cluster.offline.sampling_params import SamplingParams

MODEL = ModelInfo("m", 64, 256, created=0)
MESSAGES = [{"role": "user", "content": "hi"}]


def limit_of(fields: GenerationFields) -> int | None:
    return fields.sampling_params(MODEL, 4, 16, "prompt").max_draft_tokens


@pytest.mark.parametrize(
    ("value", "limit"),
    [
        (None, None),
        ({}, None),
        ({"enabled": True}, None),
        ({"enabled": False}, 0),
        ({"max_draft_tokens": 2}, 2),
        ({"max_draft_tokens": 0}, 0),
        ({"enabled": False, "max_draft_tokens": 3}, 0),
    ],
)
def test_every_api_reads_speculation(value: Any, limit: int | None) -> None:
    field = {} if value is None else {"speculation": value}
    assert limit_of(CompletionRequest.read({"prompt": "a", **field})[0]) == limit
    assert limit_of(ChatRequest.read({"messages": MESSAGES, **field})[0]) == limit
    assert limit_of(ResponseRequest.read({"input": "hi", **field})[0].to_chat().chat) == limit
    messages = {"messages": MESSAGES, "max_tokens": 8, "model": "m", **field}
    assert limit_of(MessagesRequest.read(messages)[0].to_chat().chat) == limit
    assert SamplingParams(speculation=value).body().get("speculation") == value


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"max_draft_tokens": -1}, "speculation.max_draft_tokens"),
        ({"max_draft_tokens": 1.5}, "speculation.max_draft_tokens"),
        ({"depth": 1}, "speculation.depth"),
        (False, "speculation"),
    ],
)
def test_error_names_the_wrong_part(value: Any, path: str) -> None:
    with pytest.raises(ApiError) as caught:
        CompletionRequest.read({"prompt": "a", "speculation": value})
    assert caught.value.param == path
    with pytest.raises(ValueError, match="speculation"):
        SamplingParams(speculation=value)
