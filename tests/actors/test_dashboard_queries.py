"""Every query of the dashboard and of the alerts, asked of a real Prometheus that scrapes a server under load."""

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

from tests.actors.test_alerts import DEPLOY, eventually, prometheus
from tests.actors.test_serve_command import aerie_serve, free_port, wait_for
from tests.api.apps import ask

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="there is no Prometheus here (Debian: apt-get install prometheus)"
    ),
]

OF_FAULTS = {"Loss to serving again"}
"""Panels that show nothing while no rank is lost: of restarts that did not happen there is no quantile."""
ALERTS_OF_FAULTS = {"AerieRestartsSlow"}
MODEL = "aerie-demo"
STREAMS = 6
LIMIT = re.compile(r"(?s)(?P<value>.+?)\s*(==|>|<)\s*[\d.]+\s*")


def queries() -> list[tuple[str, str]]:
    """Panels and their expressions, as Grafana would send them for all models and ranks."""
    board = json.loads((DEPLOY / "grafana" / "dashboards" / "aerie.json").read_text(encoding="utf-8"))
    panels = [inner for panel in board["panels"] for inner in (panel, *panel.get("panels", ()))]
    values = {"$__rate_interval": "20s", "$model": ".*", "$rank": ".*"}
    found = []
    for panel in panels:
        for target in panel.get("targets", ()):
            expr = target["expr"]
            for name, value in values.items():
                expr = expr.replace(name, value)
            found.append((panel["title"], expr))
    return found


def rules() -> list[tuple[str, str]]:
    """Alerts, and the value that each compares with its limit."""
    (group,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    found = []
    for rule in group["rules"]:
        value = LIMIT.fullmatch(rule["expr"])
        assert value is not None, rule
        found.append((rule["alert"], value["value"]))
    return found


@contextmanager
def loaded(url: str) -> Iterator[None]:
    """Streams of Python on both ranks, one after another, half of their prompts with a beginning that is known."""
    over = threading.Event()

    async def one(client: httpx.AsyncClient, number: int) -> None:
        turn = 0
        while not over.is_set():
            prompt: Any = "def read(self, size=-1):\n    " * (1 + number) + f"x = {turn if number % 2 else 0}"
            turn += 1
            answer = await ask(client, url, prompt, 40, model=MODEL, stream=True, temperature=0, ignore_eos=True)
            assert answer.status == 200 and not answer.error, answer

    async def whole() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            await asyncio.gather(*(one(client, number) for number in range(STREAMS)))

    failed: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(whole())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert not failed, failed


def test_dashboard_and_alert_queries_return_data_under_load(tmp_path: Path) -> None:
    port, missing = free_port(), dict[str, str]()
    url = f"http://127.0.0.1:{port}"
    with aerie_serve(f"http_port={port}", log=tmp_path / "log", RAY_USAGE_STATS_ENABLED="0") as process:
        wait_for(process, "READY ")
        with loaded(url), prometheus(tmp_path, f"127.0.0.1:{port}") as api:

            def series(expr: str) -> list[dict[str, str]]:
                """The labels of the series that have a number."""
                answer = httpx.get(f"{api}/query", params={"query": expr}, timeout=10).json()
                assert answer["status"] == "success", (expr, answer)
                return [row["metric"] for row in answer["data"]["result"] if math.isfinite(float(row["value"][1]))]

            def lacking() -> dict[str, str]:
                """What has no number, or not one for each rank that it is grouped by; with its query."""
                found = {name: expr for name, expr in [*queries(), *rules()] if not series(expr)}
                for name, expr in queries():
                    if "by (rank)" in expr and "max(" not in expr:
                        ranks = {labels["rank"] for labels in series(expr)}
                        found |= {} if ranks == {"0", "1"} else {name: f"{ranks} only: {expr}"}
                return found

            def complete() -> bool:
                missing.clear()
                missing.update(lacking())
                return missing.keys() <= OF_FAULTS | ALERTS_OF_FAULTS

            try:
                eventually("not every query gives data", complete)
            except AssertionError:
                raise AssertionError(missing) from None
            assert missing.keys() == OF_FAULTS | ALERTS_OF_FAULTS, "these would show faults that did not happen"
            depths = next(expr for name, expr in queries() if name == "Acceptance by depth")
            assert {labels["depth"] for labels in series(depths)} >= {"1", "2", "3"}
            alerts = httpx.get(f"{api}/alerts", timeout=10).json()["data"]["alerts"]
            assert alerts == [], "nothing is wrong with this server"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    assert len(queries()) > 50 and len(rules()) >= 6
