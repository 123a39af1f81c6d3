"""API keys: every route with every kind of key, in every spelling and method. No answer and no log shows a key."""

import asyncio
import json
import logging
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import pytest
from fastapi import FastAPI
from starlette.routing import Route

from cluster.api.core.api_keys import PAGE_PATHS, ApiKey, ApiKeys, digest_of
from cluster.api.http.middleware import SCOPES
from cluster.api.http.routes import make_app
from cluster.api.page import HERE
from cluster.observability.logs import TextLines
from tests.serving.api.scripted import MODEL, Client, ScriptedService, http_scope

ANN, BOB, ROOT = "sk-aerie-key-of-ann", "sk-aerie-key-of-bob", "sk-aerie-key-of-root"
KEYS = ApiKeys(None, [ApiKey("ann", "use", digest_of(ANN.encode())), ApiKey("bob", "use", digest_of(BOB.encode())),
                   ApiKey("root", "admin", digest_of(ROOT.encode()))])  # fmt: skip
HEALTH_PATHS, ADMIN_PATHS, PAGE_FILE_PATHS = {"/health", "/ready"}, {"/server_info"}, {*PAGE_PATHS}

Headers = list[tuple[bytes, bytes]]


def bearer(token: str) -> Headers:
    return [(b"authorization", f"Bearer {token}".encode())]


# Headers that hold no valid key.
INVALID_KEYS: dict[str, Headers] = {
    "none": [],
    "wrong": bearer("sk-aerie-key-of-eve"),
    "prefix": bearer(ANN[:-1]),
    "longer": bearer(ROOT + "x"),
    "prefix of all keys": bearer("sk-aerie-"),
    "empty": bearer(""),
    "hash of a key": bearer(digest_of(ROOT.encode()).hex()),
    "hash as in the keys file": bearer("sha256:" + digest_of(ROOT.encode()).hex()),
    "name of a key": bearer("root"),
    "upper case": bearer(ROOT.upper()),
    "not ascii": [(b"authorization", b"Bearer \xff\xfe")],
    "no scheme": [(b"authorization", ROOT.encode())],
    "another scheme": [(b"authorization", f"Basic {ROOT}".encode())],
    "two keys": [*bearer(ANN), *bearer(ROOT)],
    "two keys in two headers": [*bearer(ANN), (b"x-api-key", ROOT.encode())],
    "a list of keys": bearer(f"{ANN},{ROOT}"),
    "a key in a cookie": [(b"cookie", f"api_key={ROOT}".encode())],
}
# name: (headers that hold a valid key, whether it is an admin's key)
VALID_KEYS: dict[str, tuple[Headers, bool]] = {
    "use": (bearer(ANN), False),
    "another use key": (bearer(BOB), False),
    "x-api-key": ([(b"x-api-key", ANN.encode())], False),
    "one key in two headers": ([*bearer(ANN), (b"x-api-key", ANN.encode())], False),
    "lower-case scheme": ([(b"authorization", f"bearer  {ANN} ".encode())], False),
    "admin": (bearer(ROOT), True),
}


def spellings(path: str) -> Iterator[str]:
    """The path itself, and request targets that an attacker might send in its place."""
    yield path
    yield path + "/"
    yield "/" + path
    yield path.replace("/", "//")
    yield path.upper()
    yield path[:2].upper() + path[2:]
    yield f"/%{ord(path[1]):02x}{path[2:]}" if path[1:] else "/%00"
    yield path + "%2F"
    yield "/" + path[1:].replace("/", "%2f")
    yield "/." + path
    yield "/x/.." + path
    yield path + "/../health"
    yield "/health/.." + path
    yield "/health;" + path
    yield path + "%00"
    yield path + "?x=/health"
    yield path + ".json"


METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "TRACE", "get", "HEALTH")


async def call_app(
    app: FastAPI, method: str, target: str, headers: Headers, **scope_keys: Any
) -> tuple[int, bytes, Any]:
    """Call the app as uvicorn does. Return the answer's status, body and headers. `scope_keys` replace scope keys."""
    sent: list[Any] = []
    messages = [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def receive() -> Any:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    await app(http_scope(target, method, headers, **scope_keys), receive, send)  # type: ignore[arg-type]
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], body, {name.decode(): value.decode() for name, value in sent[0]["headers"]}


@pytest.fixture
def guarded(service: ScriptedService) -> FastAPI:
    """The app with API keys."""
    return make_app(service, keys=KEYS)


def paths(app: FastAPI, *unknown_paths: str) -> list[str]:
    """The paths of all routes of the app, with values for path parameters; and paths that no route has."""
    route_paths = {"/v1/embeddings", *unknown_paths}
    for route in app.routes:
        assert isinstance(route, Route), "this test cannot call a mount or a websocket yet"
        assert route.methods is not None and {*route.methods} <= {*METHODS}
        route_paths.add(re.sub(r"{[^}]*}", MODEL, route.path))
    return sorted(route_paths)


def calls_to(paths: list[str], all_methods: bool) -> Iterator[tuple[str, str]]:
    """(method, target) of calls to each path in every spelling: with all methods, or only with GET and one other."""
    for i, path in enumerate(paths):
        for j, target in enumerate(spellings(path)):
            for method in METHODS if all_methods else ("GET", METHODS[1 + (i + j) % (len(METHODS) - 1)]):
                yield method, target


def test_every_route_has_a_scope_and_every_scope_a_route(guarded: FastAPI) -> None:
    assert {route.path for route in guarded.routes if isinstance(route, Route)} == {*SCOPES}
    assert {path for path, scope in SCOPES.items() if scope == "admin"} == ADMIN_PATHS


def reads_one_of(paths: set[str], method: str, target: str) -> bool:
    """Whether a call reads one of these paths."""
    return method in ("GET", "HEAD") and unquote(target.partition("?")[0]) in paths


@pytest.mark.parametrize("invalid_key", INVALID_KEYS)
def test_request_without_a_valid_key_gets_only_health_and_page_files(
    guarded: FastAPI, service: ScriptedService, invalid_key: str
) -> None:
    """The page's files are open, because they are the same for everybody."""

    async def scenario() -> None:
        statuses = set()
        for method, target in calls_to(paths(guarded, "/docs", "/-/routes"), invalid_key == "none"):
            status, body, headers = await call_app(guarded, method, target, INVALID_KEYS[invalid_key])
            statuses.add(status)
            if reads_one_of(HEALTH_PATHS, method, target):
                assert status == 200 and body == b"", (method, target)
                continue
            if reads_one_of(PAGE_FILE_PATHS, method, target):
                name = unquote(target.partition("?")[0]).rpartition("/")[2] or "index.html"
                assert status == 200 and body in (b"", (HERE / name).read_bytes()), (method, target)
                continue
            assert status == 401, (method, target, body)
            error = json.loads(body)["error"]
            assert error.get("code") == "invalid_api_key" or error["type"] == "authentication_error"
            assert headers["www-authenticate"] == "Bearer"
            assert "sk-aerie" not in body.decode()
        assert statuses == {200, 401}

    asyncio.run(scenario())
    assert service.engine.requests == []


@pytest.mark.parametrize("valid_key", VALID_KEYS)
def test_key_gets_the_answers_of_an_open_server_within_its_scope(
    guarded: FastAPI, app: FastAPI, valid_key: str
) -> None:
    headers, admin = VALID_KEYS[valid_key]

    async def scenario() -> None:
        statuses = set()
        for method, target in calls_to(paths(guarded), valid_key in ("use", "admin")):
            status, body, _ = await call_app(guarded, method, target, headers)
            statuses.add(status)
            if not admin and unquote(target.partition("?")[0]) in ADMIN_PATHS:
                assert status == 403, (method, target)
                assert json.loads(body)["error"]["code"] == "insufficient_permissions"
                continue
            open_status, open_body, _ = await call_app(app, method, target, [])
            assert status == open_status, (method, target)
            if open_status >= 400:
                assert body == open_body
        assert {200, 400, 404, 405} <= statuses and (403 in statuses) != admin

    asyncio.run(scenario())


def test_completion_is_answered_only_with_a_valid_key(guarded: FastAPI) -> None:
    client = Client(guarded)
    key_header = {"Authorization": f"Bearer {ANN}"}
    assert client.complete().status_code == 401
    answer = client.post(
        "/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 4, "seed": 1}, headers=key_header
    )
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4


def test_websocket_handshake_is_closed_with_and_without_a_key(guarded: FastAPI) -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    for headers in ([], bearer(ROOT)):
        scope = {"type": "websocket", "path": "/health", "raw_path": b"/health", "headers": headers}
        asyncio.run(guarded(scope, receive, send))  # type: ignore[arg-type]
    assert [message["type"] for message in sent] == ["websocket.close"] * 2


def test_a_route_behind_a_prefix_keeps_its_scope(guarded: FastAPI) -> None:
    """With `route_prefix: /two` Serve passes the full path to the app, and the prefix as root_path."""

    async def scenario() -> list[int]:
        calls = [(f"/two/{path}", bearer(token)) for path in ("health", "server_info") for token in ("", ANN, ROOT)]
        return [(await call_app(guarded, "GET", path, headers, root_path="/two"))[0] for path, headers in calls]

    assert asyncio.run(scenario()) == [200, 200, 200, 401, 403, 200]


def test_health_shows_the_failure_reason_only_with_a_key(guarded: FastAPI, service: ScriptedService) -> None:
    service.engine.reason = "rank 1 died at step 7: 10.0.0.7 reset the connection"
    client = Client(guarded)
    for path in ("/health", "/ready"):
        keyless_response = client.get(path)
        assert (keyless_response.status_code, "retry-after" in keyless_response.headers) == (503, True)
        assert keyless_response.json()["error"]["message"] == "the engine is not healthy"
        assert "10.0.0.7" in client.get(path, headers={"x-api-key": ANN}).text


def test_cache_salt_depends_on_the_api_key_and_the_cache_salt_field(
    service: ScriptedService, guarded: FastAPI, app: FastAPI
) -> None:
    def salt_of(client: Client, token: str | None, **fields: Any) -> int:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        body = {"model": MODEL, "prompt": "same", "max_tokens": 1, "n": 2, **fields}
        assert client.post("/v1/completions", body, headers=headers).status_code == 200
        first_request, second_request = service.engine.requests[-2:]
        assert first_request.cache_salt == second_request.cache_salt
        return first_request.cache_salt

    salt_fields = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}]
    open_client, guarded_client = Client(app), Client(guarded)
    salts = [salt_of(open_client, None, **fields) for fields in salt_fields]
    salts += [salt_of(guarded_client, token, **fields) for token in (ANN, BOB, ROOT) for fields in salt_fields]
    assert salts[0] == 0 and len(set(salts)) == 12
    assert salt_of(guarded_client, ANN, cache_salt="a") == salts[4]
    for bad_salt in ("", "x" * 257, 7, ["a"]):
        refused = open_client.complete(cache_salt=bad_salt)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")
    assert open_client.chat(cache_salt="a", max_tokens=1).status_code == 200
    assert service.engine.requests[-1].cache_salt == salts[1]


def test_api_keys_hashes_and_salts_appear_in_no_answer_or_log(
    guarded: FastAPI, service: ScriptedService, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.handler.setFormatter(TextLines())
    caplog.set_level(logging.DEBUG)
    client, answer_texts = Client(guarded), []
    for headers in ({"Authorization": f"Bearer {ROOT}"}, {"x-api-key": ROOT}, {"x-api-key": ROOT + "x"}):
        pages = ("/server_info", "/metrics", "/openapi.json", "/v1/models", "/health", "/nothing")
        answer_texts += [client.get(path, headers=headers).text for path in pages]
        bodies = ({"prompt": "x", "max_tokens": 2, "cache_salt": "pepper"}, {"prompt": "x", "n": 99}, {})
        answer_texts += [client.post("/v1/completions", {"model": MODEL, **b}, headers=headers).text for b in bodies]
        service.engine.fail_at = 0
        answer_texts.append(client.post("/v1/completions", {"model": MODEL, "prompt": "x"}, headers=headers).text)
        service.engine.fail_at = None
    text = "\n".join([*answer_texts, caplog.text])
    salts = {request.cache_salt for request in service.engine.requests}
    salts = {form for salt in salts for form in (str(salt), f"{salt:x}")}
    assert len(salts) == 4
    for secret in (ROOT, digest_of(ROOT.encode()).hex(), repr(digest_of(ROOT.encode())), "pepper", *salts):
        assert secret not in text
    assert "key=root" in caplog.text, "the log names the key that a call used"


def test_cors_allows_only_the_configured_origins(service: ScriptedService) -> None:
    app = make_app(service, keys=KEYS, origins=["https://chat.example"])
    allowed_origin, foreign_origin = [(b"origin", b"https://chat.example")], [(b"origin", b"https://evil.example")]
    preflight = {"method": b"POST", "headers": b"authorization,x-api-key"}
    preflight_headers = [(f"access-control-request-{name}".encode(), value) for name, value in preflight.items()]

    async def scenario() -> None:
        status, _, headers = await call_app(app, "OPTIONS", "/v1/completions", [*allowed_origin, *preflight_headers])
        assert (status, headers["access-control-allow-origin"]) == (200, "https://chat.example")
        assert "x-api-key" in headers["access-control-allow-headers"]
        assert "POST" in headers["access-control-allow-methods"]
        status, _, headers = await call_app(app, "OPTIONS", "/v1/completions", [*foreign_origin, *preflight_headers])
        assert status == 400 and "access-control-allow-origin" not in headers
        status, _, headers = await call_app(app, "OPTIONS", "/v1/completions", allowed_origin)
        assert (status, headers["access-control-allow-origin"]) == (401, "https://chat.example"), "not a preflight"
        status, _, headers = await call_app(app, "GET", "/v1/models", [*allowed_origin, *bearer(ANN)])
        assert (status, headers["access-control-allow-origin"]) == (200, "https://chat.example")
        assert "access-control-allow-credentials" not in headers
        status, _, headers = await call_app(app, "GET", "/v1/models", [*foreign_origin, *bearer(ANN)])
        assert status == 200 and "access-control-allow-origin" not in headers
        status, _, headers = await call_app(
            make_app(service), "OPTIONS", "/v1/completions", [*allowed_origin, *preflight_headers]
        )
        assert status == 405 and "access-control-allow-origin" not in headers, "without the setting there is no CORS"

    asyncio.run(scenario())
