"""What a rank says of itself: what it runs with, and its load and progress. `/server_info` shows both."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """What a rank runs with: settings as they were resolved, and what was chosen for it. JSON-ready by `asdict`.

    `config` are the settings; `draft` is what drafts and how that is known, None in plain decoding; `kv_gb` are 10^9
    bytes; `max_request_tokens` is the longest prompt and output that fits the KV cache; `step_costs` are the measured
    times of steps, None where prompts need none. `world`, `pid` and `interface` (the network's, for the ranks' traffic)
    are of the process that holds the rank, where one does.
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
    interface: str = ""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Load and progress of one rank; heartbeats carry it. `own_seconds` of its steps it did not wait in collectives."""

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
