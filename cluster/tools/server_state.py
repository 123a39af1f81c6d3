"""The current state of a server, from its /server_info and /metrics pages, as JSON-ready values."""

import time
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from cluster.tools.client import Client, NoAnswerError

GANG_MEMORY_S = 15.0  # a gang (the ranks of one replica) is dropped if no /server_info page described it for this long
RANK_FACTS = ("step", "phase", "running", "waiting", "accept_length")


class ServerWatch:
    """Polls one server. If there are several replicas, /server_info describes the gang of one of them, so the watch
    remembers the gangs of earlier answers. /metrics covers all replicas.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._gangs: dict[str, tuple[float, dict[str, Any]]] = {}
        self._last_sums: tuple[float, dict[str, float]] | None = None

    def poll(self) -> dict[str, Any]:
        """Return the server's state. Tokens per second and accept length cover the time since the last call. Both are
        None at the first call. The accept length is also None if nothing was drafted.

        Raises:
            NoAnswerError: the server cannot be reached, or it is not Aerie.
        """
        info = self._client.json("/server_info")
        if "healthy" not in info:
            raise NoAnswerError(f"{self._client.url} is no server of Aerie's")
        sums = totals(self._client.page("/metrics"))
        now = time.monotonic()
        self._gangs[info.get("gang", "")] = now, info
        self._gangs = {name: entry for name, entry in self._gangs.items() if now - entry[0] < GANG_MEMORY_S}
        last_time, last_sums = self._last_sums or (now, sums)
        self._last_sums = now, sums
        increases = {name: value - last_sums.get(name, 0.0) for name, value in sums.items()}
        tokens, drafts = increases.get("aerie_generated_tokens_total", 0.0), increases.get("aerie_drafts_total", 0.0)
        accepted = increases.get("aerie_accepted_draft_tokens_total", 0.0)
        return {
            "url": self._client.url,
            "model": info.get("model_id"),
            "version": info.get("version"),
            # Not below 0: the sum over replicas falls when a replica ends.
            "tokens_per_second": max(0.0, tokens) / (now - last_time) if now > last_time else None,
            "accept_length": 1.0 + accepted / drafts if drafts > 0 and accepted >= 0 else None,
            "streaming": int(sums.get("aerie_open_requests/streaming", 0)),
            "waiting": int(sums.get("aerie_open_requests/waiting", 0)),
            "losses": int(sums.get("aerie_rank_losses_total", 0)),
            "restarts": int(sums.get("aerie_gang_restarts_total", 0)),
            "resumed_streams": int(sums.get("aerie_resumed_streams_total", 0)),
            "gangs": [
                {**gang_of(facts), "age_s": now - seen_at} for _, (seen_at, facts) in sorted(self._gangs.items())
            ],
        }


def totals(page: str) -> dict[str, float]:
    """Sum each metric of a Prometheus page over its labels. The keys are `name`, or `name/state` if a sample has the
    label `state`.
    """
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            name = f"{sample.name}/{sample.labels['state']}" if "state" in sample.labels else sample.name
            sums[name] = sums.get(name, 0.0) + sample.value
    return sums


def gang_of(info: dict[str, Any]) -> dict[str, Any]:
    """Return the state of one gang from its /server_info page. A rank without a heartbeat has the state `silent`."""
    heartbeats = {heartbeat["rank"]: heartbeat for heartbeat in info.get("ranks", [])}
    return {
        "gang": info.get("gang", ""),
        "healthy": info["healthy"],
        "reason": info["reason"],
        "epoch": info["epoch"],
        "queued_tokens": info["queued_tokens"],
        "restarts": info["restarts"],
        "ranks": [_rank_of(rank, heartbeats.get(rank)) for rank in range(info.get("world", len(heartbeats)))],
    }


def _rank_of(rank: int, heartbeat: dict[str, Any] | None) -> dict[str, Any]:
    if heartbeat is None:
        return {"rank": rank, "state": "silent"}
    pages = {state: heartbeat[f"pages_{state}"] for state in ("free", "used", "cached")}
    total_pages = sum(pages.values()) or 1
    return {
        "rank": rank,
        "state": "busy" if heartbeat["busy"] else "idle",
        **{name: heartbeat[name] for name in RANK_FACTS},
        "kv_used": pages["used"] / total_pages,
        "kv_cached": pages["cached"] / total_pages,
    }
