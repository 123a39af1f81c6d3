"""The counters of each rank of a server, read from its `/metrics` page."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from cluster.bench.report import records
from cluster.bench.streams import page


@dataclass(frozen=True, slots=True)
class RankCounts:
    """The counters of one rank. `drafts` counts trees, `accepted` their accepted draft tokens, `padded_rows` rows of
    padding.
    """

    requests: int = 0
    tokens: int = 0
    drafts: int = 0
    accepted: int = 0
    padded_rows: int = 0

    @property
    def accept_length(self) -> float | None:
        """The tokens committed per tree, or None if nothing was drafted."""
        return 1.0 + self.accepted / self.drafts if self.drafts else None


SERIES = {
    "aerie_admitted_requests_total": "requests",
    "aerie_generated_tokens_total": "tokens",
    "aerie_drafts_total": "drafts",
    "aerie_accepted_draft_tokens_total": "accepted",
    "aerie_padded_rows_total": "padded_rows",
}


def read_ranks(port: int) -> dict[int, RankCounts]:
    """Return the current counters of every rank."""
    return counts_of(page(port, "/metrics"))


def counts_of(page: str) -> dict[int, RankCounts]:
    """Return the counters on a Prometheus page, by rank."""
    found: dict[int, Counter[str]] = {}
    for sample in (each for family in text_string_to_metric_families(page) for each in family.samples):
        if sample.name in SERIES:
            found.setdefault(int(sample.labels["rank"]), Counter())[SERIES[sample.name]] += int(sample.value)
    return {rank: RankCounts(**found[rank]) for rank in sorted(found)}


def since(before: Mapping[int, RankCounts], after: Mapping[int, RankCounts]) -> dict[int, RankCounts]:
    """Return how much the counters grew between two readings."""
    nothing = RankCounts()
    return {
        rank: RankCounts(*(getattr(now, n) - getattr(before.get(rank, nothing), n) for n in RankCounts.__slots__))
        for rank, now in after.items()
    }


def by_rank(ranks: Mapping[int, RankCounts]) -> list[dict[str, Any]]:
    """Return the reported figures of every rank, JSON-ready."""
    names = ("requests", "tokens", "accept_length", "padded_rows")
    return [{"rank": rank, **{name: getattr(counts, name) for name in names}} for rank, counts in ranks.items()]


def rank_table(ranks: Mapping[int, RankCounts]) -> str:
    """Return a table with one line per rank."""
    return records([{name.replace("_", " "): value for name, value in row.items()} for row in by_rank(ranks)])
