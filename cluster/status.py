"""What a rank reports of itself: what it runs with, and its load and progress. `/server_info` shows both."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """What a rank runs with: its resolved settings, and what was chosen automatically. JSON-ready by `asdict`.

    `config` holds the settings; `draft` how the draft was read and why so, None without one; `kv_gb` is in 10^9 bytes;
    `max_request_tokens` is the longest prompt and output that fit the KV cache; `step_costs` are measured step times,
    None where `prefill_share` has no use for them. `world`, `pid` and `interface` (of the network, between ranks) are
    those of the process that holds the rank, where one does.
    """

    config: dict[str, Any]
    rank: int
    dp_rank: int
    dtype: str
    device: str
    context_length: int
    vocab_size: int
    attention_backend: str
    num_threads: int
    speculative_num_steps: int
    speculative_eagle_topk: int
    speculative_num_draft_tokens: int
    speculative_batch_tiers: dict[int, int]
    draft: dict[str, Any] | None
    page_size: int
    kv_pages: int
    kv_tokens: int
    kv_gb: float
    kv_sized_by: str
    max_request_tokens: int
    step_costs: dict[str, Any] | None
    world: int = 1
    pid: int = 0
    interface: str | None = None


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Load and progress of one rank, sent with heartbeats; `own_seconds` is its steps' time outside collectives."""

    steps: int = 0
    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    pages_free: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    accept_length: float = 0.0
    padded_rows: int = 0
    own_seconds: float = 0.0
