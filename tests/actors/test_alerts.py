"""A rank is killed under a real Prometheus with the rules that are shipped: the alert fires and the panel shows it.

Needs the `prometheus` program (Debian's package of that name). It says so where there is none.
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

from tests.actors.test_serve_command import aerie_serve, free_port, tiny_pair, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow]

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
WITHIN_S = 120.0


def program(name: str) -> str:
    found = shutil.which(name)
    assert found, f"{name} is not on the PATH; install Prometheus (apt-get install prometheus) to run this test"
    return found


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """Prometheus on loopback with deploy/prometheus.yml, aimed at a target and quicker to look."""
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
    config["rule_files"] = [str(DEPLOY / name) for name in config["rule_files"]]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    process = subprocess.Popen(
        [
            program("prometheus"),
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


def eventually(what: str, condition: Callable[[], Any]) -> Any:
    until = time.monotonic() + WITHIN_S
    while True:
        try:
            if found := condition():
                return found
        except httpx.HTTPError:
            pass
        assert time.monotonic() < until, what
        time.sleep(0.2)


def panel(title: str) -> str:
    """The expression of a panel of the dashboard, as Grafana would send it."""
    board = json.loads((DEPLOY / "grafana" / "dashboards" / "aerie.json").read_text())
    (expr,) = [target["expr"] for p in board["panels"] if p["title"] == title for target in p["targets"]]
    return str(expr).replace("$__rate_interval", "1m").replace("$model", ".*").replace("$rank", ".*")


def test_killed_rank_fires_the_alert_and_appears_in_dashboard_and_log(tmp_path: Path) -> None:
    checked = subprocess.run([program("promtool"), "check", "rules", str(DEPLOY / "alerts.yml")], capture_output=True)
    assert checked.returncode == 0, checked.stderr
    port, log = free_port(), tmp_path / "server.log"
    url = f"http://127.0.0.1:{port}"
    with aerie_serve(f"http_port={port}", *tiny_pair(), "tp_size=2", "attn_dp_size=2", log=log) as process:
        wait_for(process, "READY ")
        with prometheus(tmp_path, f"127.0.0.1:{port}") as api:

            def query(expr: str) -> list[dict[str, Any]]:
                answer = httpx.get(f"{api}/query", params={"query": expr}, timeout=10).json()
                assert answer["status"] == "success", answer
                found: list[dict[str, Any]] = answer["data"]["result"]
                return found

            lost = panel("Ranks lost")
            eventually("two scrapes", lambda: query("count_over_time(aerie_rank_losses_total[1m]) >= 2"))
            assert {float(row["value"][1]) for row in query(lost)} == {0.0}
            (rank,) = [r for r in httpx.get(f"{url}/server_info").json()["ranks"] if r["rank"] == 1]
            os.kill(rank["pid"], signal.SIGKILL)

            shown = eventually("the panel", lambda: [row for row in query(lost) if float(row["value"][1]) > 0])
            assert [row["metric"] for row in shown] == [{"rank": "1", "kind": "died"}]
            alerts = eventually(
                "the alert",
                lambda: [a for a in httpx.get(f"{api}/alerts").json()["data"]["alerts"] if a["state"] == "firing"],
            )
            assert [(a["labels"]["alertname"], a["labels"]["rank"]) for a in alerts] == [("AerieRankLost", "1")]
            said = wait_for(process, "serves again")
            page = eventually("it serves again", lambda: httpx.get(f"{url}/metrics").raise_for_status().content)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0

    began = r"\d{4}-\d\d-\d\dT[\d:.]+Z ERROR cluster\.actors\.gang gang \S+, incarnation 0: "
    line = began + r"rank 1 died at step \d+, phase \w+: .+"
    assert len(re.findall(line, said)) == 1, "on the console, while it runs"
    assert f"more in the log, {log}" in said
    assert len(re.findall(line, log.read_text())) == 1, "and in the log, after the server has ended"
    # The names of vLLM's series have a colon, which is for recording rules; they are what tools look for.
    complaints = subprocess.run(
        [program("promtool"), "check", "metrics"], input=page, capture_output=True
    ).stderr.decode()
    assert [line for line in complaints.splitlines() if not line.startswith("vllm:")] == []
