"""The present state of the server as JSON: `/server_info` for operators, `/server_state` for the status page.

`/server_state` names paths, addresses and processes nowhere but in the reasons of faults. If the server has API keys,
only a key of scope admin gets these reasons.
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

COUNTER_NAMES = (
    *("generated_tokens", "prompt_tokens", "cached_tokens", "drafts", "verified_nodes", "accepted_draft_tokens"),
    *("rank_losses", "gang_restarts", "resumed_streams"),
)
DRAFT_FIELDS = ("algorithm", "kind", "runners", "doubts")
RANK_COUNTER_NAMES = ("generated_tokens", "drafts", "accepted_draft_tokens")
SETTING_NAMES = (
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
        "speculative_mode",
        "speculative_num_steps",
        "speculative_eagle_topk",
        "speculative_num_draft_tokens",
        "speculative_lookup_tokens",
    ),
    "speculative_batch_tiers",
)


def build_server_state(
    model_id: str, status: GangStatus, samples: Sequence[bytes], include_reasons: bool
) -> dict[str, Any]:
    """Return the state of one gang (`status`; a gang is the ranks of one replica), and counts since the start, summed
    over all replicas (`samples`). The difference between two answers gives a rate. If `include_reasons` is true, faults
    include their reasons, which may name paths, addresses and processes; otherwise the reasons are empty.
    """
    sums = Sums(samples)
    infos, heartbeats = (
        {info.rank: info for info in status.ranks},
        {heartbeat.rank: heartbeat for heartbeat in status.heartbeats},
    )
    world_size = next((info.world for info in status.ranks), len(heartbeats))
    return {
        "at": time.time(),
        "model": model_id,
        "version": __version__,
        "gang": status.history.gang,
        "life": status.history.epoch,
        "healthy": status.healthy,
        "reason": status.reason if include_reasons else "",
        "requests": {
            **{state: int(sums.total("aerie_open_requests", state=state)) for state in ("waiting", "streaming")},
            "queued_tokens": status.queued_tokens,
        },
        "counts": {name: int(sums.total(f"aerie_{name}_total")) for name in COUNTER_NAMES},
        "accepted_by_depth": _accepted_by_depth(sums),
        "ranks": [_rank(rank, heartbeats.get(rank), sums) for rank in range(world_size)],
        "losses": [_loss(loss, include_reasons) for loss in status.history.restarts],
        "settings": _settings(infos.get(0)),
    }


def _accepted_by_depth(sums: Sums, **labels: str) -> list[int]:
    """Return the number of accepted draft tokens at each depth, from depth 1 on."""
    counts_by_depth = sums.by("depth", "aerie_accepted_by_depth_total", **labels)
    return [int(counts_by_depth[depth]) for depth in sorted(counts_by_depth, key=int)]


def _rank(rank: int, heartbeat: Heartbeat | None, sums: Sums) -> dict[str, Any]:
    """Return the state of one rank. Without a heartbeat the state is `silent`. Each count is the sum over the ranks
    with this number in all replicas.
    """
    rank_label = str(rank)
    counts = {name: int(sums.total(f"aerie_{name}_total", rank=rank_label)) for name in RANK_COUNTER_NAMES}
    fields = {"rank": rank, **counts, "accepted_by_depth": _accepted_by_depth(sums, rank=rank_label)}
    if heartbeat is None:
        return {**fields, "state": "silent"}
    rank_status = heartbeat.status
    return {
        **fields,
        "state": "busy" if heartbeat.busy else "idle",
        "step": heartbeat.step,
        "phase": heartbeat.phase,
        "quiet_s": round(heartbeat.idle_s, 3),
        "running": rank_status.running,
        "waiting": rank_status.waiting,
        "accept_length": rank_status.accept_length,
        "draft_rejected": rank_status.draft_rejected,
        "pages": {"used": rank_status.pages_used, "cached": rank_status.pages_cached, "free": rank_status.pages_free},
        "window_pages": {
            "used": rank_status.window_pages_used,
            "cached": rank_status.window_pages_cached,
            "free": rank_status.window_pages_free,
        },
    }


def _loss(loss: Loss, include_reasons: bool) -> dict[str, Any]:
    names = ("rank", "kind", "step", "phase", "epoch", "at", "noticed_s", "restored_s", "attempts")
    return {**{name: getattr(loss, name) for name in names}, "reason": loss.reason if include_reasons else ""}


def _settings(info: RankInfo | None) -> dict[str, Any]:
    """Return the settings that rank 0 reports. The result is empty until the first start is over."""
    if info is None:
        return {}
    draft = info.draft
    return {
        "ranks": info.world,
        "attention_groups": info.config.attn_dp_size,
        "draft": {name: getattr(draft, name) for name in DRAFT_FIELDS} if draft is not None else None,
        **{name: getattr(info, name) for name in SETTING_NAMES},
    }


def build_server_info(
    model: ModelInfo, limits: RequestLimits, status: GangStatus, chat_formats: ChosenFormat
) -> dict[str, Any]:
    """Return the content of `/server_info`. Its field `internal_states` holds the mean accept length, because SGLang's
    benchmark reads it there. `chat_formats` names the formats of tool calls and reasoning in chat answers.
    """
    accept_lengths = [
        heartbeat.status.accept_length for heartbeat in status.heartbeats if heartbeat.status.accept_length
    ]
    history = asdict(status.history)
    return {
        "version": __version__,
        "model_id": model.model_id,
        "sampling_defaults": dict(model.sampling_defaults),
        "healthy": status.healthy,
        "reason": status.reason,
        "queued_tokens": status.queued_tokens,
        "running": status.running,
        "tool_call_parser": chat_formats.call_format,
        "reasoning_parser": chat_formats.reasoning_format,
        "limits": {name: getattr(limits, name) for name in RequestLimits.__slots__},
        **(status.ranks[0].as_dict() if status.ranks else {}),
        **history.pop("decided"),
        **history,
        "ranks": _ranks(status),
        "internal_states": [{"avg_spec_accept_length": sum(accept_lengths) / len(accept_lengths)}]
        if accept_lengths
        else [{}],
    }


def _ranks(status: GangStatus) -> list[dict[str, Any]]:
    process_facts = {info.rank: {"pid": info.pid, "node": info.node, "gpus": info.gpus} for info in status.ranks}
    return [
        {
            "rank": heartbeat.rank,
            **process_facts.get(heartbeat.rank, {"pid": None, "node": None, "gpus": None}),
            "steps": heartbeat.steps,
            "busy": heartbeat.busy,
            "step": heartbeat.step,
            "phase": heartbeat.phase,
            **asdict(heartbeat.status),
        }
        for heartbeat in status.heartbeats
    ]
