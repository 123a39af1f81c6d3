"""`Client` reads correct and broken answers of a server over a socket."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from cluster.config import ConfigError
from cluster.tools.client import API_KEY_VARIABLE, Client, NoAnswerError

STREAM = b'data: {"at": 1}\n\n: a comment\n\ndata: {"at": 2}\n\n'


class Handler(BaseHTTPRequestHandler):
    received_requests: ClassVar[list[tuple[str, str | None]]] = []
    answers: ClassVar[dict[str, tuple[int, bytes]]] = {
        "/ok": (200, b'{"a": 1}'),
        "/list": (200, b"[1]"),
        "/html": (200, b"<html>"),
        "/refused": (503, b'{"error": {"message": "the queue\\n is full", "code": "overloaded"}}'),
        "/proxy": (502, b"<h1>Bad\nGateway</h1>"),
        "/stream": (200, STREAM + b"data: [DONE]\n\n"),
        "/cut": (200, STREAM),
        "/failed": (200, STREAM + b'data: {"error": {"message": "rank 1 died"}}\n\n'),
        "/no-json": (200, b"data: {\n\n"),
    }

    def do_GET(self) -> None:
        self.received_requests.append((self.path, self.headers["Authorization"]))
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        status, body = self.answers[self.path]
        self.send_response(status)
        if status == 503:
            self.send_header("Retry-After", "7")
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_client_reads_json_pages_and_event_streams(url: str) -> None:
    assert Client(url).json("/ok") == {"a": 1}
    assert Client(f"{url}/v1/").page("/html") == "<html>"
    assert list(Client(url).events("/stream", {})) == [{"at": 1}, {"at": 2}]


def test_client_sends_the_api_key_of_flag_or_environment(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "env")
    for key, expected_header in ((None, "Bearer env"), ("flag", "Bearer flag"), ("", None)):
        Client(url, key).page("/ok")
        assert Handler.received_requests[-1] == ("/ok", expected_header)
    monkeypatch.delenv(API_KEY_VARIABLE)
    Client(url).page("/ok")
    assert Handler.received_requests[-1] == ("/ok", None)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/refused", "the queue is full (try again in 7 s)"),
        ("/proxy", "status 502: <h1>Bad Gateway</h1>"),
        ("/cut", "the stream ended before the answer did"),
        ("/failed", "rank 1 died"),
        ("/no-json", "no answer from"),
    ],
)
def test_failed_stream_raises_an_error_of_one_line(url: str, path: str, message: str) -> None:
    events = Client(url).events(path, {})
    with pytest.raises(NoAnswerError) as captured_error:
        for at, event in enumerate(events, 1):
            assert event == {"at": at}, "the events before the failure are delivered"
    assert message in str(captured_error.value) and "\n" not in str(captured_error.value)


def test_unreachable_or_foreign_server_raises_no_answer_error(url: str) -> None:
    with pytest.raises(NoAnswerError, match="Connection refused"):
        Client("http://127.0.0.1:1").page("/ok")
    for path in ("/list", "/html"):
        with pytest.raises(NoAnswerError, match="not a JSON object"):
            Client(url).json(path)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://a", "http://", "http://a:b", "http://a:99999", ""])
def test_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--url must be as"):
        Client(url)
