"""The status page's files and data route: what they contain, for which keys, and how they keep other scripts out."""

import asyncio
import json
import re

import httpx
import pytest

from cluster.actors.messages import GangHistory, Loss
from cluster.api.core.api_keys import PAGE_PATHS, ApiKey, ApiKeys, digest_of
from cluster.api.http.routes import make_app
from cluster.api.page import HERE
from cluster.api.serve.settings import parse
from cluster.observability.metrics import EngineMetrics
from cluster.observability.step_stats import StepStats
from tests.serving.api.scripted import MODEL, Client, ScriptedService

SOURCES = {file.name: file.read_text(encoding="utf-8") for file in HERE.iterdir() if file.suffix in (".js", ".html")}
LOSS = Loss(1, "died", 7, "extend", "10.0.0.7 reset the connection of pid 4321", 0, 1000.0, 0.2, 3.5, 1)


def test_page_files_are_served_and_no_other_files(client: Client) -> None:
    names = {path.rpartition("/")[2] or "index.html" for path in PAGE_PATHS}
    assert names == {file.name for file in HERE.iterdir() if file.suffix not in (".py", "")}
    for path in PAGE_PATHS:
        answer = client.get(path)
        assert answer.status_code == 200 and answer.text
        policy = answer.headers["content-security-policy"].split("; ")
        assert policy[0] == "default-src 'none'" and "script-src 'self'" in policy and "connect-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy and "form-action 'none'" in policy
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert client.get("/").headers["content-type"] == "text/html; charset=utf-8"
    assert client.get("/page/page.js").headers["content-type"] == "text/javascript; charset=utf-8"
    assert client.get("/page/../keys.py").status_code == client.get("/page/index.html").status_code == 404
    assert client.post("/", {}).status_code == 405


@pytest.mark.parametrize(
    "keys", [None, ApiKeys(None, [ApiKey("ann", "use", digest_of(b"k"))])], ids=["open", "with keys"]
)
def test_page_behind_a_prefix_redirects_to_the_trailing_slash(service: ScriptedService, keys: ApiKeys | None) -> None:
    """The page names its files by relative addresses, so a browser must load the page at the address with the slash."""

    async def request_page(prefix: str, path: str, method: str = "GET") -> httpx.Response:
        asgi_transport = httpx.ASGITransport(make_app(service, keys=keys), root_path=prefix)
        async with httpx.AsyncClient(transport=asgi_transport, base_url="http://x", follow_redirects=True) as client:
            return await client.request(method, path)

    for prefix in ("/llm/one", "/l m/a:b"):
        response = asyncio.run(request_page(prefix, f"{prefix}?a=b"))
        assert (response.status_code, response.url.path, response.url.query) == (200, f"{prefix}/", b"a=b")
        assert response.text == asyncio.run(request_page(prefix, f"{prefix}/")).text
        assert asyncio.run(request_page(prefix, prefix, "HEAD")).status_code == 200
        post_statuses = [asyncio.run(request_page(prefix, path, "POST")).status_code for path in (prefix, f"{prefix}/")]
        assert post_statuses == [405, 405] if keys is None else [401, 401]
    assert asyncio.run(request_page("", "/")).status_code == 200


def test_page_sources_use_no_other_hosts_and_no_html_injection() -> None:
    for name, text in SOURCES.items():
        addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"')]*", text))
        assert addresses <= {"http://www.w3.org/2000/svg", "//www.w3.org/2000/svg"}, name
        for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "srcdoc"):
            assert sink not in text, (name, sink)
        assert not re.search(r"<script(?![^>]*src=)|\son\w+=|\sstyle=", text), name
        imported = set(re.findall(r'from "\./([\w.]+)"', text))
        assert imported <= SOURCES.keys(), name


def test_page_setting_turns_the_page_off(service: ScriptedService) -> None:
    client = Client(make_app(service, page=False))
    for path in (*PAGE_PATHS, "/server_state"):
        assert client.get(path).status_code == 404
    assert client.get("/health").status_code == 200
    models = [{"model_loading_config": {"model_id": "m"}}]
    assert parse({"llm_configs": models}).page
    assert not parse({"llm_configs": models, "page": False}).page


def metrics_sample() -> bytes:
    """The serialized metrics of a rank after two steps: three drafts that commit eight tokens."""
    metrics = EngineMetrics(model_name=MODEL, rank=0, depths=3)
    for accept_lengths in ([1, 4], [3]):
        depths = [sum(n > d for n in accept_lengths) for d in (1, 2, 3)]
        drafts = len(accept_lengths)
        metrics.observe_step(
            StepStats(
                accept_lens=accept_lengths,
                accepted_by_depth=depths,
                drafts=drafts,
                committed_tokens=sum(accept_lengths),
            )
        )
    return metrics.serialize()


def test_server_state_reports_engine_status_and_metrics(
    client: Client, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def metrics() -> list[bytes]:
        return [metrics_sample(), metrics_sample()]

    monkeypatch.setattr(service.engine, "metrics", metrics)
    service.engine.history = GangHistory(epoch=1, restarts=(LOSS,), gang="aerie/1")
    service.metrics.on_loss(1, "died")
    state = client.get("/server_state").json()
    assert (state["model"], state["healthy"], state["life"], state["gang"]) == (MODEL, True, 1, "aerie/1")
    assert state["counts"]["generated_tokens"] == 16
    assert state["counts"]["drafts"] == 6
    assert state["counts"]["accepted_draft_tokens"] == 10 == sum(state["accepted_by_depth"])
    assert state["counts"]["rank_losses"] == 1
    assert state["accepted_by_depth"] == [4, 4, 2]
    [rank] = state["ranks"]
    assert (rank["rank"], rank["state"], rank["drafts"], rank["accepted_by_depth"]) == (0, "idle", 6, [4, 4, 2])
    assert rank["draft_rejected"] is False
    assert state["settings"]["speculative_num_draft_tokens"] == 1 and state["settings"]["draft"] is None
    [loss] = state["losses"]
    assert (loss["rank"], loss["kind"], loss["reason"], loss["restored_s"]) == (1, "died", LOSS.reason, 3.5)
    assert service.metrics.outcomes["stop"]._value.get() == 0


def test_server_state_hides_loss_causes_and_pids_from_use_keys(service: ScriptedService) -> None:
    tokens = {"use": "sk-aerie-use", "admin": "sk-aerie-admin"}
    keys = ApiKeys(None, [ApiKey(name, name, digest_of(token.encode())) for name, token in tokens.items()])  # type: ignore[arg-type]
    client = Client(make_app(service, keys=keys))
    service.engine.history, service.engine.reason = GangHistory(restarts=(LOSS,)), "10.0.0.7 is gone"
    assert client.get("/server_state").status_code == 401
    assert client.get("/").status_code == 200
    responses = {name: client.get("/server_state", headers={"x-api-key": token}) for name, token in tokens.items()}
    assert {answer.status_code for answer in responses.values()} == {200}
    admin, use = responses["admin"].json(), responses["use"].json()
    assert (admin["reason"], admin["losses"][0]["reason"]) == ("10.0.0.7 is gone", LOSS.reason)
    assert (use["reason"], use["losses"][0]["reason"], use["losses"][0]["kind"]) == ("", "", "died")
    state_text = json.dumps(use)
    for secret in ("10.0.0.7", "4321", "pid", "none", "model_path"):
        assert secret not in state_text, secret


def test_server_state_answers_when_the_engine_status_fails(client: Client, service: ScriptedService) -> None:
    async def failing() -> None:
        raise RuntimeError("no engine")

    service.engine.status = failing  # type: ignore[method-assign,assignment]
    state = client.get("/server_state").json()
    assert (state["healthy"], state["ranks"], state["settings"]) == (False, [], {})


def test_page_files_share_the_route_label_other_in_metrics(client: Client) -> None:
    for path in (*PAGE_PATHS, "/server_state"):
        client.get(path)
    page = client.get("/metrics").text
    assert (
        f'route="other",status="200"}} {len(PAGE_PATHS)}.0' in page
        and 'route="/server_state",status="200"} 1.0' in page
    )
    assert not any(f'route="{path}"' in page for path in PAGE_PATHS)
