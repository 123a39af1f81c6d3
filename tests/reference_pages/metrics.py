"""Generates docs/metrics.md, the list of all series of /metrics, from the code.

`python -m tests.reference_pages.metrics` writes the file. `tests/unit/test_metrics_page.py` checks it.
"""

from collections.abc import Iterator
from pathlib import Path

from prometheus_client.metrics_core import Metric

from cluster.observability.exposition import KV_USAGE, VLLM_NAMES
from cluster.observability.metrics import EngineMetrics, ServingMetrics

FILE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
HEAD = """# Metrics

Every series of `/metrics`. All have `model_name`, and `replica`, the id of the Serve replica that they are of; those of
the ranks of its gang have `rank` too. A histogram has `_bucket`, `_sum` and `_count`. Only sums are exported, no ratios
but vLLM's KV usage: divide after adding, as `deploy/grafana` does. [operations.md](operations.md#metrics-and-alerts)
says what to watch and what the alerts ask for.

Written by `python -m tests.reference_pages.metrics` from the code that fills them.
"""
VLLM = """
## vLLM's names

The same series once more, under the names that tools for vLLM read; the text of each is that of ours. Counters end in
`_total` here too; `rank` is called `engine`, and `depth`, from 1, `position`, from 0. As in vLLM, `request_success`
counts every end of a sequence, by `finished_reason`, and the stages of a sequence (queue, prefill, decode) are observed
when it ends; a sequence that is resumed after a loss is a new one.
"""
COMMON = ("model_name", "rank", "process")


def series() -> Iterator[tuple[str, Metric]]:
    """Yield every series with its owner: `ranks` or `replicas`."""
    for owner, metrics in (
        ("ranks", EngineMetrics(model_name="", depths=1, trees=[(1, 2, 0)])),
        ("replicas", ServingMetrics(model_name="")),
    ):
        if isinstance(metrics, ServingMetrics):
            metrics.expect_ranks(1)
            metrics.expect_routes(["/"])
        for metric in metrics.registry.collect():
            if not metric.name.startswith("process_"):
                yield owner, metric


def row(metric: Metric) -> str:
    """Return one series as a row of a Markdown table."""
    name = metric.name + "_total" * (metric.type == "counter")
    labels = dict.fromkeys(label for sample in metric.samples for label in sample.labels)
    own_labels = [f"`{label}`" for label in labels if label not in (*COMMON, "le")]
    if metric.name == "aerie_rank_losses":
        own_labels.insert(0, "`rank`")
    return f"| `{name}` | {metric.type} | {', '.join(own_labels)} | {metric.documentation} |"


def page_text() -> str:
    """Return the text of docs/metrics.md."""
    parts = [HEAD]
    for owner in ("ranks", "replicas"):
        parts.append(f"## Of {owner}\n\n| series | kind | labels | |\n|---|---|---|---|")
        parts += [row(metric) for series_owner, metric in series() if series_owner == owner]
        parts.append("")
    parts.append(
        "`process_*` (label `process`: `rank`, `replica`) are those of every Prometheus client: CPU, memory, files."
    )
    parts.append(VLLM)
    parts.append("| vLLM | here |\n|---|---|")
    parts += [f"| `{vllm_name}` | `{aerie_name}` |" for aerie_name, names in VLLM_NAMES.items() for vllm_name in names]
    parts += [f"| `{KV_USAGE}` | `aerie_kv_pages`: the part that requests hold |", ""]
    return "\n".join(parts)


if __name__ == "__main__":
    FILE.write_text(page_text(), encoding="utf-8")
