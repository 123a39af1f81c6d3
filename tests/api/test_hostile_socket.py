"""Three hundred named bad inputs over a real socket to a real server: each a 4xx within a second, and it goes on."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.bench.server import ServerProcess
from cluster.bench.streams import HOST
from tests.api.bad_items import HI, MESSAGES, OF_MESSAGES, OF_RESPONSES, RESPONSES
from tests.api.scripted import CONTEXT, MODEL, VOCAB
from tests.api.test_bad_input import BODIES, CHAT, COMPLETE, FIELDS
from tests.api.test_proxy_errors import raw
from tests.tiny import target_folder

pytestmark = pytest.mark.slow

WITHIN_S = 1.0
GOOD = {
    COMPLETE: {"prompt": "hello"},
    CHAT: {"messages": HI},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": HI, "max_tokens": 8},
}
OPEN = (b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n", b"\r\n")


def post(path: str, body: bytes, headers: dict[str, str]) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in {"content-type": "application/json", **headers}.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def fields(path: str, changed: dict[str, object]) -> bytes:
    return post(path, json.dumps({"model": MODEL, **GOOD[path], **changed}).encode(), {})


def on_the_wire() -> dict[str, bytes]:
    """What is wrong before a body is read."""
    first, last = OPEN
    return {
        "no route": first.replace(b"/v1/models", b"/v2/models") + last,
        "a path above the root": first.replace(b"/v1/models", b"/../../etc/passwd") + last,
        "an encoded path above the root": first.replace(b"/v1/models", b"/%2e%2e/%2e%2e/etc/passwd") + last,
        "a path with a null": first.replace(b"/v1/models", b"/v1/models/%00") + last,
        "a path of 4,000 characters": first.replace(b"/v1/models", b"/" + b"a" * 4000) + last,
        "another method": first.replace(b"GET", b"DELETE") + last,
        "a made-up method": first.replace(b"GET", b"BREW") + last,
        "a model that is not there": first.replace(b"/v1/models", b"/v1/models/other") + last,
        "embeddings": post("/v1/embeddings", b"{}", {}),
        "a stored response": first.replace(b"/v1/models", b"/v1/responses/resp_1") + last,
        "a request id that is no text": first + b"X-Request-Id: \xff\r\n" + last,
        "no HTTP": b"hello\r\n\r\n",
        "a version that does not exist": first.replace(b"HTTP/1.1", b"HTTP/9.9") + last,
        "two lengths": post(COMPLETE, b"{}", {"content-length": "5"}),
        "a negative length": first.replace(b"GET /v1/models", b"POST /v1/completions")
        + b"Content-Length: -1\r\n"
        + last,
        "a length that is no number": first.replace(b"GET /v1/models", b"POST /v1/completions")
        + b"Content-Length: many\r\n"
        + last,
    }


def inputs() -> dict[str, bytes]:
    """All of them by name, as bytes."""
    found = {f"field: {name}": fields(path, changed) for name, (path, changed, _, _) in FIELDS.items()}
    for path in (COMPLETE, CHAT, "/tokenize", "/detokenize"):
        for name, (body, headers, _, _) in BODIES.items():
            found[f"body to {path}: {name}"] = post(path, body, headers)
    found |= {f"responses: {name}": fields(RESPONSES, changed) for name, (changed, _, _) in OF_RESPONSES.items()}
    found |= {f"messages: {name}": fields(MESSAGES, changed) for name, (changed, _, _) in OF_MESSAGES.items()}
    return found | {f"wire: {name}": request for name, request in on_the_wire().items()}


@pytest.fixture(scope="module")
def url(tokenizer_folder: Path) -> Iterator[str]:
    settings = (
        f"model_id={MODEL}",
        f"model_source={target_folder(vocab_size=VOCAB, max_position=CONTEXT)}",
        f"tokenizer_source={tokenizer_folder}",
        "speculative_draft_model_path=null",
        "tp_size=1",
        "attn_dp_size=1",
    )
    with ServerProcess(settings) as server:
        url = f"http://{HOST}:{server.port}"
        # The first grammar waits for the start of the process that compiles, which takes seconds.
        assert raw(url, fields(COMPLETE, {"regex": "[ab]", "max_tokens": 2}))[0] == 200
        yield url


def test_bad_requests_get_a_4xx_within_a_second_and_the_server_stays_up(url: str) -> None:
    asked = inputs()
    assert len(asked) >= 300
    wrong = []
    for name, request in asked.items():
        began = time.monotonic()
        try:
            status, _, body = raw(url, request)
        except (OSError, IndexError) as error:
            status, body = 0, repr(error).encode()
        took = time.monotonic() - began
        if not 400 <= status < 500 or took > WITHIN_S:
            wrong.append((name, status, round(took, 2), body[:120]))
    print(len(asked), "inputs")
    assert not wrong
    for path, good in GOOD.items():
        assert raw(url, post(path, json.dumps({"model": MODEL, **good}).encode(), {}))[0] == 200, path
