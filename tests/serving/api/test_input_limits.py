"""Huge, slow or endless input: its cost is bounded, and the answer is the usual JSON."""

import asyncio
import json
import threading
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from cluster.api.anthropic import request as anthropic_request
from cluster.api.core import conversation, errors, tokenizer
from cluster.api.core import fields as field_tables
from cluster.api.core.errors import truncated_repr
from cluster.api.core.fields import MAX_WARNINGS, WARNING_HEADER, select_honoured_fields
from cluster.api.core.limits import MIN_BODY_BYTES, RequestLimits
from cluster.api.core.wire import MAX_CONTAINERS, MAX_KEYS
from cluster.api.http import calls
from cluster.api.http.routes import make_app
from cluster.api.openai.responses import request as response_request
from tests.serving.api.scripted import MODEL, Client, ScriptedService, http_scope

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


class RecordingTokenizer:
    """A tokenizer that records the lengths of encoded texts, the threads, and the most concurrent calls of `encode`."""

    def __init__(self, text: Any) -> None:
        self._text = text
        self._lock = threading.Lock()
        self.text_lengths: list[int] = []
        self.threads: set[str] = set()
        self.max_concurrent = self._concurrent = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._text, name)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        with self._lock:
            self._concurrent += 1
            self.max_concurrent = max(self.max_concurrent, self._concurrent)
            self.text_lengths.append(len(text))
            self.threads.add(threading.current_thread().name)
        try:
            found: list[int] = self._text.encode(text, add_special_tokens)
            return found
        finally:
            with self._lock:
                self._concurrent -= 1


@pytest.fixture
def recording_tokenizer(service: ScriptedService) -> RecordingTokenizer:
    assert service.tokenizer is not None
    service.tokenizer.text_tokenizer = RecordingTokenizer(service.tokenizer.text_tokenizer)  # type: ignore[assignment]
    return service.tokenizer.text_tokenizer  # type: ignore[return-value]


@pytest.mark.parametrize("path", [COMPLETE, CHAT])
def test_too_long_prompt_is_refused_before_tokenization(
    client: Client, recording_tokenizer: RecordingTokenizer, path: str
) -> None:
    text = "word " * 180_000
    body = {"prompt": text} if path == COMPLETE else {"messages": [{"role": "user", "content": text}]}
    answer = client.post(path, {"model": MODEL, **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is" in error["message"]
    assert recording_tokenizer.text_lengths == []


def test_long_texts_are_tokenized_by_at_most_four_threads(
    app: FastAPI, recording_tokenizer: RecordingTokenizer
) -> None:
    async def many() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            bodies = [{"model": MODEL, "prompt": f"{i}" + "x" * 5000} for i in range(24)]
            return await asyncio.gather(*(client.post("/tokenize", json=body) for body in bodies))

    assert {answer.status_code for answer in asyncio.run(many())} == {200}
    assert len(recording_tokenizer.text_lengths) == 24
    assert recording_tokenizer.max_concurrent <= 4
    assert all(name.startswith("offload") for name in recording_tokenizer.threads)


LONG = "x" * 5000
LONG_BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "short prompts": (COMPLETE, {"prompt": ["y" * 50] * 100}),
    "token ids": (COMPLETE, {"prompt": [[97] * 50] * 100}),
    "content": (CHAT, {"messages": [{"role": "user", "content": LONG}]}),
    "name": (CHAT, {"messages": [{"role": "user", "content": "hi", "name": LONG}]}),
    "empty messages": (CHAT, {"messages": [{"role": "user", "content": ""}] * 1000}),
    "template argument": (CHAT, {"messages": HI, "chat_template_kwargs": {"extra": LONG}}),
    "tokenized template argument": ("/tokenize", {"messages": HI, "chat_template_kwargs": {"extra": LONG}}),
    "items": ("/v1/responses", {"input": [{"role": "user", "content": "hi"}] * 100}),
    "blocks": ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]}),
    "counted blocks": ("/v1/messages/count_tokens", {"messages": HI, "system": LONG}),
    "tokens": ("/detokenize", {"tokens": [97] * 3000}),
}


@pytest.mark.parametrize("name", LONG_BODIES)
def test_long_bodies_are_processed_outside_the_event_loop(
    client: Client,
    service: ScriptedService,
    recording_tokenizer: RecordingTokenizer,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    threads = recording_tokenizer.threads

    def record_threads_of(owner: Any, function: str) -> None:
        original = getattr(owner, function)

        def recorded_call(*args: Any, **kwargs: Any) -> Any:
            threads.add(threading.current_thread().name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, function, recorded_call)

    record_threads_of(response_request, "dialogue_of")
    record_threads_of(anthropic_request, "dialogue_of")
    record_threads_of(conversation, "check_messages")
    record_threads_of(calls, "_check_ids")
    record_threads_of(calls, "StoppedText")
    record_threads_of(tokenizer, "template_messages")
    record_threads_of(calls, "chat_output_of")
    assert service.tokenizer is not None
    record_threads_of(service.tokenizer._template, "apply_chat_template")
    service.model = replace(service.model, context_length=16_384)  # so that no body is too long
    path, body = LONG_BODIES[name]
    answer = client.post(path, {"max_tokens": 1, **body} if path in (COMPLETE, CHAT, "/v1/messages") else body)
    assert answer.status_code == 200, answer.text
    assert threads
    assert all(thread.startswith("offload") for thread in threads)


def test_only_a_few_unknown_fields_are_compared_with_known_names(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    monkeypatch.setattr(field_tables.difflib, "get_close_matches", lambda name, *_, **__: compared.append(name) or [])
    _, warnings = select_honoured_fields({f"field_{i}": i for i in range(50_000)}, {"model"})
    assert len(compared) == MAX_WARNINGS
    assert warnings[-1] == f"and {50_000 - MAX_WARNINGS} more"
    select_honoured_fields({"x" * 1_000_000: 1}, {"model"})
    assert len(compared) == MAX_WARNINGS


@pytest.mark.parametrize(
    "body_with",
    [
        lambda many: {**many, "prompt": "x"},
        lambda many: {"prompt": "x", "stream": True, "stream_options": many},
        lambda many: {"prompt": "x", "metadata": {"deep": [many]}},
    ],
)
def test_an_object_of_thousands_of_fields_is_refused(client: Client, body_with: Any) -> None:
    answer = client.post(COMPLETE, body_with({f"field_{i}": i for i in range(45_000)}))
    assert answer.status_code == 400
    assert f"at most {MAX_KEYS}" in answer.json()["error"]["message"]


def test_logit_bias_accepts_up_to_1024_token_ids(client: Client, service: ScriptedService) -> None:
    def complete_with_bias(count: int) -> httpx.Response:
        return client.complete(logit_bias={str(token): -1 for token in range(count)})

    service.model = replace(service.model, vocab_size=2048)
    assert complete_with_bias(1024).status_code == 200
    adjustments = service.engine.requests[-1].params.adjustments
    assert adjustments is not None and len(adjustments.bias) == 1024
    refused = complete_with_bias(1025)
    assert refused.status_code == 400
    assert "at most 1024, logit_bias too (OpenAI takes 300 to 1,024" in refused.json()["error"]["message"]


def test_body_with_the_maximum_number_of_fields_is_accepted(client: Client) -> None:
    answer = client.complete(**{f"field_{i}": i for i in range(MAX_KEYS - 2)})
    assert answer.status_code == 200
    assert f"and {MAX_KEYS - 2 - MAX_WARNINGS} more" in answer.headers[WARNING_HEADER]


BAD_LISTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "stop": (COMPLETE, {"prompt": "x", "stop": [1] * 100_000}, "stop.0"),
    "stop token ids": (COMPLETE, {"prompt": "x", "stop_token_ids": ["a"] * 100_000}, "stop_token_ids.0"),
    "messages": (CHAT, {"messages": ["hi"] * 100_000}, "messages.0"),
    "tokens": ("/detokenize", {"tokens": ["a"] * 100_000}, "tokens.0"),
    "prompt": (COMPLETE, {"prompt": ["a", *[1] * 100_000]}, "prompt"),
}


@pytest.mark.parametrize("name", BAD_LISTS)
def test_list_of_invalid_items_reports_only_the_first_error(
    client: Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, body, param = BAD_LISTS[name]
    error_counts: list[int] = []

    def count_errors(error: Any) -> Any:
        error_counts.append(error.error_count())
        return errors.from_validation_error(error)

    monkeypatch.setattr(field_tables, "from_validation_error", count_errors)
    answer = client.post(path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert error_counts == [1]
    assert len(answer.content) < 600


def test_too_many_messages_or_nested_containers_are_refused(client: Client, service: ScriptedService) -> None:
    max_messages = RequestLimits().messages
    answer = client.chat(messages=HI * (max_messages + 1))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert f"at most {max_messages}" in answer.json()["error"]["message"]
    assert client.post("/tokenize", {"messages": HI * (max_messages + 1)}).json()["error"]["param"] == "messages"
    nested = client.complete(metadata=[[]] * (MAX_CONTAINERS + 1))
    assert (nested.status_code, nested.json()["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "x", "tool_calls": ["y" * 500_000]}]},
        {"messages": HI, "stream": True, "stream_options": {"s" * 500_000: 1}},
        {"messages": HI, "response_format": {"schema": [[{"a": "b" * 1000}] * 300]}},
        {"messages": HI, "model": "m" * 900_000},
        {"messages": HI, "chat_template_kwargs": {"messages": "k" * 900_000}},
    ],
)
def test_error_message_does_not_repeat_a_huge_value(client: Client, body: dict[str, Any]) -> None:
    answer = client.post(CHAT, body)
    assert answer.status_code in (400, 404)
    assert len(answer.content) < 1200
    assert answer.json()["error"]["message"]


def test_warning_header_does_not_repeat_a_huge_field_name(client: Client) -> None:
    answer = client.post(CHAT, {"messages": [{"role": "user", "content": "x", "n" * 500_000: 1}]})
    assert answer.status_code == 200 and len(answer.headers[WARNING_HEADER]) < 200


def test_truncated_repr_has_at_most_60_characters_and_reads_few_items() -> None:
    assert truncated_repr("abc") == "'abc'"
    assert truncated_repr([1, "a", {"k": None}]) == "[1, 'a', {'k': None}]"
    assert (
        len(truncated_repr("x" * 100))
        == len(truncated_repr(["x" * 10] * 100))
        == len(truncated_repr({"k" * 100: 1}))
        == 60
    )

    class CountingList(list[int]):
        """A list that counts how many of its items are read."""

        items_read = 0

        def __iter__(self) -> Any:
            for item in super().__iter__():
                type(self).items_read += 1
                yield item

    truncated_repr(CountingList(range(1_000_000)))
    assert CountingList.items_read < 60


def test_request_limits_follow_from_the_context_length() -> None:
    assert RequestLimits.of(512).body_bytes == MIN_BODY_BYTES
    large = RequestLimits.of(131_072)
    assert large.body_bytes == 4 * MIN_BODY_BYTES
    ids = json.dumps({"prompt": [199_999] * 131_071}).encode()  # a full context of the longest ids
    assert len(ids) < large.body_bytes
    assert large.messages == 32_768


class SlowBody:
    """A request body that never ends: each `receive` waits `pause_s` and returns one byte."""

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s
        self.receive_count = 0

    async def receive(self) -> dict[str, Any]:
        self.receive_count += 1
        await asyncio.sleep(self.pause_s)
        return {"type": "http.request", "body": b" ", "more_body": True}


def post_body_of(app: FastAPI, slow_body: Any, path: str = COMPLETE) -> tuple[int, dict[str, str], Any]:
    """Status, headers and JSON of the answer to a POST. The `receive` of `slow_body` gives the request body."""
    sent: list[dict[str, Any]] = []

    async def collect(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(http_scope(path), slow_body.receive, collect))
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], headers, json.loads(body or b"null")


@pytest.mark.parametrize("pause_s", [0.005, 60.0])
def test_slow_body_gives_a_408(service: ScriptedService, pause_s: float) -> None:
    app = make_app(service, RequestLimits(body_grace_s=0.2))
    status, headers, answer = post_body_of(app, SlowBody(pause_s))
    assert (status, answer["error"]["code"]) == (408, "request_timeout")
    assert "came too slowly" in answer["error"]["message"]
    assert headers["connection"] == "close"
    assert service.outcomes() == {"invalid": 1.0}


def test_bodies_over_the_total_byte_limit_give_a_503(service: ScriptedService) -> None:
    app = make_app(service, RequestLimits(held_bytes=1000))

    async def post_both() -> list[httpx.Response]:
        async def slow() -> Any:
            yield b" " * 900
            await asyncio.sleep(0.3)
            yield json.dumps({"prompt": "x"}).encode()

        async def later() -> httpx.Response:
            await asyncio.sleep(0.1)
            return await client.post(COMPLETE, content=b" " * 200 + b'{"prompt": "x"}')

        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await asyncio.gather(client.post(COMPLETE, content=slow()), later())

    first, second = asyncio.run(post_both())
    assert first.status_code == 200
    assert (second.status_code, second.json()["error"]["code"]) == (503, "overloaded")
    assert int(second.headers["retry-after"]) >= 1
    assert Client(app).complete().status_code == 200  # the held bytes are released


def test_full_server_gives_a_503_before_reading_the_body(app: FastAPI, service: ScriptedService) -> None:
    service.engine.retry_after_s = 23.4
    slow_body = SlowBody(0.0)
    status, headers, answer = post_body_of(app, slow_body)
    assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "overloaded", "24")
    assert slow_body.receive_count == 0
    assert service.outcomes() == {"overloaded": 1.0}


@pytest.mark.parametrize("path", [COMPLETE, "/tokenize", "/detokenize"])
def test_client_disconnect_during_the_upload_gives_a_499_without_traceback(
    app: FastAPI, service: ScriptedService, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    class DisconnectedClient:
        async def receive(self) -> dict[str, Any]:
            return {"type": "http.disconnect"}

    status, _, _ = post_body_of(app, DisconnectedClient(), path=path)
    assert status == 499
    assert "Traceback" not in caplog.text
    assert service.outcomes() == {}
