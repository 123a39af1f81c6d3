"""`/server_info`: the resolved settings of a gang, the progress of each rank, and the gang's restarts, as JSON."""

from dataclasses import asdict
from typing import Any

from cluster import __version__
from cluster.actors.messages import GangStatus
from cluster.api.core.limits import ModelInfo, RequestLimits
from cluster.chat.formats.choose import ChosenFormat


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
