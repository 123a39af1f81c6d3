"""The files that are shipped for Prometheus and Grafana use only series and labels that `/metrics` has."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from cluster.observability.metrics import EngineMetrics, ServingMetrics, merge
from cluster.observability.step_stats import PHASES, StepStats

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
ROWS = ["Overview", "Latency", "Speculation", "Ranks", "KV", "Requests and errors", "Faults", "Processes"]

FUNCTIONS = {"sum", "rate", "increase", "max", "min", "avg", "count", "histogram_quantile", "clamp_min", "ceil"}
OPERATORS = {"and", "or", "unless", "bool", "offset"}
TOKEN = re.compile(
    r"""(?P<selector>\{[^}]*\})
      | \[[^\]]*\]
      | (?P<grouping>\b(?:by|without|on|ignoring|group_left|group_right)\s*\((?P<labels>[^)]*)\))
      | (?P<call>[a-zA-Z_]\w*(?=\s*(?:\(|by\b|without\b)))
      | (?P<name>[a-zA-Z_:][\w:]*)
      | .""",
    re.VERBOSE | re.DOTALL,
)
MATCHER = re.compile(r'\s*(?P<label>\w+)\s*(?:=~|!~|!=|=)\s*"(?P<value>[^"]*)"\s*')


def exposed_series() -> dict[str, dict[str, set[str]]]:
    """Every series name of the metrics page, with its labels and their values."""
    engine = EngineMetrics(model_name="m", rank=0, trees=[(0, 1, 0), (3, 4, 0)])
    engine.observe_step(
        StepStats(phase_seconds=dict.fromkeys(PHASES, 0.1), accept_lens=[2], accepted_by_depth=[1], drafts=1)
    )
    serving = ServingMetrics(model_name="m")
    serving.expect_ranks(1)
    serving.expect_routes(["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
    page = merge([engine.serialize(), serving.serialize()]).decode()
    series: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            for label, value in sample.labels.items():
                series.setdefault(sample.name, {}).setdefault(label, set()).add(value)
    return series


SERIES = exposed_series()


def problems(query: str) -> list[str]:
    """The parts of a PromQL expression that are wrong: unknown functions, and series and labels that no page has."""
    mistakes, series_names, group_labels = [], [], set()
    for token in TOKEN.finditer(query):
        if selector := token["selector"]:
            mistakes += selector_problems(series_names[-1] if series_names else "", selector)
        elif token["grouping"]:
            group_labels |= {label.strip() for label in token["labels"].split(",") if label.strip()}
        elif token["call"]:
            if token["call"] not in FUNCTIONS:
                mistakes.append(f"unknown function {token['call']!r}")
        elif (name := token["name"]) and name not in OPERATORS:
            series_names.append(name)
            if name not in SERIES:
                mistakes.append(f"no series {name!r}")
    if not series_names:
        mistakes.append("names no series")
    # A ratio may group only one of its two sides. For example, acceptance by depth is divided by all trees.
    mistakes += [
        f"no series of it has the label {label!r}"
        for label in sorted(group_labels)
        if not any(label in SERIES.get(name, {}) for name in series_names)
    ]
    return mistakes


def selector_problems(name: str, selector: str) -> list[str]:
    mistakes = []
    labels = SERIES.get(name, {})
    for part in selector.strip("{}").split(","):
        matcher = MATCHER.fullmatch(part)
        if matcher is None:
            mistakes.append(f"cannot read {part!r}")
        elif matcher["label"] not in labels:
            mistakes.append(f"{name} has no label {matcher['label']!r}")
        elif not matcher["value"].startswith("$"):
            unknown = set(matcher["value"].split("|")) - labels[matcher["label"]]
            mistakes += [f"{name} has no {matcher['label']}={value!r}" for value in sorted(unknown)]
    return mistakes


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    rule_list: list[dict[str, Any]] = group["rules"]
    return rule_list


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_alert_rules_use_existing_series_and_labels(rule: dict[str, Any]) -> None:
    query = rule["expr"].replace('up{job="aerie"}', "aerie_steps_total")  # Prometheus's own series
    assert problems(query) == []
    assert rule["labels"]["severity"] in ("warning", "critical")
    for label in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]):
        grouping = re.search(r"by \(([^)]*)\)", rule["expr"])
        assert label == "instance" if grouping is None else label in grouping[1], label


def load(path: Path) -> dict[str, Any]:
    board = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(board, dict)
    return board


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels", [])


def targets(board: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for panel in panels(board):
        for target in panel.get("targets", []):
            yield panel["title"], target


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboard_queries_use_existing_series_and_labels(path: Path) -> None:
    board = load(path)
    wrong = [f"{title}: {problem}" for title, target in targets(board) for problem in problems(target["expr"])]
    wrong += [
        f"variable {variable['name']}: {problem}"
        for variable in board["templating"]["list"]
        if variable["type"] == "query"
        for problem in problems(
            re.sub(r"label_values\((\w+), (\w+)\)", r"sum by (\2) (\1)", variable["query"]["query"])
        )
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboard_legends_use_labels_that_the_query_retains(path: Path) -> None:
    for title, target in targets(load(path)):
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
            assert re.search(rf"by \([^)]*\b{label}\b[^)]*\)", target["expr"]), f"{title}: {label}"


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboard_variables_exist_and_panels_have_unique_ids_without_overlap(path: Path) -> None:
    board = load(path)
    known_variables = {variable["name"] for variable in board["templating"]["list"]} | {"__rate_interval"}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(board["panels"]))) <= known_variables
    ids = [panel["id"] for panel in panels(board)]
    assert len(ids) == len(set(ids))
    panel_by_cell: dict[tuple[int, int], str] = {}
    for panel in panels(board):
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        for cell in ((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])):
            assert cell not in panel_by_cell, f"{panel['title']} covers {panel_by_cell.get(cell)}"
            panel_by_cell[cell] = panel["title"]
        if panel["type"] != "row":
            assert panel["targets"], panel["title"]
            assert panel["description"], panel["title"]
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]


def test_dashboard_has_expected_rows_and_shows_every_aerie_series() -> None:
    board = load(DEPLOY / "grafana" / "dashboards" / "aerie.json")
    assert [panel["title"] for panel in panels(board) if panel["type"] == "row"] == ROWS
    queries = " ".join(target["expr"] for _, target in targets(board))
    aerie_series = {re.sub(r"_(bucket|sum|count)$", "", name) for name in SERIES if name.startswith("aerie_")}
    assert {name for name in aerie_series if name not in queries} == set()


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("sum(rate(aerie_nothing_total[5m]))", "no series 'aerie_nothing_total'"),
        ("sum(rate(aerie_drafts[5m]))", "no series 'aerie_drafts'"),
        ("sum by (colour) (aerie_kv_pages)", "no series of it has the label 'colour'"),
        ('aerie_kv_pages{colour="red"}', "aerie_kv_pages has no label 'colour'"),
        ('aerie_kv_pages{state="lost"}', "aerie_kv_pages has no state='lost'"),
        ("summ(aerie_kv_pages)", "unknown function 'summ'"),
        ("1 + 1", "names no series"),
    ],
)
def test_promql_check_finds_mistakes(query: str, problem: str) -> None:
    assert problem in problems(query)


def test_prometheus_config_has_one_scrape_job_for_the_rest_port() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text(encoding="utf-8"))
    (job,) = config["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"] == [{"targets": ["127.0.0.1:8000"]}]
    assert re.fullmatch(r"\d+s", config["global"]["scrape_interval"])
    assert all((DEPLOY / name).is_file() for name in config["rule_files"])


def test_grafana_provisions_the_dashboard_and_its_data_source() -> None:
    folder = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources" / "aerie.yaml").read_text(encoding="utf-8"))["datasources"]
    (provider,) = yaml.safe_load((folder / "dashboards" / "aerie.yaml").read_text(encoding="utf-8"))["providers"]
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    assert source["type"] == "prometheus"
    board = load(DEPLOY / "grafana" / "dashboards" / "aerie.json")
    (default,) = [v["current"]["value"] for v in board["templating"]["list"] if v["type"] == "datasource"]
    assert default == source["uid"]
    mounts = [volume.split(":") for service in compose["services"].values() for volume in service["volumes"]]
    assert all((DEPLOY / local).exists() for local, *_ in mounts)
    assert any(inside == provider["options"]["path"] for _, inside, *_ in mounts)
