import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from cluster.bench.streams import Prompt, accept_length, served_model, stream_all, total_tokens_per_second

COUNTS = {"num_spec_steps": 2, "num_accepted_draft_tokens": 1}


class Handler(BaseHTTPRequestHandler):
    """Streams five tokens in three events. The prompts `refuse`, `short` and `break` make the answer fail."""

    protocol_version = "HTTP/1.1"
    request_bodies: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        self.send_answer(b'{"data": [{"id": "tiny"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.request_bodies.append(body)
        if body["prompt"] == "refuse":
            self.send_answer(b'{"error": {"message": "no"}}', 400)
            return
        events = [
            self.choice_event([1], "a"),
            self.choice_event([2, 3], "bc"),
            self.choice_event([4, 5], "de", "length"),
        ]
        if body["prompt"] == "short":
            events = [self.choice_event([1], "a", "stop")]
        if body["prompt"] == "break":
            events = [self.choice_event([1], "a"), {"error": {"message": "the engine failed"}}]
        events.append({"choices": [], "usage": {}, "metrics": {"speculative_decoding": COUNTS}})
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in events:
            self.send_chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.send_chunk(b"data: [DONE]\n\n")
        self.send_chunk(b"")

    def choice_event(self, ids: list[int], text: str, reason: str | None = None) -> dict[str, Any]:
        return {"choices": [{"index": 0, "text": text, "token_ids": ids, "finish_reason": reason}], "usage": None}

    def send_chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def send_answer(self, data: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def test_stream_all_reads_concurrent_streams_to_their_end(port: int) -> None:
    stream_counts = []
    prompts = [Prompt("x"), Prompt("y", 0.8, 7)]
    streams = stream_all(port, served_model(port), prompts, 5, lambda s: stream_counts.append(len(s)))
    assert [s.token_ids for s in streams] == [[1, 2, 3, 4, 5]] * 2
    assert [(s.text, s.finish_reason, s.error) for s in streams] == [("abcde", "length", None)] * 2
    assert accept_length(streams) == 1.5
    assert total_tokens_per_second(streams) > 0
    assert stream_counts[-1] == 2
    request_body = next(body for body in Handler.request_bodies if body["prompt"] == "y")
    assert (request_body["model"], request_body["temperature"], request_body["seed"], request_body["max_tokens"]) == (
        "tiny",
        0.8,
        7,
        5,
    )


@pytest.mark.parametrize(
    ("prompt", "expected_reason"),
    [("refuse", "status 400"), ("short", "ended with 'stop' after 1 of 5"), ("break", "the engine failed")],
)
def test_stream_error_contains_the_reason_of_the_failure(port: int, prompt: str, expected_reason: str) -> None:
    (stream,) = stream_all(port, "tiny", [Prompt(prompt)], 5)
    assert stream.error is not None
    assert expected_reason in stream.error


def test_stream_all_records_an_error_if_no_server_listens() -> None:
    (stream,) = stream_all(1, "tiny", [Prompt("x")], 5)
    assert stream.error is not None
    assert stream.ended_at is not None
    assert total_tokens_per_second([stream]) == 0.0
