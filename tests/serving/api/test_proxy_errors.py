"""Errors of Ray Serve's own proxy: JSON like all other errors, also when a replica dies."""

import json
import socket
import threading
from urllib.parse import urlsplit

import httpx
import pytest

from tests.serving.actors.counting_engine import SLOW
from tests.serving.api.apps import app_args, eventually, health_status, kill, serving

REPLICA = "ServeReplica:counting:aerie-counting"
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("local_ray")]


def send_raw(url: str, request: bytes, close: bool = False) -> tuple[int, dict[str, str], bytes]:
    """Send bytes, also invalid HTTP, and return status, headers and body. `close` shuts down the sending side."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        connection.sendall(request)
        if close:
            connection.shutdown(socket.SHUT_WR)
        connection.settimeout(30)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(first.split()[1]), headers, body


def test_proxy_answers_json_to_bad_headers_timeouts_and_lost_replicas() -> None:
    with serving(app_args()) as url:
        request = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Request-Id: \xff\r\n\r\n"
        status, headers, body = send_raw(url, request)
        assert (status, headers["content-type"]) == (400, "application/json")
        assert json.loads(body)["error"]["param"] == "x-request-id"
        assert httpx.head(f"{url}/health").status_code == 200

        payload = json.dumps({"model": "counting", "prompt": [7, 8], "max_tokens": 3}).encode()
        post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % len(payload)
        h2c_offer = (
            b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
        )
        for head in (post + b"Connection: close\r\n", post + h2c_offer):  # Java's client offers h2c with every request
            status, _, body = send_raw(url, head + b"\r\n" + payload, close=h2c_offer in head)
            assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 3)

        slow_body = {"model": "counting", "prompt": [SLOW, 1], "max_tokens": 2000, "stream": True}
        timeout_header = {"x-request-timeout-seconds": "4"}
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=slow_body, headers=timeout_header, timeout=60
        ) as answer:
            last = [line for line in answer.iter_lines() if line.startswith("data: {")][-1]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == "request_timeout" and "longer than 4 s" in error["message"]

        received: list[str] = []
        statuses: list[int] = []

        def stream() -> None:
            body = {"model": "counting", "prompt": [SLOW, 1], "max_tokens": 2000, "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
                received.extend(answer.iter_lines())

        def complete() -> None:
            body = {"model": "counting", "prompt": [SLOW, 2], "max_tokens": 2000}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            assert answer.headers["content-type"] == "application/json"
            statuses.append(answer.status_code)
            received.append(answer.json()["error"]["code"])

        threads = [threading.Thread(target=stream), threading.Thread(target=complete)]
        for thread in threads:
            thread.start()
        running = lambda: httpx.get(f"{url}/server_info").json()["running"] == 2  # noqa: E731
        assert eventually(running)
        kill(REPLICA)
        for thread in threads:
            thread.join(60)
        assert statuses == [503]
        events = [line for line in received if line.startswith("data: {")]
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "replica_lost"
        assert "replica_lost" in received
        assert eventually(lambda: health_status(url) == 200, within_s=60)
