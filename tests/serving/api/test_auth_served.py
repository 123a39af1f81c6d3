"""API keys on a real Ray Serve: calls without a key are denied, and keys change while the server runs."""

import json
from pathlib import Path
from urllib.parse import unquote

import httpx
import pytest

from cluster.api.http.middleware import SCOPES
from cluster.api.launch.keys import create, remove
from tests.serving.api.apps import LOG, app_args, eventually, serving
from tests.serving.api.test_auth import HEALTH_PATHS, PAGE_FILE_PATHS, spellings
from tests.serving.api.test_proxy_errors import send_raw

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("local_ray")]

COMPLETION_BODY = {"model": "counting", "prompt": [1, 2, 3], "max_tokens": 3}


def request_bytes(method: str, target: str, *headers: str) -> bytes:
    """The bytes of an HTTP request without a body."""
    lines = [f"{method} {target} HTTP/1.1", "Host: x", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode()


def key_status(url: str, key: str, **fields: object) -> int:
    """The status of a completion request with this API key."""
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(
        f"{url}/v1/completions", json={**COMPLETION_BODY, **fields}, headers=headers, timeout=20
    ).status_code


def test_server_answers_only_health_and_page_files_without_a_key(tmp_path: Path) -> None:
    keys_file = tmp_path / "keys"
    root = create(keys_file, "root", "admin")
    with serving(app_args(app={"api_keys_file": str(keys_file)})) as url:
        paths = sorted({path.partition("{")[0] + "x" * ("{" in path) for path in SCOPES} | {"/-/routes", "/-/other"})
        for path in paths:
            for target in (*spellings(path), f"http://x{path}"):
                for method in ("GET", "POST"):
                    status, headers, body = send_raw(url, request_bytes(method, target, "Content-Length: 0"))
                    request_path = unquote(target.partition("?")[0]).removeprefix("http://x")
                    if request_path == "/-/routes":
                        assert (status, headers["content-type"]) == (404, "application/json"), (method, target)
                        assert b"counting" not in body, "the answer must not name the application"
                    elif request_path in HEALTH_PATHS and method == "GET":
                        assert (status, body) == (200, b""), (method, target)
                    elif request_path in PAGE_FILE_PATHS and method == "GET":
                        assert status == 200 and b"counting" not in body, (method, target)
                    else:
                        assert status == 401, (method, target, body)
                        error = json.loads(body)["error"]
                        is_anthropic_error = error.get("code", error["type"]) == "authentication_error"
                        assert is_anthropic_error or error["code"] == "invalid_api_key"
        upgrade = ("Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")
        status, _, _ = send_raw(url, request_bytes("GET", "/server_info", "Connection: Upgrade", *upgrade))
        assert status in (401, 403)
        assert send_raw(url, request_bytes("GET", "/-/healthz"))[0] == 200
        assert key_status(url, root) == 200


@pytest.mark.parametrize("ingress", ["direct", "resilient"])
def test_running_server_reloads_added_and_removed_api_keys(tmp_path: Path, ingress: str) -> None:
    keys_file = tmp_path / "keys"
    ann, root = create(keys_file, "ann", "use"), create(keys_file, "root", "admin")
    with serving(app_args(app={"api_keys_file": str(keys_file), "ingress": ingress})) as url:
        assert (key_status(url, ann), key_status(url, root), key_status(url, ann[:-1])) == (200, 200, 401)
        statuses = [httpx.get(f"{url}/server_info", headers={"x-api-key": key}).status_code for key in (ann, root)]
        assert statuses == [403, 200]
        bob = create(keys_file, "bob", "use")
        assert eventually(lambda: key_status(url, bob) == 200)
        remove(keys_file, "ann")
        assert eventually(lambda: key_status(url, ann) == 401)
        keys_file.write_text("broken\n")
        assert eventually(
            lambda: "the API keys stay as they were" in LOG.read_text() if key_status(url, bob) == 200 else None
        )
        assert (key_status(url, ann), key_status(url, bob)) == (401, 200)
    log_text = LOG.read_text()
    assert "key=bob" in log_text and "the API keys are now: root (admin), bob (use)" in log_text
    assert not any(key in log_text for key in (ann, bob, root))
