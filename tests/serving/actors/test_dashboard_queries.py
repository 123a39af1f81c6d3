"""A real Prometheus scrapes a server under load, and answers every query of the dashboard and of the alerts."""

import asyncio
import json
import math
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.serving.actors.test_alerts import DEPLOY, eventually, prometheus
from tests.serving.actors.test_serve_command import aerie_serve, free_port, wait_for
from tests.serving.api.apps import ask

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="there is no Prometheus here (Debian: apt-get install prometheus)"
    ),
]

PANELS_WITHOUT_DATA = {"Loss to serving again"}
"""The panels that show nothing while no rank is lost: without restarts there is no quantile of their durations."""
ALERTS_WITHOUT_DATA = {"AerieRestartsSlow"}
"""The alerts whose value does not exist while no rank is lost."""
MODEL = "aerie-demo"
STREAMS = 6
COMPARISON = re.compile(r"(?s)(?P<value>.+?)\s*(==|>|<)\s*[\d.]+\s*")


def dashboard_expressions() -> list[tuple[str, str]]:
    """(panel title, PromQL expression) of every panel, as Grafana would send it for all models and ranks."""
    dashboard = json.loads((DEPLOY / "grafana" / "dashboards" / "aerie.json").read_text(encoding="utf-8"))
    panels = [inner for panel in dashboard["panels"] for inner in (panel, *panel.get("panels", ()))]
    values = {"$__rate_interval": "20s", "$model": ".*", "$rank": ".*"}
    panel_queries = []
    for panel in panels:
        for target in panel.get("targets", ()):
            expression = target["expr"]
            for name, value in values.items():
                expression = expression.replace(name, value)
            panel_queries.append((panel["title"], expression))
    return panel_queries


def alert_expressions() -> list[tuple[str, str]]:
    """(alert name, PromQL expression of the value that the alert compares with its limit) of every alert."""
    (group,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    alert_queries = []
    for rule in group["rules"]:
        value = COMPARISON.fullmatch(rule["expr"])
        assert value is not None, rule
        alert_queries.append((rule["alert"], value["value"]))
    return alert_queries


@contextmanager
def load_on_server(url: str) -> Iterator[None]:
    """Keep `STREAMS` clients busy while the block runs: each sends one streaming request after another.

    The streams run on both ranks. The prompts are Python code. Half of the clients change the end of
    their prompt with each request; the other half repeat the same prompt, which is in the prefix cache.
    """
    stop_event = threading.Event()

    async def send_requests(client: httpx.AsyncClient, number: int) -> None:
        turn = 0
        while not stop_event.is_set():
            prompt: Any = "def read(self, size=-1):\n    " * (1 + number) + f"x = {turn if number % 2 else 0}"
            turn += 1
            response = await ask(client, url, prompt, 40, model=MODEL, stream=True, temperature=0, ignore_eos=True)
            assert response.status == 200 and not response.error, response

    async def run_clients() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            await asyncio.gather(*(send_requests(client, number) for number in range(STREAMS)))

    errors: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(run_clients())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop_event.set()
        thread.join()
    assert not errors, errors


def test_dashboard_and_alert_queries_return_data_under_load(tmp_path: Path) -> None:
    port, query_without_data = free_port(), dict[str, str]()
    url = f"http://127.0.0.1:{port}"
    with aerie_serve(f"http_port={port}", log=tmp_path / "log", RAY_USAGE_STATS_ENABLED="0") as process:
        wait_for(process, "READY ")
        with load_on_server(url), prometheus(tmp_path, f"127.0.0.1:{port}") as api:

            def series_labels(expr: str) -> list[dict[str, str]]:
                """The labels of the series that have a finite value."""
                response = httpx.get(f"{api}/query", params={"query": expr}, timeout=10).json()
                assert response["status"] == "success", (expr, response)
                return [row["metric"] for row in response["data"]["result"] if math.isfinite(float(row["value"][1]))]

            def queries_without_data() -> dict[str, str]:
                """The panels and alerts, with their queries, that have no finite value, or not one for each rank."""
                without_data = {
                    name: expr
                    for name, expr in [*dashboard_expressions(), *alert_expressions()]
                    if not series_labels(expr)
                }
                for name, expr in dashboard_expressions():
                    if "by (rank)" in expr and "max(" not in expr:
                        ranks = {labels["rank"] for labels in series_labels(expr)}
                        without_data |= {} if ranks == {"0", "1"} else {name: f"{ranks} only: {expr}"}
                return without_data

            def only_fault_queries_lack_data() -> bool:
                query_without_data.clear()
                query_without_data.update(queries_without_data())
                return query_without_data.keys() <= PANELS_WITHOUT_DATA | ALERTS_WITHOUT_DATA

            try:
                eventually("not every query gives data", only_fault_queries_lack_data)
            except AssertionError:
                raise AssertionError(query_without_data) from None
            assert query_without_data.keys() == PANELS_WITHOUT_DATA | ALERTS_WITHOUT_DATA, (
                "a query of faults has a value without a fault"
            )
            depth_expression = next(expr for name, expr in dashboard_expressions() if name == "Acceptance by depth")
            assert {labels["depth"] for labels in series_labels(depth_expression)} >= {"1", "2", "3"}
            alerts = httpx.get(f"{api}/alerts", timeout=10).json()["data"]["alerts"]
            assert alerts == [], "an alert fires although nothing is wrong with this server"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    assert len(dashboard_expressions()) >= 60 and len(alert_expressions()) >= 8, "not all queries were found"
