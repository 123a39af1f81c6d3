"""API keys on a real Serve: whatever comes over the wire is denied without one, and keys change while it serves."""

import json
from pathlib import Path
from urllib.parse import unquote

import httpx
import pytest

from cluster.api.http.middleware import SCOPES
from cluster.api.launch.keys import create, remove
from tests.api.apps import LOG, arguments, eventually, serving
from tests.api.test_auth import HEALTH, SHELL, spellings
from tests.api.test_proxy_errors import raw

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

WORK = {"model": "counting", "prompt": [1, 2, 3], "max_tokens": 3}


def head(method: str, target: str, *headers: str) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "Host: x", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode()


def ask(url: str, key: str, **more: object) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{url}/v1/completions", json={**WORK, **more}, headers=headers, timeout=20).status_code


def test_server_answers_only_health_and_page_files_without_a_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    root = create(file, "root", "admin")
    with serving(arguments(app={"api_keys_file": str(file)})) as url:
        paths = sorted({path.partition("{")[0] + "x" * ("{" in path) for path in SCOPES} | {"/-/routes", "/-/other"})
        for path in paths:
            for target in (*spellings(path), f"http://x{path}"):
                for method in ("GET", "POST"):
                    status, headers, body = raw(url, head(method, target, "Content-Length: 0"))
                    asked = unquote(target.partition("?")[0]).removeprefix("http://x")
                    if asked == "/-/routes":
                        assert (status, headers["content-type"]) == (404, "application/json"), (method, target)
                        assert b"counting" not in body, "the application is not named"
                    elif asked in HEALTH and method == "GET":
                        assert (status, body) == (200, b""), (method, target)
                    elif asked in SHELL and method == "GET":
                        assert status == 200 and b"counting" not in body, (method, target)
                    else:
                        assert status == 401, (method, target, body)
                        error = json.loads(body)["error"]
                        anthropic = error.get("code", error["type"]) == "authentication_error"
                        assert anthropic or error["code"] == "invalid_api_key"
        upgrade = ("Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")
        status, _, _ = raw(url, head("GET", "/server_info", "Connection: Upgrade", *upgrade))
        assert status in (401, 403)
        assert raw(url, head("GET", "/-/healthz"))[0] == 200
        assert ask(url, root) == 200


@pytest.mark.slow
@pytest.mark.parametrize("ingress", ["direct", "resilient"])
def test_running_server_reloads_added_and_removed_api_keys(tmp_path: Path, ingress: str) -> None:
    file = tmp_path / "keys"
    ann, root = create(file, "ann", "use"), create(file, "root", "admin")
    with serving(arguments(app={"api_keys_file": str(file), "ingress": ingress})) as url:
        assert (ask(url, ann), ask(url, root), ask(url, ann[:-1])) == (200, 200, 401)
        statuses = [httpx.get(f"{url}/server_info", headers={"x-api-key": key}).status_code for key in (ann, root)]
        assert statuses == [403, 200]
        bob = create(file, "bob", "use")
        assert eventually(lambda: ask(url, bob) == 200)
        remove(file, "ann")
        assert eventually(lambda: ask(url, ann) == 401)
        file.write_text("broken\n")
        assert eventually(lambda: "the API keys stay as they were" in LOG.read_text() if ask(url, bob) == 200 else None)
        assert (ask(url, ann), ask(url, bob)) == (401, 200)
    said = LOG.read_text()
    assert "key=bob" in said and "the API keys are now: root (admin), bob (use)" in said
    assert not any(key in said for key in (ann, bob, root))
