"""What a rank reports of itself: what it runs with, and its load and progress. `/server_info` shows both."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cluster.config import EngineConfig


@dataclass(frozen=True, slots=True)
class ChosenFact:
    """The value of a fact that a draft's tensors cannot show, and the source of that value."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftInfo:
    """How a draft was read, and why so. `aux_boundaries` are the target layers whose inputs it reads, `num_aux` of
    them; `runners` counts its MTP layers, and is 1 for a draft of one layer that drafts every level. `doubts` are
    sentences about what is odd in its folder, though it can be served.
    """

    kind: str
    dialect: str
    algorithm: str
    aux_boundaries: tuple[int, ...]
    num_aux: int
    runners: int
    draft_vocab_size: int
    choices: Mapping[str, ChosenFact]
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Measured times of steps in milliseconds: by decoding requests, by rows of the target, and for every 1,000 tokens
    that are read; `crowd` is how much other busy ranks slow this one.
    """

    decode_ms: Mapping[str, float]
    decode_ms_per_1000_tokens: float
    target_rows_ms: Mapping[str, float]
    prompt_prefix_ms_per_1000_tokens: float
    prompt_row_ms_per_1000_tokens: float
    crowd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureInfo:
    """Programs captured at start: how many, for steps of which `sizes` (none: whichever recur, later), the memory that
    they hold in 10^6 bytes, and how long that took.
    """

    sizes: tuple[int, ...]
    programs: int
    mb: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """What a rank runs with: its resolved settings, and what was chosen automatically.

    `config` holds the settings; `draft` is None without one; `captured` is None where steps are run as they are;
    `attention` says in words what the backend leaves to other kernels, and why, `quantised` which weights stay packed
    and which were dequantised, `experts` which ranks hold which experts; `kv_cache_dtype` is what KV caches hold,
    `kv_bytes_per_token` what a token takes in all of them, scales included; `kv_gb` is in 10^9 bytes;
    `max_request_tokens` is the longest prompt and output that fit the KV cache; `step_costs` are measured step times,
    None where `mixed_prefill_size` replaces them. `world`, `pid`, `node` (Ray's id of it), `gpus` (their ids on that
    node, as Ray reserves them) and `interface` (of the network, between ranks) are those of the process that holds the
    rank, where one does.
    """

    config: EngineConfig
    rank: int
    dp_rank: int
    dtype: str
    device: str
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    attention_backend: str
    kernels: str
    attention: tuple[str, ...]
    quantised: tuple[str, ...]
    experts: tuple[str, ...]
    steps_ahead: int
    captured: CaptureInfo | None
    num_threads: int
    speculative_num_steps: int
    speculative_eagle_topk: int
    speculative_num_draft_tokens: int
    speculative_batch_tiers: dict[int, int]
    draft: DraftInfo | None
    page_size: int
    kv_pages: int
    kv_tokens: int
    kv_cache_dtype: str
    kv_bytes_per_token: int
    kv_gb: float
    kv_sized_by: str
    max_request_tokens: int
    step_costs: StepCosts | None
    world: int = 1
    pid: int = 0
    node: str = ""
    gpus: tuple[str, ...] = ()
    interface: str | None = None

    def described(self) -> dict[str, Any]:
        """The same, JSON-ready."""
        return {**asdict(self), "config": self.config.model_dump()}


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Load and progress of one rank, sent with heartbeats; `own_seconds` is its steps' time outside collectives.

    Steps may take other times by now than `StepCosts` say: steps of decoding alone `decode_drift` times as long, steps
    of prompt rows alone `prefill_drift` times; prompt rows beside decoding `decode_drift` times `prompt_drift`.
    `submitted` counts all requests that were ever submitted, refused ones included: `queued_tokens` knows of these.
    `draft_rejected`: many trees were verified, and hardly any of them had an accepted token.
    """

    steps: int = 0
    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    pages_free: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    accept_length: float = 0.0
    draft_rejected: bool = False
    padded_rows: int = 0
    own_seconds: float = 0.0
    decode_drift: float = 1.0
    prompt_drift: float = 1.0
    prefill_drift: float = 1.0
    submitted: int = 0
