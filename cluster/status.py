"""What a rank reports about itself: its resolved settings, its load and its progress. The route `/server_info` shows it
all.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cluster.config import EngineConfig


@dataclass(frozen=True, slots=True)
class ChosenFact:
    """A fact about a draft that its tensors do not show, such as its rope layout: the value and where it comes from."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftInfo:
    """How the folder of a draft was interpreted, and why.

    `aux_boundaries` are the `num_aux` target layers whose inputs the draft reads. `runners` is the number of MTP layers
    that draft one level each, or 1 if one layer drafts every level. `choices` are the facts that had to be chosen, by
    name. `doubts` are sentences about what is odd in the folder, although the draft can be served.
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
    """Measured step times in milliseconds: by number of decoding requests, by number of target rows, and per 1,000
    tokens of KV read. `crowd` says how much the prompt rows of one attention group slow down every other group (see
    `StepTimes`).
    """

    decode_ms: Mapping[str, float]
    decode_ms_per_1000_tokens: float
    target_rows_ms: Mapping[str, float]
    prompt_prefix_ms_per_1000_tokens: float
    prompt_row_ms_per_1000_tokens: float
    crowd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeCost:
    """The times of steps that only decode, with trees of one shape, in milliseconds by number of decoding requests. The
    times were measured at start, or computed from measured times.

    `num_steps` counts only the levels that the draft computes. `num_draft_tokens` is the number of verified nodes of a
    tree, on average and with the root. `lookup_tokens` is the depth of the branch of looked-up tokens (what followed an
    earlier occurrence of the end of the text). Only the entry without a tree (`num_steps` 0) has `waking_ms`: the times
    of steps in which a draft that has skipped the tokens of earlier steps reads them.
    """

    num_steps: int
    num_draft_tokens: int
    lookup_tokens: int
    ms: Mapping[str, float]
    waking_ms: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureInfo:
    """The programs captured at start: their number, their `sizes`, their memory in 10^6 bytes, and the seconds that
    capturing took.

    If `sizes` is empty, programs have exact sizes, and are captured later, when a size recurs.
    """

    sizes: tuple[int, ...]
    programs: int
    mb: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """The resolved settings of a rank, with all that was chosen automatically.

    `draft` is None if there is no draft, `captured` is None if all steps run eagerly. Three fields are sentences:
    `attention` (which parts FlashInfer leaves to other kernels, and why; empty for other backends), `quantised`
    (which weights stay packed and which were dequantised) and `experts` (which ranks hold which experts).
    `kv_bytes_per_token` counts the pools of all models that keep every token, with the scales of FP8, and the
    hidden states that a multi-layer draft keeps. Layers with a sliding window may be in window pools instead: these
    hold `kv_window_tokens` tokens of `kv_window_bytes_per_token` bytes, of which a request needs at most
    `kv_window_request_tokens`. `kv_gb` is the size of all pools in 10^9 bytes. `max_request_tokens` is the largest
    sum of prompt and output tokens that fits both the context length and the KV cache. `step_costs` is None if
    `mixed_prefill_size` is set. `tree_costs` is empty if trees are fixed. `world`, `pid`, `node` (Ray's node id),
    `gpus` (the ids that Ray reserved on that node) and `interface` (the network between ranks) describe the process
    that runs the rank; they keep their defaults if the rank does not run in an actor.
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
    speculative_mode: str
    speculative_num_steps: int
    speculative_eagle_topk: int
    speculative_num_draft_tokens: int
    speculative_lookup_tokens: int
    speculative_batch_tiers: dict[int, int]
    draft: DraftInfo | None
    page_size: int
    kv_pages: int
    kv_tokens: int
    kv_cache_dtype: str
    kv_bytes_per_token: int
    kv_window_bytes_per_token: int
    kv_window_tokens: int
    kv_window_request_tokens: int
    kv_gb: float
    kv_sized_by: str
    max_request_tokens: int
    step_costs: StepCosts | None
    tree_costs: tuple[TreeCost, ...] = ()
    world: int = 1
    pid: int = 0
    node: str = ""
    gpus: tuple[str, ...] = ()
    interface: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as a dict that is ready for JSON."""
        return {**asdict(self), "config": self.config.model_dump()}


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Load and progress of one rank, sent with heartbeats. `own_seconds` is the time of its steps outside collectives.

    The drifts are factors on `StepCosts`, learned while serving: `decode_drift` is for steps that only decode,
    `prefill_drift` for steps of prompt rows only, `decode_drift` * `prompt_drift` for prompt rows beside decoding.
    `submitted` counts all requests ever submitted, refused ones included. By this number a router knows which of the
    requests that it has sent are part of `queued_tokens`. `padded_rows` counts the padding rows of all steps so far.
    `draft_rejected` says that many trees were verified and hardly any had an accepted token. The pages of window pools
    (`kv/window_pages.py`) are counted by themselves.
    """

    steps: int = 0
    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    pages_free: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    window_pages_free: int = 0
    window_pages_used: int = 0
    window_pages_cached: int = 0
    accept_length: float = 0.0
    draft_rejected: bool = False
    padded_rows: int = 0
    own_seconds: float = 0.0
    decode_drift: float = 1.0
    prompt_drift: float = 1.0
    prefill_drift: float = 1.0
    submitted: int = 0
