"""The present state of the server as JSON: `/server_info` for operators, `/server_state` for the status page.

In `/server_state` only the reasons of faults may name paths, addresses and processes; only admins get these reasons.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from cluster import __version__
from cluster.actors.messages import GangStatus, Heartbeat, Loss
from cluster.api.core.limits import ModelInfo, RequestLimits
from cluster.chat.formats.choose import ChosenFormat
from cluster.observability.exposition import Sums
from cluster.status import RankInfo

COUNTS = (
    *("generated_tokens", "prompt_tokens", "cached_tokens", "drafts", "verified_nodes", "accepted_draft_tokens"),
    *("rank_losses", "gang_restarts", "resumed_streams"),
)
OF_DRAFT = ("algorithm", "kind", "runners", "doubts")
OF_RANK = ("generated_tokens", "drafts", "accepted_draft_tokens")
SETTINGS = (
    *(
        "dtype",
        "device",
        "attention_backend",
        "kernels",
        "num_threads",
        "steps_ahead",
        "context_length",
        "max_request_tokens",
    ),
    *(
        "kv_tokens",
        "kv_cache_dtype",
        "page_size",
        "speculative_num_steps",
        "speculative_eagle_topk",
        "speculative_num_draft_tokens",
    ),
    "speculative_batch_tiers",
)


def state_of(model_id: str, status: GangStatus, samples: Sequence[bytes], causes: bool) -> dict[str, Any]:
    """Return the state of one gang (`status`), and counts since the start, summed over all replicas (`samples`). The
    difference of two reads gives a rate. If `causes` is true, faults include their reasons, which may name addresses
    and processes.
    """
    sums = Sums(samples)
    infos, beats = {info.rank: info for info in status.ranks}, {beat.rank: beat for beat in status.beats}
    world = next((info.world for info in status.ranks), len(beats))
    return {
        "at": time.time(),
        "model": model_id,
        "version": __version__,
        "gang": status.history.gang,
        "life": status.history.epoch,
        "healthy": status.healthy,
        "reason": status.reason if causes else "",
        "requests": {
            **{state: int(sums.total("aerie_open_requests", state=state)) for state in ("waiting", "streaming")},
            "queued_tokens": status.queued_tokens,
        },
        "counts": {name: int(sums.total(f"aerie_{name}_total")) for name in COUNTS},
        "accepted_by_depth": _depths(sums),
        "ranks": [_rank(rank, beats.get(rank), sums) for rank in range(world)],
        "losses": [_loss(loss, causes) for loss in status.history.restarts],
        "settings": _settings(infos.get(0)),
    }


def _depths(sums: Sums, **labels: str) -> list[int]:
    """Return the number of accepted draft tokens at each depth, from depth 1 on."""
    found = sums.by("depth", "aerie_accepted_by_depth_total", **labels)
    return [int(found[depth]) for depth in sorted(found, key=int)]


def _rank(rank: int, beat: Heartbeat | None, sums: Sums) -> dict[str, Any]:
    """Return the state of one rank: `silent` if there is no heartbeat. Counts are sums over this rank of all gangs."""
    own = str(rank)
    counts = {name: int(sums.total(f"aerie_{name}_total", rank=own)) for name in OF_RANK}
    told = {"rank": rank, **counts, "accepted_by_depth": _depths(sums, rank=own)}
    if beat is None:
        return {**told, "state": "silent"}
    now = beat.status
    return {
        **told,
        "state": "busy" if beat.busy else "idle",
        "step": beat.step,
        "phase": beat.phase,
        "quiet_s": round(beat.age_s, 3),
        "running": now.running,
        "waiting": now.waiting,
        "accept_length": now.accept_length,
        "draft_rejected": now.draft_rejected,
        "pages": {"used": now.pages_used, "cached": now.pages_cached, "free": now.pages_free},
    }


def _loss(loss: Loss, causes: bool) -> dict[str, Any]:
    names = ("rank", "kind", "step", "phase", "epoch", "at", "noticed_s", "restored_s", "attempts")
    return {**{name: getattr(loss, name) for name in names}, "reason": loss.reason if causes else ""}


def _settings(info: RankInfo | None) -> dict[str, Any]:
    """Return the settings that rank 0 reports; empty until the first start is over."""
    if info is None:
        return {}
    draft = info.draft
    return {
        "ranks": info.world,
        "attention_groups": info.config.attn_dp_size,
        "draft": {name: getattr(draft, name) for name in OF_DRAFT} if draft is not None else None,
        **{name: getattr(info, name) for name in SETTINGS},
    }


def facts_of(model: ModelInfo, limits: RequestLimits, status: GangStatus, chosen: ChosenFormat) -> dict[str, Any]:
    """Return the content of `/server_info`. `internal_states` holds the mean accept length, because SGLang's benchmark
    reads it there. `chosen` names the formats of tool calls and reasoning in chat answers.
    """
    lengths = [beat.status.accept_length for beat in status.beats if beat.status.accept_length]
    history = asdict(status.history)
    return {
        "version": __version__,
        "model_id": model.model_id,
        "sampling_defaults": dict(model.sampling),
        "healthy": status.healthy,
        "reason": status.reason,
        "queued_tokens": status.queued_tokens,
        "running": status.running,
        "tool_call_parser": chosen.calls,
        "reasoning_parser": chosen.thought,
        "limits": {name: getattr(limits, name) for name in RequestLimits.__slots__},
        **(status.ranks[0].described() if status.ranks else {}),
        **history.pop("decided"),
        **history,
        "ranks": _ranks(status),
        "internal_states": [{"avg_spec_accept_length": sum(lengths) / len(lengths)}] if lengths else [{}],
    }


def _ranks(status: GangStatus) -> list[dict[str, Any]]:
    where = {info.rank: {"pid": info.pid, "node": info.node, "gpus": info.gpus} for info in status.ranks}
    return [
        {
            "rank": beat.rank,
            **where.get(beat.rank, {"pid": None, "node": None, "gpus": None}),
            "steps": beat.steps,
            "busy": beat.busy,
            "step": beat.step,
            "phase": beat.phase,
            **asdict(beat.status),
        }
        for beat in status.beats
    ]
