"""A rank is killed while a real Prometheus scrapes the server: the shipped alert fires and the panel shows the loss.

The test needs the `prometheus` program (Debian's package of that name). Without it, the test fails and says so.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.serving.actors.test_serve_command import aerie_serve, free_port, tiny_pair, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow]

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
WITHIN_S = 120.0


def program_path(name: str) -> str:
    found = shutil.which(name)
    assert found, f"{name} is not on the PATH; install Prometheus (apt-get install prometheus) to run this test"
    return found


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """Run Prometheus on loopback and yield the URL of its API.

    Its config is deploy/prometheus.yml with one target, and with a scrape and an evaluation every second.
    """
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
    config["rule_files"] = [str(DEPLOY / name) for name in config["rule_files"]]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    process = subprocess.Popen(
        [
            program_path("prometheus"),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"http://127.0.0.1:{port}/api/v1"
    finally:
        process.terminate()
        process.wait(timeout=20)


def eventually(failure_message: str, condition: Callable[[], Any]) -> Any:
    """Wait until a condition is true and return its value. Fails with `failure_message` after `WITHIN_S`."""
    deadline = time.monotonic() + WITHIN_S
    while True:
        try:
            if value := condition():
                return value
        except httpx.HTTPError:
            pass
        assert time.monotonic() < deadline, failure_message
        time.sleep(0.2)


def panel_expression(title: str) -> str:
    """The PromQL expression of the dashboard panel with this title, as Grafana would send it."""
    dashboard = json.loads((DEPLOY / "grafana" / "dashboards" / "aerie.json").read_text())
    (expression,) = [target["expr"] for p in dashboard["panels"] if p["title"] == title for target in p["targets"]]
    return str(expression).replace("$__rate_interval", "1m").replace("$model", ".*").replace("$rank", ".*")


def test_killed_rank_fires_the_alert_and_appears_in_dashboard_and_log(tmp_path: Path) -> None:
    promtool_check = subprocess.run(
        [program_path("promtool"), "check", "rules", str(DEPLOY / "alerts.yml")], capture_output=True
    )
    assert promtool_check.returncode == 0, promtool_check.stderr
    port, log = free_port(), tmp_path / "server.log"
    url = f"http://127.0.0.1:{port}"
    with aerie_serve(f"http_port={port}", *tiny_pair(), "tp_size=2", "attn_dp_size=2", log=log) as process:
        wait_for(process, "READY ")
        with prometheus(tmp_path, f"127.0.0.1:{port}") as api:

            def query(expr: str) -> list[dict[str, Any]]:
                response = httpx.get(f"{api}/query", params={"query": expr}, timeout=10).json()
                assert response["status"] == "success", response
                result_rows: list[dict[str, Any]] = response["data"]["result"]
                return result_rows

            rank_loss_expression = panel_expression("Ranks lost")
            eventually("fewer than two scrapes", lambda: query("count_over_time(aerie_rank_losses_total[1m]) >= 2"))
            assert {float(row["value"][1]) for row in query(rank_loss_expression)} == {0.0}
            (rank,) = [r for r in httpx.get(f"{url}/server_info").json()["ranks"] if r["rank"] == 1]
            os.kill(rank["pid"], signal.SIGKILL)

            panel_rows = eventually(
                "the panel shows no lost rank",
                lambda: [row for row in query(rank_loss_expression) if float(row["value"][1]) > 0],
            )
            assert [row["metric"] for row in panel_rows] == [{"rank": "1", "kind": "died"}]
            alerts = eventually(
                "no alert fires",
                lambda: [a for a in httpx.get(f"{api}/alerts").json()["data"]["alerts"] if a["state"] == "firing"],
            )
            assert [(a["labels"]["alertname"], a["labels"]["rank"]) for a in alerts] == [("AerieRankLost", "1")]
            console_text = wait_for(process, "serves again")
            metrics_page = eventually("no metrics page", lambda: httpx.get(f"{url}/metrics").raise_for_status().content)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0

    line_start = r"\d{4}-\d\d-\d\dT[\d:.]+Z ERROR cluster\.actors\.gang gang \S+, incarnation 0: "
    line = line_start + r"rank 1 died at step \d+, phase \w+: .+"
    assert len(re.findall(line, console_text)) == 1, "one line on the console while the server runs"
    assert f"more in the log, {log}" in console_text
    assert len(re.findall(line, log.read_text())) == 1, "one line in the log after the server has ended"
    # promtool warns about the colon in the names of vLLM's series, because a colon is meant for recording rules. The
    # names stay, because tools look for them.
    promtool_warnings = subprocess.run(
        [program_path("promtool"), "check", "metrics"], input=metrics_page, capture_output=True
    ).stderr.decode()
    assert [line for line in promtool_warnings.splitlines() if not line.startswith("vllm:")] == []
