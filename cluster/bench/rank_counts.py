"""The counters of each rank of a server, read from its `/metrics` page."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from cluster.bench.report import records_table
from cluster.bench.streams import get_page


@dataclass(frozen=True, slots=True)
class RankCounts:
    """The counters of one rank. `drafts` counts trees, `accepted_tokens` their accepted draft tokens, `padded_rows` the
    rows of padding, and `decode_steps` the steps that decoded. `levels` is the sum, over these steps, of the number of
    levels that trees had in the step.
    """

    requests: int = 0
    tokens: int = 0
    drafts: int = 0
    accepted_tokens: int = 0
    padded_rows: int = 0
    decode_steps: int = 0
    levels: int = 0

    @property
    def tree_levels(self) -> float | None:
        """The number of levels of the trees, on average over the steps that decoded; None if no step decoded."""
        return self.levels / self.decode_steps if self.decode_steps else None

    @property
    def accept_length(self) -> float | None:
        """The tokens committed per tree, or None if nothing was drafted."""
        return 1.0 + self.accepted_tokens / self.drafts if self.drafts else None


SERIES = {
    "aerie_admitted_requests_total": "requests",
    "aerie_generated_tokens_total": "tokens",
    "aerie_drafts_total": "drafts",
    "aerie_accepted_draft_tokens_total": "accepted_tokens",
    "aerie_padded_rows_total": "padded_rows",
}

TREE_STEPS = "aerie_tree_steps_total"


def read_rank_counts(port: int) -> dict[int, RankCounts]:
    """Return the current counters of every rank."""
    return parse_counts(get_page(port, "/metrics"))


def parse_counts(metrics_text: str) -> dict[int, RankCounts]:
    """Return the counters on a Prometheus page, by rank."""
    counters: dict[int, Counter[str]] = {}
    for sample in (each for family in text_string_to_metric_families(metrics_text) for each in family.samples):
        if sample.name in SERIES:
            counters.setdefault(int(sample.labels["rank"]), Counter())[SERIES[sample.name]] += int(sample.value)
        if sample.name == TREE_STEPS:
            of_rank = counters.setdefault(int(sample.labels["rank"]), Counter())
            of_rank["decode_steps"] += int(sample.value)
            of_rank["levels"] += int(sample.value) * int(sample.labels["levels"])
    return {rank: RankCounts(**counters[rank]) for rank in sorted(counters)}


def counter_growth(before: Mapping[int, RankCounts], after: Mapping[int, RankCounts]) -> dict[int, RankCounts]:
    """Return how much the counters of each rank grew; a rank that `before` lacks starts at 0."""
    zero = RankCounts()
    return {
        rank: RankCounts(*(getattr(now, name) - getattr(before.get(rank, zero), name) for name in RankCounts.__slots__))
        for rank, now in after.items()
    }


def rank_rows(ranks: Mapping[int, RankCounts]) -> list[dict[str, Any]]:
    """Return a row for every rank with the figures that reports show, JSON-ready."""
    reported = ("requests", "tokens", "accept_length", "tree_levels", "padded_rows")
    return [{"rank": rank, **{name: getattr(counts, name) for name in reported}} for rank, counts in ranks.items()]


def rank_table(ranks: Mapping[int, RankCounts]) -> str:
    """Return a table with one line per rank."""
    return records_table([{name.replace("_", " "): value for name, value in row.items()} for row in rank_rows(ranks)])
