"""Who may ask for what: every route with every kind of key, by every spelling and method; and what is shown of keys."""

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
from tests.api.scripted import MODEL, Client, ScriptedService, http_scope

ANN, BOB, ROOT = "sk-aerie-key-of-ann", "sk-aerie-key-of-bob", "sk-aerie-key-of-root"
KEYS = ApiKeys(None, [ApiKey("ann", "use", digest_of(ANN.encode())), ApiKey("bob", "use", digest_of(BOB.encode())),
                   ApiKey("root", "admin", digest_of(ROOT.encode()))])  # fmt: skip
HEALTH, ADMINS, SHELL = {"/health", "/ready"}, {"/server_info"}, {*PAGE_PATHS}

Headers = list[tuple[bytes, bytes]]


def bearer(token: str) -> Headers:
    return [(b"authorization", f"Bearer {token}".encode())]


STRANGERS: dict[str, Headers] = {
    "none": [],
    "wrong": bearer("sk-aerie-key-of-eve"),
    "prefix": bearer(ANN[:-1]),
    "longer": bearer(ROOT + "x"),
    "prefix of all": bearer("sk-aerie-"),
    "empty": bearer(""),
    "its hash": bearer(digest_of(ROOT.encode()).hex()),
    "its hash as in the file": bearer("sha256:" + digest_of(ROOT.encode()).hex()),
    "name": bearer("root"),
    "other letters": bearer(ROOT.upper()),
    "not ascii": [(b"authorization", b"Bearer \xff\xfe")],
    "no scheme": [(b"authorization", ROOT.encode())],
    "another scheme": [(b"authorization", f"Basic {ROOT}".encode())],
    "two keys": [*bearer(ANN), *bearer(ROOT)],
    "two keys in two headers": [*bearer(ANN), (b"x-api-key", ROOT.encode())],
    "a list": bearer(f"{ANN},{ROOT}"),
    "in a cookie": [(b"cookie", f"api_key={ROOT}".encode())],
}
FRIENDS: dict[str, tuple[Headers, bool]] = {
    "use": (bearer(ANN), False),
    "another of use": (bearer(BOB), False),
    "x-api-key": ([(b"x-api-key", ANN.encode())], False),
    "the same twice": ([*bearer(ANN), (b"x-api-key", ANN.encode())], False),
    "small letters": ([(b"authorization", f"bearer  {ANN} ".encode())], False),
    "admin": (bearer(ROOT), True),
}


def spellings(path: str) -> Iterator[str]:
    """The path as it is, and as others might write it, as on the wire."""
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


async def asked(app: FastAPI, method: str, target: str, headers: Headers, **more: Any) -> tuple[int, bytes, Any]:
    """Status, body and headers of an answer, from an app that is called as uvicorn calls it; `more` of its scope."""
    sent: list[Any] = []
    messages = [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def receive() -> Any:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    await app(http_scope(target, method, headers, **more), receive, send)  # type: ignore[arg-type]
    whole = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], whole, {name.decode(): value.decode() for name, value in sent[0]["headers"]}


@pytest.fixture
def guarded(service: ScriptedService) -> FastAPI:
    return make_app(service, keys=KEYS)


def paths(app: FastAPI, *more: str) -> list[str]:
    """The paths of all routes that the app declares, with their parameters filled in, and some that it does not."""
    found = {"/v1/embeddings", *more}
    for route in app.routes:
        assert isinstance(route, Route), "a mount or a websocket: say here how to ask for it"
        assert route.methods is not None and {*route.methods} <= {*METHODS}
        found.add(re.sub(r"{[^}]*}", MODEL, route.path))
    return sorted(found)


def calls_to(paths: list[str], whole: bool) -> Iterator[tuple[str, str]]:
    """Methods and targets: each path in every spelling, with all methods if `whole`, else with GET and another one."""
    for i, path in enumerate(paths):
        for j, target in enumerate(spellings(path)):
            for method in METHODS if whole else ("GET", METHODS[1 + (i + j) % (len(METHODS) - 1)]):
                yield method, target


def test_every_route_has_a_scope_and_every_scope_a_route(guarded: FastAPI) -> None:
    assert {route.path for route in guarded.routes if isinstance(route, Route)} == {*SCOPES}
    assert {path for path, scope in SCOPES.items() if scope == "admin"} == ADMINS


def is_among(pages: set[str], method: str, target: str) -> bool:
    return method in ("GET", "HEAD") and unquote(target.partition("?")[0]) in pages


@pytest.mark.parametrize("stranger", STRANGERS)
def test_request_without_a_valid_key_gets_only_health_and_page_files(
    guarded: FastAPI, service: ScriptedService, stranger: str
) -> None:
    """The door: the page's files, which are the same for all."""

    async def scene() -> None:
        seen = set()
        for method, target in calls_to(paths(guarded, "/docs", "/-/routes"), stranger == "none"):
            status, body, headers = await asked(guarded, method, target, STRANGERS[stranger])
            seen.add(status)
            if is_among(HEALTH, method, target):
                assert status == 200 and body == b"", (method, target)
                continue
            if is_among(SHELL, method, target):
                name = unquote(target.partition("?")[0]).rpartition("/")[2] or "index.html"
                assert status == 200 and body in (b"", (HERE / name).read_bytes()), (method, target)
                continue
            assert status == 401, (method, target, body)
            error = json.loads(body)["error"]
            assert error.get("code") == "invalid_api_key" or error["type"] == "authentication_error"
            assert headers["www-authenticate"] == "Bearer"
            assert "sk-aerie" not in body.decode()
        assert seen == {200, 401}

    asyncio.run(scene())
    assert service.engine.requests == []


@pytest.mark.parametrize("friend", FRIENDS)
def test_key_gets_the_answers_of_an_open_server_within_its_scope(guarded: FastAPI, app: FastAPI, friend: str) -> None:
    headers, admin = FRIENDS[friend]

    async def scene() -> None:
        seen = set()
        for method, target in calls_to(paths(guarded), friend in ("use", "admin")):
            status, body, _ = await asked(guarded, method, target, headers)
            seen.add(status)
            if not admin and unquote(target.partition("?")[0]) in ADMINS:
                assert status == 403, (method, target)
                assert json.loads(body)["error"]["code"] == "insufficient_permissions"
                continue
            open_status, open_body, _ = await asked(app, method, target, [])
            assert status == open_status, (method, target)
            if open_status >= 400:
                assert body == open_body
        assert {200, 400, 404, 405} <= seen and (403 in seen) != admin

    asyncio.run(scene())


def test_completion_is_answered_only_with_a_valid_key(guarded: FastAPI) -> None:
    client = Client(guarded)
    good = {"Authorization": f"Bearer {ANN}"}
    assert client.complete().status_code == 401
    answer = client.post("/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 4, "seed": 1}, headers=good)
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
    """With `route_prefix: /two` Serve passes on the whole path, and the prefix as root_path."""

    async def scene() -> list[int]:
        asks = [(f"/two/{path}", bearer(token)) for path in ("health", "server_info") for token in ("", ANN, ROOT)]
        return [(await asked(guarded, "GET", path, headers, root_path="/two"))[0] for path, headers in asks]

    assert asyncio.run(scene()) == [200, 200, 200, 401, 403, 200]


def test_health_shows_the_failure_reason_only_with_a_key(guarded: FastAPI, service: ScriptedService) -> None:
    service.engine.reason = "rank 1 died at step 7: 10.0.0.7 reset the connection"
    client = Client(guarded)
    for path in ("/health", "/ready"):
        strangers = client.get(path)
        assert (strangers.status_code, "retry-after" in strangers.headers) == (503, True)
        assert strangers.json()["error"]["message"] == "the engine is not healthy"
        assert "10.0.0.7" in client.get(path, headers={"x-api-key": ANN}).text


def test_cache_salt_depends_on_the_api_key_and_the_cache_salt_field(
    service: ScriptedService, guarded: FastAPI, app: FastAPI
) -> None:
    def salt_of(client: Client, token: str | None, **fields: Any) -> int:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        body = {"model": MODEL, "prompt": "same", "max_tokens": 1, "n": 2, **fields}
        assert client.post("/v1/completions", body, headers=headers).status_code == 200
        one, other = service.engine.requests[-2:]
        assert one.cache_salt == other.cache_salt
        return one.cache_salt

    said = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}]
    plain, keyed = Client(app), Client(guarded)
    salts = [salt_of(plain, None, **fields) for fields in said]
    salts += [salt_of(keyed, token, **fields) for token in (ANN, BOB, ROOT) for fields in said]
    assert salts[0] == 0 and len(set(salts)) == 12
    assert salt_of(keyed, ANN, cache_salt="a") == salts[4]
    for wrong in ("", "x" * 257, 7, ["a"]):
        refused = plain.complete(cache_salt=wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")
    assert plain.chat(cache_salt="a", max_tokens=1).status_code == 200
    assert service.engine.requests[-1].cache_salt == salts[1]


def test_api_keys_hashes_and_salts_appear_in_no_answer_or_log(
    guarded: FastAPI, service: ScriptedService, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.handler.setFormatter(TextLines())
    caplog.set_level(logging.DEBUG)
    client, shown = Client(guarded), []
    for headers in ({"Authorization": f"Bearer {ROOT}"}, {"x-api-key": ROOT}, {"x-api-key": ROOT + "x"}):
        pages = ("/server_info", "/metrics", "/openapi.json", "/v1/models", "/health", "/nothing")
        shown += [client.get(path, headers=headers).text for path in pages]
        bodies = ({"prompt": "x", "max_tokens": 2, "cache_salt": "pepper"}, {"prompt": "x", "n": 99}, {})
        shown += [client.post("/v1/completions", {"model": MODEL, **b}, headers=headers).text for b in bodies]
        service.engine.fail_at = 0
        shown.append(client.post("/v1/completions", {"model": MODEL, "prompt": "x"}, headers=headers).text)
        service.engine.fail_at = None
    text = "\n".join([*shown, caplog.text])
    salts = {request.cache_salt for request in service.engine.requests}
    salts = {form for salt in salts for form in (str(salt), f"{salt:x}")}
    assert len(salts) == 4
    for secret in (ROOT, digest_of(ROOT.encode()).hex(), repr(digest_of(ROOT.encode())), "pepper", *salts):
        assert secret not in text
    assert "key=root" in caplog.text, "the log names who asked"


def test_cors_allows_only_the_configured_origins(service: ScriptedService) -> None:
    app = make_app(service, keys=KEYS, origins=["https://chat.example"])
    ours, other = [(b"origin", b"https://chat.example")], [(b"origin", b"https://evil.example")]
    asks = {"method": b"POST", "headers": b"authorization,x-api-key"}
    may_i = [(f"access-control-request-{name}".encode(), value) for name, value in asks.items()]

    async def scene() -> None:
        status, _, headers = await asked(app, "OPTIONS", "/v1/completions", [*ours, *may_i])
        assert (status, headers["access-control-allow-origin"]) == (200, "https://chat.example")
        assert "x-api-key" in headers["access-control-allow-headers"]
        assert "POST" in headers["access-control-allow-methods"]
        status, _, headers = await asked(app, "OPTIONS", "/v1/completions", [*other, *may_i])
        assert status == 400 and "access-control-allow-origin" not in headers
        status, _, headers = await asked(app, "OPTIONS", "/v1/completions", ours)
        assert (status, headers["access-control-allow-origin"]) == (401, "https://chat.example"), "no preflight: a call"
        status, _, headers = await asked(app, "GET", "/v1/models", [*ours, *bearer(ANN)])
        assert (status, headers["access-control-allow-origin"]) == (200, "https://chat.example")
        assert "access-control-allow-credentials" not in headers
        status, _, headers = await asked(app, "GET", "/v1/models", [*other, *bearer(ANN)])
        assert status == 200 and "access-control-allow-origin" not in headers
        status, _, headers = await asked(make_app(service), "OPTIONS", "/v1/completions", [*ours, *may_i])
        assert status == 405 and "access-control-allow-origin" not in headers, "without the setting there is no CORS"

    asyncio.run(scene())
