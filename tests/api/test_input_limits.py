"""Input that is huge, slow or endless: what it costs is bounded, and the answer is the usual JSON."""

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
from tests.api.scripted import MODEL, Client, ScriptedService, http_scope

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


class CountedText:
    """A tokenizer that notes what it is asked to encode, and how many ask at once."""

    def __init__(self, text: Any) -> None:
        self._text = text
        self._lock = threading.Lock()
        self.encoded: list[int] = []
        self.threads: set[str] = set()
        self.most = self._now = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._text, name)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
            self.encoded.append(len(text))
            self.threads.add(threading.current_thread().name)
        try:
            found: list[int] = self._text.encode(text, add_special_tokens)
            return found
        finally:
            with self._lock:
                self._now -= 1


@pytest.fixture
def counted(service: ScriptedService) -> CountedText:
    assert service.tokenizer is not None
    service.tokenizer.text_tokenizer = CountedText(service.tokenizer.text_tokenizer)  # type: ignore[assignment]
    return service.tokenizer.text_tokenizer  # type: ignore[return-value]


@pytest.mark.parametrize("path", [COMPLETE, CHAT])
def test_too_long_prompt_is_refused_before_tokenization(client: Client, counted: CountedText, path: str) -> None:
    text = "word " * 180_000
    body = {"prompt": text} if path == COMPLETE else {"messages": [{"role": "user", "content": text}]}
    answer = client.post(path, {"model": MODEL, **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is" in error["message"]
    assert counted.encoded == []


def test_long_texts_are_tokenized_by_at_most_four_threads(app: FastAPI, counted: CountedText) -> None:
    async def many() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            bodies = [{"model": MODEL, "prompt": f"{i}" + "x" * 5000} for i in range(24)]
            return await asyncio.gather(*(client.post("/tokenize", json=body) for body in bodies))

    assert {answer.status_code for answer in asyncio.run(many())} == {200}
    assert len(counted.encoded) == 24
    assert counted.most <= 4
    assert all(name.startswith("offload") for name in counted.threads)


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
    client: Client, service: ScriptedService, counted: CountedText, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    threads = counted.threads

    def noted(owner: Any, function: str) -> None:
        whole = getattr(owner, function)

        def noting(*args: Any, **kwargs: Any) -> Any:
            threads.add(threading.current_thread().name)
            return whole(*args, **kwargs)

        monkeypatch.setattr(owner, function, noting)

    noted(response_request, "dialogue_of")
    noted(anthropic_request, "dialogue_of")
    noted(conversation, "check_messages")
    noted(calls, "_check_ids")
    noted(calls, "StoppedText")
    noted(tokenizer, "template_messages")
    noted(calls, "chat_output_of")
    assert service.tokenizer is not None
    noted(service.tokenizer._template, "apply_chat_template")
    path, body = LONG_BODIES[name]
    client.post(path, {"max_tokens": 1, **body} if path in (COMPLETE, CHAT, "/v1/messages") else body)
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
    "where",
    [
        lambda many: {**many, "prompt": "x"},
        lambda many: {"prompt": "x", "stream": True, "stream_options": many},
        lambda many: {"prompt": "x", "metadata": {"deep": [many]}},
    ],
)
def test_an_object_of_thousands_of_fields_is_refused(client: Client, where: Any) -> None:
    answer = client.post(COMPLETE, where({f"field_{i}": i for i in range(45_000)}))
    assert answer.status_code == 400
    assert f"at most {MAX_KEYS}" in answer.json()["error"]["message"]


def test_logit_bias_accepts_up_to_1024_token_ids(client: Client, service: ScriptedService) -> None:
    def asked(count: int) -> httpx.Response:
        return client.complete(logit_bias={str(token): -1 for token in range(count)})

    service.model = replace(service.model, vocab_size=2048)
    assert asked(1024).status_code == 200
    adjustments = service.engine.requests[-1].params.adjustments
    assert adjustments is not None and len(adjustments.bias) == 1024
    refused = asked(1025)
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
    complaints: list[int] = []

    def counting(error: Any) -> Any:
        complaints.append(error.error_count())
        return errors.from_validation_error(error)

    monkeypatch.setattr(field_tables, "from_validation_error", counting)
    answer = client.post(path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert complaints == [1]
    assert len(answer.content) < 600


def test_too_many_messages_or_nested_containers_are_refused(client: Client, service: ScriptedService) -> None:
    most = RequestLimits().messages
    answer = client.chat(messages=HI * (most + 1))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert f"at most {most}" in answer.json()["error"]["message"]
    assert client.post("/tokenize", {"messages": HI * (most + 1)}).json()["error"]["param"] == "messages"
    deep = client.complete(metadata=[[]] * (MAX_CONTAINERS + 1))
    assert (deep.status_code, deep.json()["error"]["code"]) == (400, "invalid_json")


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

    class Costly(list[int]):
        """Counts how much of it is looked at."""

        seen = 0

        def __iter__(self) -> Any:
            for item in super().__iter__():
                type(self).seen += 1
                yield item

    truncated_repr(Costly(range(1_000_000)))
    assert Costly.seen < 60


def test_request_limits_follow_from_the_context_length() -> None:
    assert RequestLimits.of(512).body_bytes == MIN_BODY_BYTES
    large = RequestLimits.of(131_072)
    assert large.body_bytes == 4 * MIN_BODY_BYTES
    ids = json.dumps({"prompt": [199_999] * 131_071}).encode()  # a full context, as long as token ids get
    assert len(ids) < large.body_bytes
    assert large.messages == 32_768


class Drip:
    """A body that comes a byte at a time, as often as it is asked for, and never ends."""

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s
        self.asked = 0

    async def receive(self) -> dict[str, Any]:
        self.asked += 1
        await asyncio.sleep(self.pause_s)
        return {"type": "http.request", "body": b" ", "more_body": True}


def send(app: FastAPI, drip: Any, path: str = COMPLETE) -> tuple[int, dict[str, str], Any]:
    """The answer to a POST whose body `drip` gives."""
    sent: list[dict[str, Any]] = []

    async def note(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(http_scope(path), drip.receive, note))
    head = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], head, json.loads(body or b"null")


@pytest.mark.parametrize("pause_s", [0.005, 60.0])
def test_slow_body_gives_a_408(service: ScriptedService, pause_s: float) -> None:
    app = make_app(service, RequestLimits(body_grace_s=0.2))
    status, headers, answer = send(app, Drip(pause_s))
    assert (status, answer["error"]["code"]) == (408, "request_timeout")
    assert "came too slowly" in answer["error"]["message"]
    assert headers["connection"] == "close"
    assert service.outcomes() == {"invalid": 1.0}


def test_bodies_over_the_total_byte_limit_give_a_503(service: ScriptedService) -> None:
    app = make_app(service, RequestLimits(held_bytes=1000))

    async def both() -> list[httpx.Response]:
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

    first, second = asyncio.run(both())
    assert first.status_code == 200
    assert (second.status_code, second.json()["error"]["code"]) == (503, "overloaded")
    assert int(second.headers["retry-after"]) >= 1
    assert Client(app).complete().status_code == 200  # what was held is let go


def test_full_server_gives_a_503_before_reading_the_body(app: FastAPI, service: ScriptedService) -> None:
    service.engine.retry_after_s = 23.4
    drip = Drip(0.0)
    status, headers, answer = send(app, drip)
    assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "overloaded", "24")
    assert drip.asked == 0
    assert service.outcomes() == {"overloaded": 1.0}


@pytest.mark.parametrize("path", [COMPLETE, "/tokenize", "/detokenize"])
def test_client_disconnect_during_the_upload_gives_a_499_without_traceback(
    app: FastAPI, service: ScriptedService, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    class Leaver:
        async def receive(self) -> dict[str, Any]:
            return {"type": "http.disconnect"}

    status, _, _ = send(app, Leaver(), path=path)
    assert status == 499
    assert "Traceback" not in caplog.text
    assert service.outcomes() == {}
