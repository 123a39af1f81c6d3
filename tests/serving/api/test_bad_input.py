"""Bad input, case by case: the exact status, the field that the error names, and a server that still answers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.api.core.conversation import ChatRequest
from cluster.api.core.fields import REFUSED, WARNING_HEADER
from cluster.api.http.routes import make_app
from tests.serving.api.bad_conversations import CHAT, COMPLETE, CONVERSATIONS
from tests.serving.api.scripted import CONTEXT, MODEL, VOCAB, Client, ScriptedService

HI = [{"role": "user", "content": "hi"}]
MIB = 1 << 20

# name: (path, fields that replace those of a valid request, the error's param, a part of the error's message)
FIELDS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    **CONVERSATIONS,
    "no prompt": (COMPLETE, {"prompt": None}, "prompt", "required"),
    "prompt is a number": (COMPLETE, {"prompt": 5}, "prompt", "must be a string"),
    "prompt is an object": (COMPLETE, {"prompt": {"text": "x"}}, "prompt", "must be a string"),
    "prompt is an empty string": (COMPLETE, {"prompt": ""}, "prompt", "must not be empty"),
    "prompt is an empty list": (COMPLETE, {"prompt": []}, "prompt", "must not be an empty list"),
    "prompt holds an empty string": (COMPLETE, {"prompt": ["a", ""]}, "prompt.1", "must not be empty"),
    "prompt holds an empty list": (COMPLETE, {"prompt": [[1], []]}, "prompt.1", "must not be empty"),
    "prompt mixes kinds": (COMPLETE, {"prompt": ["a", 5]}, "prompt", "got 5 at position 1"),
    "prompt mixes ids and lists": (COMPLETE, {"prompt": [[1], 2]}, "prompt", "item 1 must be a list"),
    "prompt of booleans": (COMPLETE, {"prompt": [True]}, "prompt", "begins with True"),
    "prompt of fractions": (COMPLETE, {"prompt": [[1, 2.5]]}, "prompt", "got 2.5 at position 1"),
    "token id outside the vocabulary": (COMPLETE, {"prompt": [1, VOCAB]}, "prompt", f"token id {VOCAB} lies outside"),
    "negative token id": (COMPLETE, {"prompt": [[1], [-1]]}, "prompt.1", "token id -1 lies outside"),
    "token id of 401 digits": (COMPLETE, {"prompt": [10**400]}, "prompt", "lies outside the vocabulary"),
    "half a surrogate pair": (COMPLETE, {"prompt": "ab\ud800"}, "prompt", "character 2 is half of a surrogate pair"),
    "prompt longer than the context": (
        COMPLETE,
        {"prompt": "x" * 600},
        "prompt",
        f"maximum context length is {CONTEXT}",
    ),
    "prompt and output longer than the context": (COMPLETE, {"max_tokens": 508}, "max_tokens", "ask for at most 507"),
    "too many sequences": (COMPLETE, {"prompt": ["a"] * 65, "n": 2}, "prompt", "130 sequences"),
    "model of another type": (COMPLETE, {"model": 7}, "model", "must be a string, got 7"),
    "stream is a string": (COMPLETE, {"stream": "yes"}, "stream", "must be true or false, got 'yes'"),
    "stream options without a stream": (COMPLETE, {"stream_options": {}}, "stream_options", "only allowed when stream"),
    "stream options of another type": (COMPLETE, {"stream": True, "stream_options": 1}, "stream_options", "got 1"),
    "stream option of another type": (
        COMPLETE,
        {"stream": True, "stream_options": {"include_usage": "no"}},
        "stream_options.include_usage",
        "must be true or false",
    ),
    "n is zero": (COMPLETE, {"n": 0}, "n", "greater than or equal to 1, got 0"),
    "n is negative": (CHAT, {"n": -3}, "n", "got -3"),
    "n is huge": (COMPLETE, {"n": 10**30}, "n", "must be at most 128"),
    "n is a fraction": (COMPLETE, {"n": 1.5}, "n", "must be an integer"),
    "max_tokens is zero": (CHAT, {"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    "prompt_logprobs is too many": (CHAT, {"prompt_logprobs": 21}, "prompt_logprobs", "at most 20"),
    "prompt_logprobs in a stream": (CHAT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not in a stream"),
    "best_of is too many": (COMPLETE, {"best_of": 129}, "best_of", "at most 128"),
    "best_of below n": (COMPLETE, {"best_of": 2, "n": 3}, "best_of", "at least n"),
    "best_of in a stream": (COMPLETE, {"best_of": 2, "stream": True}, "best_of", "known at the end"),
    "truncate_prompt_tokens is zero": (
        CHAT,
        {"truncate_prompt_tokens": 0},
        "truncate_prompt_tokens",
        "must be positive",
    ),
    "echo in a chat": (CHAT, {"echo": True}, "echo", "send the prompt to /v1/completions"),
    "max_tokens is negative": (COMPLETE, {"max_tokens": -5}, "max_tokens", "got -5"),
    "max_tokens is huge": (COMPLETE, {"max_tokens": 10**18}, "max_tokens", "ask for at most"),
    "max_tokens is a string": (COMPLETE, {"max_tokens": "5"}, "max_tokens", "must be an integer, got '5'"),
    "max_tokens is true": (COMPLETE, {"max_tokens": True}, "max_tokens", "must be an integer, got True"),
    "max_tokens and max_completion_tokens differ": (
        CHAT,
        {"max_tokens": 5, "max_completion_tokens": 6},
        "max_tokens",
        "send one of them",
    ),
    "max_completion_tokens is huge": (CHAT, {"max_completion_tokens": 999}, "max_completion_tokens", "ask for at most"),
    "temperature is negative": (COMPLETE, {"temperature": -0.1}, "temperature", "greater than or equal to 0, got -0.1"),
    "temperature is huge": (COMPLETE, {"temperature": 1e300}, "temperature", "less than or equal to 100"),
    "temperature is a string": (CHAT, {"temperature": "hot"}, "temperature", "must be a number, got 'hot'"),
    "top_p is negative": (COMPLETE, {"top_p": -0.1}, "top_p", "greater than or equal to 0"),
    "top_p is above one": (COMPLETE, {"top_p": 1.01}, "top_p", "less than or equal to 1"),
    "top_k is -2": (COMPLETE, {"top_k": -2}, "top_k", "greater than or equal to -1"),
    "top_k is a fraction": (COMPLETE, {"top_k": 0.5}, "top_k", "must be an integer"),
    "min_p is above one": (COMPLETE, {"min_p": 2}, "min_p", "less than or equal to 1"),
    "seed is far below zero": (
        COMPLETE,
        {"seed": -(2**63) - 1},
        "seed",
        "greater than or equal to -9223372036854775808",
    ),
    "seed is huge": (COMPLETE, {"seed": 2**64}, "seed", "less than 18446744073709551616"),
    "stop is a number": (COMPLETE, {"stop": 3}, "stop", "must be a list"),
    "stop is empty": (COMPLETE, {"stop": ""}, "stop", "an empty string would stop everything"),
    "stop holds a number": (COMPLETE, {"stop": ["a", 3]}, "stop.1", "must be a string, got 3"),
    "too many stops": (COMPLETE, {"stop": [*map(str, range(65))]}, "stop", "at most 64 strings, got 65"),
    "a long stop": (COMPLETE, {"stop": "x" * 257}, "stop", "at most 256 characters"),
    "a stop with half a surrogate pair": (COMPLETE, {"stop": "\udfff"}, "stop.0", "half of a surrogate pair"),
    "stop token outside the vocabulary": (COMPLETE, {"stop_token_ids": [VOCAB]}, "stop_token_ids", "must lie in"),
    "stop token is a string": (COMPLETE, {"stop_token_ids": ["a"]}, "stop_token_ids.0", "must be an integer"),
    "logprobs is too many": (COMPLETE, {"logprobs": 21}, "logprobs", "at most 20"),
    "logprobs is negative": (COMPLETE, {"logprobs": -1}, "logprobs", "greater than or equal to 0"),
    "logprobs is a boolean": (COMPLETE, {"logprobs": True}, "logprobs", "must be an integer"),
    "chat logprobs is a number": (CHAT, {"logprobs": 3}, "logprobs", "must be true or false"),
    "top_logprobs without logprobs": (CHAT, {"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    "top_logprobs is too many": (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
    "dp rank is negative": (COMPLETE, {"routed_dp_rank": -1}, "routed_dp_rank", "greater than or equal to 0, got -1"),
    "dp rank is a string": (CHAT, {"routed_dp_rank": "1"}, "routed_dp_rank", "must be an integer, got '1'"),
    "dp rank is true": (COMPLETE, {"routed_dp_rank": True}, "routed_dp_rank", "must be an integer, got True"),
    "two different dp ranks": (
        COMPLETE,
        {"routed_dp_rank": 0, "data_parallel_rank": 1},
        "data_parallel_rank",
        "given twice",
    ),
    "request id with a line break": (COMPLETE, {"request_id": "a\r\nb"}, "request_id", "must be 1 to 64 letters"),
    "no messages": (CHAT, {"messages": None}, "messages", "required"),
    "messages is empty": (CHAT, {"messages": []}, "messages", "must not be empty"),
    "messages is a string": (CHAT, {"messages": "hi"}, "messages", "must be a list, got 'hi'"),
    "a message is a string": (CHAT, {"messages": ["hi"]}, "messages.0", "must be an object"),
    "a message without a role": (CHAT, {"messages": [{"content": "x"}]}, "messages.0.role", "required"),
    "a message without content": (CHAT, {"messages": [*HI, {"role": "user"}]}, "messages.1.content", "required"),
    "content is null": (
        CHAT,
        {"messages": [{"role": "user", "content": None}]},
        "messages.0.content",
        "required",
    ),
    "content is an image": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content",
        "part 0 must be",
    ),
    "unknown role": (
        CHAT,
        {"messages": [{"role": "robot", "content": "x"}]},
        "messages.0.role",
        "must be one of system",
    ),
    "the template refuses": (CHAT, {"messages": [{"role": "user", "content": "refuse"}]}, "messages", "no refuse here"),
    "template arguments of another type": (
        CHAT,
        {"chat_template_kwargs": 1},
        "chat_template_kwargs",
        "must be an object",
    ),
    "template arguments that the server sets": (
        CHAT,
        {"chat_template_kwargs": {"tokenize": True}},
        "chat_template_kwargs.tokenize",
        "not allowed",
    ),
    "template arguments with half a surrogate pair": (
        CHAT,
        {"chat_template_kwargs": {"sign": "\ud800"}},
        "messages",
        "refuses this conversation: UnicodeEncodeError",
    ),
    "template arguments that make the template fail": (
        CHAT,
        {"chat_template_kwargs": {"sign": {}, "shout": []}, "messages": [{"role": "user", "content": "count"}]},
        "messages",
        "refuses this conversation: ",
    ),
    "conversation longer than the context": (
        CHAT,
        {"messages": [{"role": "user", "content": "x" * 600}]},
        "messages",
        "context length",
    ),
    "logit_bias of a text": (CHAT, {"logit_bias": {"the": 1}}, "logit_bias", "got the id 'the'"),
    "logit_bias as a list": (CHAT, {"logit_bias": [[5, 1]]}, "logit_bias", "must map token ids to numbers"),
    "logit_bias beyond the vocabulary": (CHAT, {"logit_bias": {"999999": 1}}, "logit_bias", "ids must lie in [0, "),
    "logit_bias above 100": (CHAT, {"logit_bias": {"5": 101}}, "logit_bias", "5: must be a number in [-100, 100]"),
    "presence_penalty above 2": (CHAT, {"presence_penalty": 2.5}, "presence_penalty", "less than or equal to 2"),
    "frequency_penalty is a string": (COMPLETE, {"frequency_penalty": "2"}, "frequency_penalty", "must be a number"),
    "a tiny repetition_penalty": (COMPLETE, {"repetition_penalty": 5e-324}, "repetition_penalty", "0.01"),
    "repetition_penalty": (COMPLETE, {"repetition_penalty": 0}, "repetition_penalty", "greater than or equal to 0.01"),
    "repeat_penalty": (COMPLETE, {"repeat_penalty": 1.1}, "repeat_penalty", "use repetition_penalty"),
    "empty allowed_token_ids": (COMPLETE, {"allowed_token_ids": []}, "allowed_token_ids", "must not be empty"),
    "allowed_token_ids below 0": (COMPLETE, {"allowed_token_ids": [-1]}, "allowed_token_ids", "must lie in [0, "),
    "bad_words with an empty one": (COMPLETE, {"bad_words": ["a", " "]}, "bad_words", "an empty word"),
    "bad_words that are too many": (COMPLETE, {"bad_words": ["a"] * 65}, "bad_words", "at most 64"),
    "min_tokens is huge": (COMPLETE, {"min_tokens": 2**31}, "min_tokens", "less than 2147483648"),
    "guided_whitespace_pattern": (
        CHAT,
        {"guided_json": {}, "guided_whitespace_pattern": ""},
        "guided_whitespace_pattern",
        "use structured_outputs with disable_any_whitespace",
    ),
    "min_tokens beyond max_tokens": (COMPLETE, {"min_tokens": 9, "max_tokens": 8}, "min_tokens", "at most max_tokens"),
    "response_format of an unknown type": (
        CHAT,
        {"response_format": {"type": "xml"}},
        "response_format.type",
        "must be one",
    ),
    "two grammars": (COMPLETE, {"regex": "a", "guided_choice": ["b"]}, "regex", "send one of them"),
    "suffix": (COMPLETE, {"suffix": "end"}, "suffix", "not supported"),
    "best_of": (CHAT, {"best_of": 3}, "best_of", "use n"),
    "prompt in a chat": (CHAT, {"prompt": "x"}, "prompt", "use /v1/completions"),
    "messages in a completion": (COMPLETE, {"messages": HI}, "messages", "use /v1/chat/completions"),
    "extra_body": (CHAT, {"extra_body": {"top_k": 5}}, "extra_body", "at the top level"),
    "skip_special_tokens": (COMPLETE, {"skip_special_tokens": False}, "skip_special_tokens", "not supported"),
    "a field in two spellings": (COMPLETE, {"rid": "a", "request_id": "b"}, "request_id", "given twice"),
}

GOOD = json.dumps({"model": MODEL, "prompt": "hello"}).encode()
# name: (body, further headers, status, a part of the error's message)
BODIES: dict[str, tuple[bytes, dict[str, str], int, str]] = {
    "empty": (b"", {}, 400, "not valid JSON"),
    "not JSON": (b"{'model': 'demo'}", {}, 400, "line 1 column 2"),
    "cut off": (GOOD[:-3], {}, 400, "not valid JSON"),
    "two objects": (GOOD + GOOD, {}, 400, "Extra data"),
    "invalid UTF-8": (b'{"prompt": "\xff"}', {}, 400, "not valid UTF-8: byte 12 is 0xff"),
    "UTF-16": (GOOD.decode().encode("utf-16-le"), {}, 400, "not valid JSON"),
    "Latin-1": ('{"prompt": "é"}'.encode("latin-1"), {}, 400, "not valid UTF-8"),
    "a list": (b"[1]", {}, 400, "must be a JSON object, got [1]"),
    "a string": (b'"hello"', {}, 400, "must be a JSON object"),
    "null": (b"null", {}, 400, "must be a JSON object, got None"),
    "NaN": (b'{"prompt": "x", "temperature": NaN}', {}, 400, "NaN is not a number"),
    "infinity": (b'{"prompt": "x", "temperature": -Infinity}', {}, 400, "-Infinity is not a number"),
    "too large a float": (b'{"prompt": "x", "temperature": 1e999}', {}, 400, "'1e999', which is too large"),
    "too long an integer": (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", {}, 400, "a number is too long"),
    "deep lists": (b"[" * 100_000, {}, 400, "nested deeper than 64"),
    "deep objects": (b'{"a":' * 70 + b"1" + b"}" * 70, {}, 400, "nested deeper than 64"),
    "deep lists after a quote": (b'{"x": "\\"", "a": ' + b"[" * 200 + b"]" * 200 + b"}", {}, 400, "nested deeper"),
    "10 MB": (b'{"prompt": "' + b"x" * (10 * MIB) + b'"}', {}, 413, "larger than 1048576 bytes"),
    "one byte too long": (GOOD.ljust(MIB + 1), {}, 413, "larger than"),
    "form data": (GOOD, {"content-type": "application/x-www-form-urlencoded"}, 415, "must be application/json"),
    "compressed": (GOOD, {"content-encoding": "gzip"}, 415, "uncompressed"),
}


@pytest.fixture(scope="module")
def shared_app(tokenizer_folder: Path) -> Iterator[tuple[Client, ScriptedService]]:
    """One client and one service for all bad requests of this file.

    After the tests no bad request has reached the engine, and the server still answers valid requests.
    """
    service = ScriptedService(tokenizer_folder)
    client = Client(make_app(service))
    yield client, service
    request_count = len(service.engine.requests)
    assert request_count == 0, "a bad request reached the engine"
    for path, body in ((COMPLETE, {"prompt": "hello"}), (CHAT, {"messages": HI})):
        assert client.post(path, {"model": MODEL, **body}).status_code == 200
    assert service.outcomes() == {"invalid": service.outcomes()["invalid"], "length": 2.0}


def check_error(response: httpx.Response, status: int, param: str | None, message_part: str) -> None:
    """Assert that the response is an error in OpenAI's format, with this status, param and part of its message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert message_part in error["message"]
    assert "Traceback" not in error["message"]
    assert "/work" not in error["message"]
    assert len(error["message"]) < 400
    if param:
        assert error["message"].startswith(param.split(".")[0])


@pytest.mark.parametrize("name", FIELDS)
def test_bad_field_gives_a_400_that_names_the_field(shared_app: tuple[Client, ScriptedService], name: str) -> None:
    path, fields, param, message_part = FIELDS[name]
    good = {"prompt": "hello"} if path == COMPLETE else {"messages": HI}
    body = json.dumps({"model": MODEL, **good, **fields})  # ASCII, so that surrogates travel as escapes
    response = shared_app[0].request("POST", path, content=body, headers={"content-type": "application/json"})
    check_error(response, 400, param, message_part)
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", [COMPLETE, CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("name", BODIES)
def test_unreadable_body_gives_the_expected_4xx_and_message(
    shared_app: tuple[Client, ScriptedService], path: str, name: str
) -> None:
    body, headers, status, message_part = BODIES[name]
    headers = {"content-type": "application/json", **headers}
    check_error(shared_app[0].request("POST", path, content=body, headers=headers), status, None, message_part)


def test_oversized_body_is_refused_without_reading_past_the_limit(shared_app: tuple[Client, ScriptedService]) -> None:
    read = 0

    async def endless() -> Any:
        nonlocal read
        while True:
            read += 65536
            yield b" " * 65536

    response = shared_app[0].request("POST", COMPLETE, content=endless(), headers={"content-type": "application/json"})
    check_error(response, 413, None, "larger than")
    assert read <= MIB + 2 * 65536
    headers = {"content-type": "application/json", "content-length": str(10**12)}
    check_error(shared_app[0].request("POST", COMPLETE, content=b"{}", headers=headers), 413, None, "larger than")


@pytest.mark.parametrize("path", [COMPLETE, CHAT])
@pytest.mark.parametrize("name", ["nobody", "", "../demo", "demo\u0000", "x" * 10_000])
def test_unknown_model_gives_a_404_that_names_the_served_model(
    shared_app: tuple[Client, ScriptedService], path: str, name: str
) -> None:
    good = {"prompt": "hello"} if path == COMPLETE else {"messages": HI}
    response = shared_app[0].post(path, {"model": name, **good})
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "this server has 'demo'" in error["message"]
    assert len(error["message"]) < 200


@pytest.mark.parametrize("field", REFUSED)
def test_unsupported_field_is_refused_unless_its_value_is_neutral(
    shared_app: tuple[Client, ScriptedService], field: str
) -> None:
    client, _ = shared_app
    path, good = (COMPLETE, {"prompt": "hi"}) if field in ChatRequest.model_fields else (CHAT, {"messages": HI})
    response = client.post(path, {"model": MODEL, **good, field: {"asks": "for something"}})
    check_error(response, 400, field, "not supported by this server")
    assert response.json()["error"]["code"] == "unsupported_parameter"
    for neutral in (None, *REFUSED[field]):
        # The server checks `n` after `field`. So an error about `n` shows that it accepted `field`.
        answer = client.post(path, {"model": MODEL, **good, field: neutral, "n": 200})
        check_error(answer, 400, "n", "at most 128")
        assert WARNING_HEADER not in answer.headers


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v2/completions", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/models/nobody", 404),
        ("GET", "/page/", 404),
        ("POST", "/", 405),
    ],
)
def test_unknown_path_gives_a_404_and_wrong_method_a_405(
    shared_app: tuple[Client, ScriptedService], method: str, path: str, status: int
) -> None:
    response = shared_app[0].request(method, path)
    assert response.status_code == status
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    if status == 404 and not path.startswith("/v1/models"):
        assert error["code"] == "unknown_url" and "/v1/completions" in error["message"]


@pytest.mark.parametrize(
    ("path", "message_part"),
    [
        ("embeddings", "no embeddings"),
        ("audio/speech", "no speech"),
        ("images/generations", "no images"),
        ("moderations", "no moderation"),
        ("files/x/content", "no files"),
        ("batches", "no batches"),
        ("fine_tuning/jobs", "no fine-tuning"),
        ("assistants", "no assistants"),
        ("threads/x/runs", "no assistants"),
    ],
)
def test_unsupported_openai_route_gives_a_404_that_names_the_missing_feature(
    shared_app: tuple[Client, ScriptedService], path: str, message_part: str
) -> None:
    for method in ("GET", "POST"):
        response = shared_app[0].request(method, f"/v1/{path}")
        error = response.json()["error"]
        assert response.status_code == 404 and error["code"] == "unknown_url" and error["param"] is None
        assert message_part in error["message"] and "/v1/chat/completions" in error["message"]
