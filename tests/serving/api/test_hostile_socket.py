"""Three hundred bad requests over a real socket to a real server: each gets a 4xx within a second; the
server goes on.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.bench.server import ServerProcess
from cluster.bench.streams import HOST
from tests.serving.api.bad_items import HI, MESSAGES, OF_MESSAGES, OF_RESPONSES, RESPONSES
from tests.serving.api.scripted import CONTEXT, MODEL, VOCAB
from tests.serving.api.test_bad_input import BODIES, CHAT, COMPLETE, FIELDS
from tests.serving.api.test_proxy_errors import send_raw
from tests.support.tiny_checkpoints import target_folder

pytestmark = pytest.mark.slow

TIME_LIMIT_S = 1.0
GOOD = {
    COMPLETE: {"prompt": "hello"},
    CHAT: {"messages": HI},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": HI, "max_tokens": 8},
}
MODELS_REQUEST = (b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n", b"\r\n")


def post(path: str, body: bytes, headers: dict[str, str]) -> bytes:
    """The bytes of a POST request. `headers` may override the content type."""
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in {"content-type": "application/json", **headers}.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def valid_post_with(path: str, changed_fields: dict[str, object]) -> bytes:
    """The bytes of a valid POST request with some fields replaced."""
    return post(path, json.dumps({"model": MODEL, **GOOD[path], **changed_fields}).encode(), {})


def bad_http_requests() -> dict[str, bytes]:
    """Requests by name that are wrong before the server reads a body."""
    head, end = MODELS_REQUEST
    return {
        "no route": head.replace(b"/v1/models", b"/v2/models") + end,
        "a path above the root": head.replace(b"/v1/models", b"/../../etc/passwd") + end,
        "an encoded path above the root": head.replace(b"/v1/models", b"/%2e%2e/%2e%2e/etc/passwd") + end,
        "a path with a null": head.replace(b"/v1/models", b"/v1/models/%00") + end,
        "a path of 4,000 characters": head.replace(b"/v1/models", b"/" + b"a" * 4000) + end,
        "another method": head.replace(b"GET", b"DELETE") + end,
        "a made-up method": head.replace(b"GET", b"BREW") + end,
        "a model that is not there": head.replace(b"/v1/models", b"/v1/models/other") + end,
        "embeddings": post("/v1/embeddings", b"{}", {}),
        "a stored response": head.replace(b"/v1/models", b"/v1/responses/resp_1") + end,
        "a request id that is no text": head + b"X-Request-Id: \xff\r\n" + end,
        "no HTTP": b"hello\r\n\r\n",
        "a version that does not exist": head.replace(b"HTTP/1.1", b"HTTP/9.9") + end,
        "two lengths": post(COMPLETE, b"{}", {"content-length": "5"}),
        "a negative length": head.replace(b"GET /v1/models", b"POST /v1/completions") + b"Content-Length: -1\r\n" + end,
        "a length that is no number": head.replace(b"GET /v1/models", b"POST /v1/completions")
        + b"Content-Length: many\r\n"
        + end,
    }


def bad_requests() -> dict[str, bytes]:
    """The bytes of all bad requests, by name."""
    requests = {
        f"field: {name}": valid_post_with(path, changed_fields) for name, (path, changed_fields, _, _) in FIELDS.items()
    }
    for path in (COMPLETE, CHAT, "/tokenize", "/detokenize"):
        for name, (body, headers, _, _) in BODIES.items():
            requests[f"body to {path}: {name}"] = post(path, body, headers)
    requests |= {
        f"responses: {name}": valid_post_with(RESPONSES, changed_fields)
        for name, (changed_fields, _, _) in OF_RESPONSES.items()
    }
    requests |= {
        f"messages: {name}": valid_post_with(MESSAGES, changed_fields)
        for name, (changed_fields, _, _) in OF_MESSAGES.items()
    }
    return requests | {f"wire: {name}": request for name, request in bad_http_requests().items()}


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
        # The first grammar waits until the process that compiles grammars has started. That takes seconds.
        assert send_raw(url, valid_post_with(COMPLETE, {"regex": "[ab]", "max_tokens": 2}))[0] == 200
        yield url


def test_bad_requests_get_a_4xx_within_a_second_and_the_server_stays_up(url: str) -> None:
    requests = bad_requests()
    assert len(requests) >= 300
    failures = []
    for name, request in requests.items():
        start = time.monotonic()
        try:
            status, _, body = send_raw(url, request)
        except (OSError, IndexError) as error:
            status, body = 0, repr(error).encode()
        duration_s = time.monotonic() - start
        if not 400 <= status < 500 or duration_s > TIME_LIMIT_S:
            failures.append((name, status, round(duration_s, 2), body[:120]))
    print(len(requests), "inputs")
    assert not failures
    for path, good in GOOD.items():
        assert send_raw(url, post(path, json.dumps({"model": MODEL, **good}).encode(), {}))[0] == 200, path
