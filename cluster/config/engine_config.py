"""The frozen settings of one engine. Names are SGLang's; `config/aliases.py` maps vLLM's onto them.

Every mistake that shows without opening a file is an error here, which names the setting and the remedy.
"""

import difflib
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from cluster.config.aliases import ALIASES, EXPERT_SWITCH, SPECULATIVE_CONFIG, spelled

Dtype = Literal["auto", "float64", "float32", "bfloat16", "float16"]
Cache = Literal["auto", "fp8_e4m3"]
CACHES: tuple[str, ...] = get_args(Cache)

NEED_A_DRAFT = (
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_batch_tiers",
    "speculative_draft_overrides",
    "speculative_token_map",
)
LONGEST_CONTEXT = 1 << 24  # float32, in which rotary angles are computed, is exact for integers up to this
KV_SIZES = ("max_total_tokens", "kv_cache_gb", "mem_fraction_static")

DRAFT_FACTS: dict[str, tuple[Any, ...]] = {
    "aux_numbering": ("outputs", "boundaries"),
    "recurrent": ("pre", "post"),
    "norm_before_residual": (False, True),
    "rope_layout": ("neox", "interleaved"),
}
"""Values of `speculative_draft_overrides`. `aux_numbering`: aux layer ids count layer outputs (0: output of layer 0) or
boundaries (0: before layer 0). `recurrent`: the next level reads the hidden state before or after the final norm.
`norm_before_residual`: layer 0's residual is the normed hidden state. `rope_layout`: rotary pairs are half-split (neox)
or neighbours (interleaved)."""


class ConfigError(ValueError):
    """A setting that cannot be used; the message names it and says what to write instead."""


def nearest(key: str, known: list[str]) -> str:
    """Return a hint such as `; did you mean 'page_size'?`, or an empty string if no known name is close."""
    match = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"; did you mean {match[0]!r}?" if match else ""


def as_config_error(error: ValidationError) -> ConfigError:
    """Return one error with all mistakes that pydantic found, one line each; every line names its setting."""
    lines = []
    for detail in error.errors(include_url=False, include_context=False):
        where = ".".join(str(part) for part in detail["loc"])
        what = detail["msg"].removeprefix("Value error, ")
        if detail["type"] not in ("value_error", "missing"):
            what += f", got {detail['input']!r}"
        lines.append(f"{where}: {what}" if where else what)
    return ConfigError("\n".join(lines))


class Settings(BaseModel):
    """The base of all config models: frozen; an unknown key is an error that suggests the nearest known key."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            known = list(cls.model_fields)
            for key in data:
                if key not in known:
                    raise ConfigError(f"unknown setting {key!r}{nearest(str(key), known)}")
        return data


class EngineConfig(Settings):
    """The settings of one engine (one gang of ranks). Sizes are in tokens unless the name says otherwise."""

    model_path: str = Field(description="folder of the target, or its name on a hub")
    tokenizer_path: str | None = Field(
        default=None, description="folder of the tokenizer, or the name of a model on a hub; unset: the target's"
    )
    dtype: Dtype = Field(
        default="auto",
        description="what models compute in; auto: what the checkpoint is in on a GPU; on a CPU float32, but bfloat16 "
        "for a target in bfloat16 of 134 million parameters and more, where the kernels are in C",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="where the ranks compute; auto: on GPUs where there are any"
    )
    kv_cache_dtype: Cache = Field(
        default="auto",
        description="what the KV caches of target and draft hold; auto: numbers of the dtype that models compute in; "
        "fp8_e4m3: a byte a number, and a scale for each cell and KV head",
    )
    attention_backend: Literal["auto", "torch", "c", "triton", "flashinfer"] = Field(
        default="auto",
        description="what attention and the kernels beside it run in; auto: C on a CPU, Triton on "
        "a GPU, torch where these cannot be had; flashinfer: attention by FlashInfer, the rest as triton",
    )
    context_length: int | None = Field(
        default=None,
        ge=8,
        le=LONGEST_CONTEXT,
        description="most tokens of a prompt and what follows it, even beyond what the model's config promises, which "
        "a warning says; unset: what the config promises, as its rope scaling stretches it",
    )
    page_size: int = Field(default=16, ge=1, le=1024, description="tokens of a KV page, the unit that requests share")
    max_total_tokens: int | None = Field(default=None, ge=1, description="KV capacity of one rank, in tokens")
    kv_cache_gb: float | None = Field(default=None, gt=0, description="KV capacity of one rank, in GB")
    mem_fraction_static: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="unless max_total_tokens or kv_cache_gb is set: on CUDA the part of the device for weights and KV "
        "together, unset: what the largest steps leave; on a CPU the part for KV of the memory that is free after "
        "loading, shared by the ranks of a node, unset: 0.3",
    )
    max_running_requests: int = Field(
        default=64, ge=1, le=4096, description="requests that a group of ranks runs at once"
    )
    chunked_prefill_size: int = Field(default=512, ge=-1, description="prompt rows per step and rank; -1: no limit")
    mixed_prefill_size: int | None = Field(
        default=None,
        ge=1,
        description="prompt rows per step and rank while a request of any rank decodes; replaces prefill_share",
    )
    prefill_share: float = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="part of a step's time that prompt rows may take while a request of any rank decodes",
    )
    max_queued_tokens: int = Field(
        default=65536,
        ge=1,
        description="tokens that may wait, prompts and expected answers; a request beyond them is refused, unless "
        "none waits or it would wait for a second at most",
    )
    max_queued_requests: int = Field(
        default=1024,
        ge=1,
        description="requests that may wait for their first token; one more is refused, unless it would wait for a "
        "second at most",
    )
    max_queue_wait_s: float = Field(
        default=30.0,
        gt=0,
        description="seconds until the first token; a request that is expected to wait for more than seven tenths of "
        "them is refused, unless it waits for other requests for a second at most",
    )
    disable_radix_cache: bool = Field(
        default=False, description="compute every prompt whole, in place of reusing the KV of a prefix seen before"
    )
    speculative_algorithm: Literal["EAGLE", "EAGLE3", "NEXTN"] | None = Field(
        default=None, description="unset: recognised from the draft's folder"
    )
    speculative_draft_model_path: str | None = Field(
        default=None, description="folder of the draft, or its name on a hub; unset: none"
    )
    speculative_num_steps: int | None = Field(
        default=None,
        ge=1,
        le=16,
        description="levels of a drafted tree; unset: 3, less where the draft has fewer layers",
    )
    speculative_forced_tokens: int = Field(
        default=8, ge=0, le=64, description="nodes that a grammar may add to a drafted tree; they cost no draft"
    )
    speculative_forced_rows: int | None = Field(
        default=None, ge=0, description="rows that a step may spend on them; unset: 4 on a CPU, 256 on a GPU"
    )
    speculative_eagle_topk: int | None = Field(
        default=None, ge=1, le=32, description="children of each node that is drafted on; unset: 1, a chain"
    )
    speculative_num_draft_tokens: int | None = Field(
        default=None,
        ge=2,
        le=512,
        description="nodes of a tree that are verified, the root included; unset: of a chain its levels + 1, of a tree "
        "four for each level, or as many as there can be",
    )
    speculative_batch_tiers: dict[int, int] = Field(
        default_factory=dict,
        description="{4: 3, 8: 2}: at most 3 tree levels from 4 decoding requests of a rank on, 2 from 8",
    )
    speculative_draft_parallel: Literal["sharded", "replicated"] = Field(
        default="sharded",
        description="cut the draft over the ranks of a group as the target is, or give each a whole one",
    )
    speculative_draft_overrides: dict[str, Any] = Field(
        default_factory=dict, description="facts that a draft's tensors do not show, as {aux_numbering: boundaries}"
    )
    speculative_token_map: str | None = Field(
        default=None, description="file (.json or .safetensors) of the only token ids that the draft proposes; FR-Spec"
    )
    tp_size: int = Field(default=1, ge=1, le=1024, description="ranks in all, over which a gang's weights are cut")
    attn_dp_size: int = Field(
        default=1, ge=1, description="groups that the ranks form for attention, each with requests of its own"
    )
    ep_size: int = Field(
        default=1,
        ge=1,
        description="parts that whole experts are divided into, each held by tp_size / ep_size ranks; 1: every expert "
        "is cut by columns over all ranks",
    )
    vocab_parallel: Literal["attention", "world"] = Field(
        default="attention", description="cut the head over the ranks of a group, or over all ranks"
    )
    dp_padding: Literal["auto", "padded", "exact"] = Field(
        default="auto",
        description="pad every group's rows to the fullest group's, or exchange as many as each has; auto: exact on a "
        "CPU, on a GPU padded where that adds few",
    )
    one_shot_all_reduce: bool = Field(
        default=False,
        description="on CUDA, sums of at most 512 KiB by a kernel that reads the peers' memory, in place of NCCL",
    )
    overlap: bool = Field(
        default=True,
        description="begin a step before the results of the one before are read, on devices that run behind the host",
    )
    capture: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="replay captured programs in place of running steps of the same shape anew; auto: of steps without "
        "prompts, on a CPU with the kernels in C and on a GPU with Triton's",
    )
    capture_sizes: tuple[int, ...] | None = Field(
        default=None,
        description="[1, 2, 4, 8]: pad steps that are captured to these numbers of requests and prompt rows; programs "
        "of decoding are then captured at start; unset: on a CPU exact sizes, captured when they recur, on a GPU 1, 2, "
        "3, 4, 6, 8 and so on up to 512, captured at start",
    )
    debug_lockstep: bool = Field(
        default=False, description="compare the plans of all ranks before every step, and stop where they differ"
    )
    random_seed: int = Field(
        default=0, ge=0, description="begins the generator that gives seeds to requests without a seed"
    )
    num_threads: int | None = Field(
        default=None,
        ge=1,
        description="torch threads of one rank; unset: its share of the cores, one of which a server leaves to itself",
    )
    routing_policy: Literal["expected_load", "round_robin", "total_tokens", "total_requests"] = Field(
        default="expected_load",
        description="which group a request goes to: the one whose steps it makes least longer, the "
        "next in turn, or the one with the fewest tokens or requests",
    )
    watchdog_timeout_s: float = Field(
        default=3.0, gt=0, description="a rank that does not answer, or is busy without progress, for so long is frozen"
    )
    start_timeout_s: float = Field(
        default=3600.0,
        gt=0,
        description="how long the first start of a gang may take, its models' loading included, their download not",
    )
    restart_timeout_s: float | None = Field(
        default=None,
        gt=0,
        description="how long open streams wait for a gang to restart; unset: 4 times its first start, at least 60 s",
    )

    @classmethod
    def from_kwargs(cls, kwargs: Mapping[str, Any]) -> Self:
        """Build the settings from `engine_kwargs` in SGLang's or vLLM's spelling.

        Raises:
            ConfigError: an unknown key (with the nearest known one), a key given twice under two spellings, or a bad
                value.
        """
        flat: dict[str, Any] = {}

        def put(spelling: str, name: str, value: Any) -> None:
            if name in flat:
                raise ConfigError(f"{spelling!r} sets {name!r}, which is already set; give it once")
            flat[name] = value

        for key, value in kwargs.items():
            if key == "speculative_config":
                if not isinstance(value, Mapping):
                    raise ConfigError("speculative_config must be a mapping with method, model, num_speculative_tokens")
                for sub, sub_value in value.items():
                    if sub not in SPECULATIVE_CONFIG:
                        hint = nearest(sub, list(SPECULATIVE_CONFIG))
                        raise ConfigError(f"unknown setting 'speculative_config.{sub}'{hint}")
                    put(f"speculative_config.{sub}", SPECULATIVE_CONFIG[sub], spelled(sub, sub_value))
                continue
            name = ALIASES.get(key, key)
            if name not in cls.model_fields:
                raise ConfigError(f"unknown setting {key!r}{nearest(key, [*cls.model_fields, *ALIASES])}")
            put(key, name, _parts(kwargs, value) if key == EXPERT_SWITCH else value)
        try:
            return cls.model_validate(flat)
        except ValidationError as error:
            raise as_config_error(error) from None

    @field_validator("kv_cache_dtype", mode="before")
    @classmethod
    def _refuse_other_caches(cls, given: Any) -> Any:
        if given not in CACHES:
            why = "; of FP8 e4m3 alone is, as e5m2 rounds twice as coarsely" if "fp8" in str(given) else ""
            raise ConfigError(f"{given!r} is not served{why}; set fp8_e4m3, or auto for the dtype of the model")
        return given

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.speculative_draft_model_path is None:
            if self.speculative_algorithm is not None:
                raise ConfigError("speculative_algorithm needs speculative_draft_model_path: the folder of the draft")
            for name in NEED_A_DRAFT:
                if getattr(self, name) not in (None, {}):
                    raise ConfigError(f"{name} needs speculative_draft_model_path: the folder of the draft")
        if self.attention_backend == "flashinfer" and self.kv_cache_dtype == "fp8_e4m3":
            raise ConfigError(
                "attention_backend flashinfer cannot read kv_cache_dtype fp8_e4m3, whose scales, one for each cell and "
                "KV head, are not those of FlashInfer; set kv_cache_dtype to auto, or attention_backend to triton"
            )
        sized = [name for name in KV_SIZES if getattr(self, name) is not None]
        if len(sized) > 1:
            raise ConfigError(f"{' and '.join(sized)} each size the KV cache; give one of them")
        if not (self.speculative_token_map or ".json").endswith((".json", ".safetensors")):
            raise ConfigError(
                f"speculative_token_map {self.speculative_token_map!r} must be a .json list of token ids or a "
                ".safetensors file with one tensor of them; a pickle (.pt) is not read, write its ids as JSON"
            )
        for fact, value in self.speculative_draft_overrides.items():
            if fact not in DRAFT_FACTS:
                raise ConfigError(f"speculative_draft_overrides: unknown fact {fact!r}{nearest(fact, [*DRAFT_FACTS])}")
            if value not in DRAFT_FACTS[fact]:
                raise ConfigError(
                    f"speculative_draft_overrides: {fact} must be one of {DRAFT_FACTS[fact]}, got {value!r}"
                )
        for requests, steps in self.speculative_batch_tiers.items():
            if requests < 1 or steps < 0:
                raise ConfigError(
                    "speculative_batch_tiers must map numbers of requests to numbers of levels, "
                    f"got {requests}: {steps}"
                )
        if self.capture_sizes is not None:
            if self.capture == "off":
                raise ConfigError(
                    "capture_sizes is for programs, and with capture off there are none; set capture to auto or on"
                )
            if not self.capture_sizes or any(b <= a for a, b in pairwise((0, *self.capture_sizes))):
                raise ConfigError(f"capture_sizes must be positive and ascend, got {list(self.capture_sizes)}")
        if self.chunked_prefill_size == 0:
            raise ConfigError("chunked_prefill_size must be positive, or -1 for no limit")
        if self.tp_size % self.attn_dp_size:
            raise ConfigError(f"attn_dp_size {self.attn_dp_size} must divide tp_size {self.tp_size}")
        if self.tp_size % self.ep_size:
            raise ConfigError(
                f"ep_size {self.ep_size} must divide tp_size {self.tp_size}; set it to tp_size, or to 1 to cut each "
                "expert over all ranks"
            )
        return self


def _parts(kwargs: Mapping[str, Any], switch: Any) -> Any:
    """Convert vLLM's `enable_expert_parallel` to `ep_size`: true is the number of ranks (whole experts), false is 1."""
    if not isinstance(switch, bool):
        raise ConfigError(f"{EXPERT_SWITCH} must be true or false, got {switch!r}; ep_size takes a number")
    return kwargs.get("tp_size", kwargs.get("tensor_parallel_size", 1)) if switch else 1
