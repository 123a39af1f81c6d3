"""Serialises metric registries as JSON, and merges many of them into one Prometheus page.

Each rank and each replica serialises its registry; `merge` combines these samples. Series of different Serve replicas
stay separate, by the label `replica`. Their sum would fall when one replica misses a scrape, and Prometheus would take
the fall for a restart of the counter. `merge` exports the same values a second time under vLLM's names (`vllm:...`),
for tools that read vLLM's series.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

SCHEMA = 1  # version of the JSON format

# Families whose series are not added up: of several samples with the same labels, the greatest value is kept. For start
# times the greatest is the latest, so that the restart of any process shows.
MAX_FAMILIES = frozenset({"aerie_build_info", "process_start_time_seconds"})

# By metric family of Aerie: the names of the same family in vLLM, under which it is exported a second time.
VLLM_NAMES: Mapping[str, tuple[str, ...]] = {
    "aerie_drafts": ("vllm:spec_decode_num_drafts",),
    "aerie_verified_nodes": ("vllm:spec_decode_num_draft_tokens",),
    "aerie_accepted_draft_tokens": ("vllm:spec_decode_num_accepted_tokens",),
    "aerie_accepted_by_depth": ("vllm:spec_decode_num_accepted_tokens_per_pos",),
    "aerie_running_requests": ("vllm:num_requests_running",),
    "aerie_waiting_requests": ("vllm:num_requests_waiting",),
    "aerie_prompt_tokens": ("vllm:prompt_tokens", "vllm:prefix_cache_queries"),
    "aerie_cached_tokens": ("vllm:prompt_tokens_cached", "vllm:prefix_cache_hits"),
    "aerie_generated_tokens": ("vllm:generation_tokens",),
    "aerie_retractions": ("vllm:num_preemptions",),
    "aerie_finished_requests": ("vllm:request_success",),
    "aerie_queue_seconds": ("vllm:request_queue_time_seconds",),
    "aerie_prefill_seconds": ("vllm:request_prefill_time_seconds",),
    "aerie_decode_seconds": ("vllm:request_decode_time_seconds",),
    "aerie_ttft_seconds": ("vllm:time_to_first_token_seconds",),
    "aerie_itl_seconds": ("vllm:inter_token_latency_seconds",),
    "aerie_e2e_seconds": ("vllm:e2e_request_latency_seconds",),
    "aerie_request_prompt_tokens": ("vllm:request_prompt_tokens",),
    "aerie_request_generation_tokens": ("vllm:request_generation_tokens",),
}
KV_USAGE = "vllm:kv_cache_usage_perc"


def merge(samples: Iterable[bytes]) -> bytes:
    """Return the Prometheus text page of serialised registries (`samples`), including the series under vLLM's names.

    Series are added if their name and all labels agree, so the labels `rank` and `replica` keep series separate. A rank
    knows only the model's folder; if all replicas serve the model under one name, that name replaces the folder in the
    label `model_name` of every series.

    Raises:
        ValueError: a sample has another schema, or two samples declare a family with different types.
    """
    families: dict[str, Metric] = {}
    totals: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    pages = [json.loads(sample) for sample in samples]
    served_as = {page["served_as"] for page in pages if page.get("served_as")}
    renamed_labels = {"model_name": served_as.pop()} if len(served_as) == 1 else {}
    for page in pages:
        if page.get("schema") != SCHEMA:
            raise ValueError(f"metrics sample has schema {page.get('schema')!r}, this process reads {SCHEMA}")
        added_labels = {**renamed_labels, "replica": page["replica"]} if page.get("replica") else renamed_labels
        for name, metric_type, help_text, series in page["families"]:
            family = families.setdefault(name, Metric(name, help_text, metric_type))
            if family.type != metric_type:
                raise ValueError(f"metric {name!r} is declared as {family.type} and as {metric_type}")
            sums = totals.setdefault(name, {})
            for suffix, labels, value in series:
                key = (suffix, tuple({**labels, **added_labels}.items()))
                previous = sums.get(key, 0.0)
                sums[key] = max(previous, value) if name in MAX_FAMILIES else previous + value
    for name, sums in totals.items():
        for (suffix, pairs), value in sums.items():
            families[name].add_sample(name + suffix, dict(pairs), value)
    return generate_latest(_Page([*families.values(), *_vllm_families(families)]))


class Sums:
    """Sums over the series of serialised registries: over all series of a name, or for each value of one label."""

    def __init__(self, samples: Iterable[bytes]) -> None:
        self._series: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for sample in samples:
            for name, _, _, series in json.loads(sample)["families"]:
                for suffix, labels, value in series:
                    self._series.setdefault(name + suffix, []).append((labels, value))

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the series with this name (suffix included) and these labels; 0.0 if there are none."""
        return sum(
            value for series_labels, value in self._series.get(name, ()) if labels.items() <= series_labels.items()
        )

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """Return a dict from each value of `label` to the sum of the series with this value and with `labels`, as in
        `total`.
        """
        values = dict.fromkeys(
            series_labels[label]
            for series_labels, _ in self._series.get(name, ())
            if labels.items() <= series_labels.items()
        )
        return {value: self.total(name, **{**labels, label: value}) for value in values}


class ProcessFacts(Collector):
    """This process's CPU time, memory and open files, under prometheus_client's names, with `labels` added.

    The values are read from /proc at each collection. Without /proc (not on Linux) there are no such series.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self._source = ProcessCollector(registry=None)

    def describe(self) -> Iterable[Metric]:
        """Return no metrics. Without this method a registry would call `collect` once to learn the names."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield one metric family per value."""
        for source in self._source.collect():
            family = Metric(source.name, source.documentation, source.type)
            for sample in source.samples:
                family.add_sample(sample.name, self._labels, sample.value)
            yield family


class _Page(Collector):
    """A collector that returns given families; `generate_latest` takes a collector."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def with_replica(sample: bytes, replica: str) -> bytes:
    """Return a rank's serialised registry with the id of its Serve replica added; the rank does not know that id."""
    return b'{"replica":' + json.dumps(replica).encode() + b"," + sample.removeprefix(b"{")


def serialize(registry: CollectorRegistry, served_as: str | None = None, replica: str = "") -> bytes:
    """Return a registry as JSON for `merge`: per family its name, type, help and series (suffix, labels, value).

    `served_as` is the model name for clients, and `replica` the id of the Serve replica. A rank, which knows neither,
    leaves them out. Creation times of series are left out.
    """
    families: list[Any] = []
    for family in registry.collect():
        series = [
            (sample.name.removeprefix(family.name), sample.labels, sample.value)
            for sample in family.samples
            if not sample.name.endswith("_created")
        ]
        families.append((family.name, family.type, family.documentation, series))
    page = {"schema": SCHEMA, "served_as": served_as, "families": families} | ({"replica": replica} if replica else {})
    return json.dumps(page, separators=(",", ":")).encode()


def _vllm_families(families: Mapping[str, Metric]) -> list[Metric]:
    """Return copies of the families of `VLLM_NAMES` under vLLM's names, and KV usage computed from the page counts."""
    copies = []
    for own_name, vllm_names in VLLM_NAMES.items():
        if source := families.get(own_name):
            for vllm_name in vllm_names:
                family = Metric(vllm_name, source.documentation, source.type)
                for sample in source.samples:
                    family.add_sample(
                        vllm_name + sample.name.removeprefix(own_name), _vllm_labels(sample.labels), sample.value
                    )
                copies.append(family)
    if pages := families.get("aerie_kv_pages"):
        used: dict[tuple[tuple[str, str], ...], float] = {}
        total: dict[tuple[tuple[str, str], ...], float] = {}
        for sample in pages.samples:
            labels = _vllm_labels(sample.labels)
            state = labels.pop("state")
            key = tuple(labels.items())
            total[key] = total.get(key, 0.0) + sample.value
            used[key] = used.get(key, 0.0) + (sample.value if state == "used" else 0.0)
        family = Metric(KV_USAGE, "Share of KV pages held by requests", "gauge")
        for key, total_pages in total.items():
            family.add_sample(KV_USAGE, dict(key), used[key] / total_pages if total_pages else 0.0)
        copies.append(family)
    return copies


def _vllm_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return labels under vLLM's names: `rank` becomes `engine`, `depth` (from 1) becomes `position` (from 0)."""
    label_names = {"rank": "engine", "depth": "position"}
    return {label_names.get(k, k): str(int(v) - 1) if k == "depth" else v for k, v in labels.items()}
