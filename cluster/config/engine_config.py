"""The frozen settings of one engine. Names are SGLang's; `config/aliases.py` maps vLLM's onto them.

Mistakes that can be found without opening a file raise an error here, except contradictions between settings of the
tree, which `tree_shape.py` and `resolved.py` find. The error names the setting and the remedy.
"""

import difflib
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from cluster.config.aliases import ALIASES, EXPERT_PARALLEL_ALIAS, SPECULATIVE_CONFIG, convert_speculative_value
from cluster.config.speculation import problem_of

ComputeDtype = Literal["auto", "float64", "float32", "bfloat16", "float16"]
KvCacheDtype = Literal["auto", "fp8_e4m3"]
KV_CACHE_DTYPES: tuple[str, ...] = get_args(KvCacheDtype)

MAX_CONTEXT_LENGTH = 1 << 24  # float32, in which rotary angles are computed, is exact for integers up to this
KV_SIZE_SETTINGS = ("max_total_tokens", "kv_cache_gb", "mem_fraction_static")

DRAFT_FACTS: dict[str, tuple[Any, ...]] = {
    "aux_numbering": ("outputs", "boundaries"),
    "recurrent": ("pre", "post"),
    "target_hidden": ("pre", "post"),
    "norm_before_residual": (False, True),
    "rope_layout": ("neox", "interleaved"),
}
"""Values of `speculative_draft_overrides`. `aux_numbering`: aux layer ids count layer outputs (0: output of layer 0) or
layer inputs (boundaries). `recurrent`: the next level reads the hidden state before or after the final norm.
`target_hidden`: an MTP layer reads the target's hidden state before or after the target's final norm.
`norm_before_residual`: layer 0's residual is normed. `rope_layout`: pairs are half-split (neox) or neighbours."""


class ConfigError(ValueError):
    """A setting that cannot be used; the message names it and says what to write instead."""


def spelling_hint(key: str, known_names: list[str]) -> str:
    """Return a hint such as `; did you mean 'page_size'?`, or an empty string if no known name is close."""
    matches = difflib.get_close_matches(key, known_names, n=1, cutoff=0.6)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def as_config_error(error: ValidationError) -> ConfigError:
    """Return one error with all mistakes that pydantic found, one line each; every line names its setting."""
    lines = []
    for detail in error.errors(include_url=False, include_context=False):
        location = ".".join(str(key) for key in detail["loc"])
        message = detail["msg"].removeprefix("Value error, ")
        if detail["type"] not in ("value_error", "missing"):
            message += f", got {detail['input']!r}"
        lines.append(f"{location}: {message}" if location else message)
    return ConfigError("\n".join(lines))


class Settings(BaseModel):
    """The base of all config models: frozen; an unknown key is an error that suggests the nearest known key."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            known_names = list(cls.model_fields)
            for key in data:
                if key not in known_names:
                    raise ConfigError(f"unknown setting {key!r}{spelling_hint(str(key), known_names)}")
        return data


class EngineConfig(Settings):
    """The settings of one engine (one gang of ranks). Sizes are in tokens unless the name says otherwise."""

    model_path: str = Field(description="folder of the target, or its name on a hub")
    tokenizer_path: str | None = Field(
        default=None, description="folder of the tokenizer, or the name of a model on a hub; unset: the target's"
    )
    dtype: ComputeDtype = Field(
        default="auto",
        description="compute dtype of the models; auto: on a GPU the checkpoint's dtype; on a CPU float32, but "
        "bfloat16 for a bfloat16 target with at least 134 million parameters if the kernels are in C",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="device of the ranks; auto: GPUs if placement_group_config gives each rank one, or, "
        "without it, if accelerator_type is set or the cluster has GPUs; else the CPU",
    )
    kv_cache_dtype: KvCacheDtype = Field(
        default="auto",
        description="dtype of the KV caches of target and draft; auto: the compute dtype; fp8_e4m3: one byte per "
        "number, with one scale per cell and KV head",
    )
    attention_backend: Literal["auto", "torch", "c", "triton", "flashinfer"] = Field(
        default="auto",
        description="implementation of attention and of the other kernels; auto: C on a CPU, Triton on a GPU, "
        "torch if these are not available; flashinfer: attention by FlashInfer, the other kernels by "
        "Triton",
    )
    context_length: int | None = Field(
        default=None,
        ge=8,
        le=MAX_CONTEXT_LENGTH,
        description="maximum number of tokens of a prompt and its output together; it may exceed the length in "
        "the model's config, which logs a warning; unset: the length in the config, extended by its "
        "rope scaling",
    )
    page_size: int = Field(default=16, ge=1, le=1024, description="tokens of a KV page, the unit that requests share")
    max_total_tokens: int | None = Field(default=None, ge=1, description="KV capacity of one rank, in tokens")
    kv_cache_gb: float | None = Field(default=None, gt=0, description="KV capacity of one rank, in GB")
    mem_fraction_static: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="an alternative to max_total_tokens and kv_cache_gb, of which only one may be set; on "
        "CUDA the fraction of device memory for weights and KV together, unset: all that the "
        "largest steps leave; on a CPU the fraction, for KV, of the memory that is free after "
        "loading, shared by the ranks of a node, unset: 0.3",
    )
    swa_full_tokens_ratio: float | None = Field(
        default=None, gt=0, le=1, description="share of tokens that sliding-window layers keep; 1: all; unset: computed"
    )
    max_running_requests: int = Field(
        default=64, ge=1, le=4096, description="maximum number of requests that a group of ranks runs at once"
    )
    chunked_prefill_size: int = Field(
        default=512, ge=-1, description="maximum prompt rows per step and rank; -1: context_length rows"
    )
    mixed_prefill_size: int | None = Field(
        default=None,
        ge=1,
        description="prompt rows per step and rank while a request of any rank decodes; replaces prefill_share",
    )
    prefill_share: float = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="fraction of a step's time that prompt rows may take while a request of any rank decodes",
    )
    max_queued_tokens: int = Field(
        default=65536,
        ge=1,
        description="maximum number of queued tokens, prompts and expected outputs together; a request that "
        "exceeds it is refused, unless the queue is empty or the request would wait for at most one "
        "second",
    )
    max_queued_requests: int = Field(
        default=1024,
        ge=1,
        description="maximum number of requests that wait for their first token; one more is refused, unless it "
        "would wait for at most one second",
    )
    max_queue_wait_s: float = Field(
        default=30.0,
        gt=0,
        description="maximum seconds until the first token; a request that is expected to wait for more than "
        "seven tenths of it is refused, unless it waits for other requests for at most one second",
    )
    disable_radix_cache: bool = Field(
        default=False, description="compute every prompt completely instead of reusing the KV of a known prefix"
    )
    speculative_algorithm: Literal["EAGLE", "EAGLE3", "NEXTN", "NGRAM"] | None = Field(
        default=None,
        description="unset: recognised from the draft's folder; NGRAM needs no draft: it proposes what followed the "
        "last tokens earlier in the request",
    )
    speculative_draft_model_path: str | None = Field(
        default=None, description="folder of the draft, or its name on a hub; unset: none"
    )
    speculative_num_steps: int | None = Field(
        default=None, ge=1, le=16, description="levels of a drafted tree; unset: 3; 8 for NGRAM; 2 for two MTP layers"
    )
    speculative_forced_tokens: int = Field(
        default=8,
        ge=0,
        le=64,
        description="nodes that a grammar may add to a drafted tree; the draft does not compute them",
    )
    speculative_forced_rows: int | None = Field(
        default=None, ge=0, description="rows per step for nodes that grammars add; unset: 4 on a CPU, 256 on a GPU"
    )
    speculative_eagle_topk: int | None = Field(
        default=None, ge=1, le=32, description="children of each drafted node; unset: 1, a chain"
    )
    speculative_num_draft_tokens: int | None = Field(
        default=None,
        ge=2,
        le=512,
        description="nodes of a tree that are verified, root included; unset: levels + 1 for a chain; four per "
        "level for a tree, or the maximum if that is less",
    )
    speculative_mode: Literal["adaptive", "fixed"] | None = Field(
        default=None,
        description="adaptive: each step chooses the fastest tree, up to the one set; fixed: that tree; unset: "
        "adaptive on a CPU, fixed on a GPU",
    )
    speculative_lookup_tokens: int | None = Field(
        default=None,
        ge=0,
        le=16,
        description="tokens that followed the same text earlier in the request, as one more branch of a draft's tree; "
        "unset: 8 with adaptive trees on a CPU, else 0",
    )
    speculative_batch_tiers: dict[int, int] = Field(
        default_factory=dict,
        description="{4: 3, 8: 2}: at most 3 tree levels from 4 decoding requests of a rank on, 2 from 8",
    )
    synthetic_acceptance: tuple[float, ...] = Field(
        default=(), description="load tests only: the chance that level 1, 2, .. of a tree is accepted; output is wrong"
    )
    speculative_draft_parallel: Literal["sharded", "replicated"] = Field(
        default="sharded",
        description="sharded: the draft is split over the ranks of a group like the target; replicated: each rank "
        "has a full copy",
    )
    speculative_draft_overrides: dict[str, Any] = Field(
        default_factory=dict,
        description="facts that a draft's tensors do not show, such as {aux_numbering: boundaries}",
    )
    speculative_token_map: str | None = Field(
        default=None, description="file (.json or .safetensors) of the only token ids that the draft proposes; FR-Spec"
    )
    tp_size: int = Field(
        default=1, ge=1, le=1024, description="total number of ranks, over which the weights of a gang are sharded"
    )
    attn_dp_size: int = Field(
        default=1, ge=1, description="number of attention groups that the ranks form, each with its own requests"
    )
    ep_size: int = Field(
        default=1,
        ge=1,
        description="number of shards that the experts are divided into, each held by tp_size / ep_size ranks; 1: "
        "every expert is split by columns over all ranks",
    )
    vocab_parallel: Literal["attention", "world"] = Field(
        default="attention",
        description="attention: the head is sharded over the ranks of a group; world: over all ranks",
    )
    dp_padding: Literal["auto", "padded", "exact"] = Field(
        default="auto",
        description="padded: every group's rows are padded to those of the fullest group; exact: as many rows are "
        "exchanged as each group has; auto: exact on a CPU; on a GPU padded if that adds few rows",
    )
    one_shot_all_reduce: bool = Field(
        default=False,
        description="on CUDA, compute sums of at most 512 KiB by a kernel that reads the memory of the other "
        "ranks, instead of by NCCL",
    )
    overlap: bool = Field(
        default=True,
        description="start a step before the results of the previous step are read, on devices that run "
        "asynchronously to the host",
    )
    capture: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="replay captured programs instead of running steps of the same shape eagerly; auto: for "
        "steps without prompts, on a CPU with the C kernels and on a GPU with Triton's; on a CPU "
        "without capture_sizes also for steps in the middle of a prompt",
    )
    capture_sizes: tuple[int, ...] | None = Field(
        default=None,
        description="[1, 2, 4, 8]: captured steps are padded to these numbers of requests and prompt rows; "
        "programs for decoding are then captured at start; unset: on a CPU exact sizes, captured when "
        "they recur; on a GPU 1, 2, 3, 4, 6, 8 and so on up to 512, captured at start",
    )
    debug_lockstep: bool = Field(
        default=False, description="compare the plans of all ranks before every step, and stop if they differ"
    )
    random_seed: int = Field(
        default=0, ge=0, description="seed of the generator that gives seeds to requests without a seed"
    )
    num_threads: int | None = Field(
        default=None,
        ge=1,
        description="torch threads of one rank; unset: its share of the cores; a server keeps one core for itself",
    )
    routing_policy: Literal["expected_load", "round_robin", "total_tokens", "total_requests"] = Field(
        default="expected_load",
        description="which group gets a request: the group whose steps it lengthens least, the next one in turn, "
        "or the one with the fewest tokens or requests",
    )
    watchdog_timeout_s: float = Field(
        default=3.0,
        gt=0,
        description="a rank that does not answer, or has work and makes no progress, for this long is suspect "
        "(/health answers 503); its gang is restarted after 2 x this time without an answer, or "
        "3 x this time without progress",
    )
    start_timeout_s: float = Field(
        default=3600.0,
        gt=0,
        description="maximum time for the first start of a gang; loading its models is included, downloading them "
        "is not",
    )
    restart_timeout_s: float | None = Field(
        default=None,
        gt=0,
        description="how long open streams wait for a gang to restart; unset: 4 times the duration of its first "
        "start, at least 60 s",
    )

    @classmethod
    def from_kwargs(cls, kwargs: Mapping[str, Any]) -> Self:
        """Build the settings from `engine_kwargs` in SGLang's or vLLM's spelling.

        Raises:
            ConfigError: a key is unknown (the message suggests the nearest known key), a setting is given twice under
                two spellings, or a value is wrong.
        """
        fields: dict[str, Any] = {}

        def set_once(spelling: str, name: str, value: Any) -> None:
            if name in fields:
                raise ConfigError(f"{spelling!r} sets {name!r}, which is already set; give it once")
            fields[name] = value

        for key, value in kwargs.items():
            if key == "speculative_config":
                if not isinstance(value, Mapping):
                    raise ConfigError("speculative_config must be a mapping with method, model, num_speculative_tokens")
                for sub_key, sub_value in value.items():
                    if sub_key not in SPECULATIVE_CONFIG:
                        hint = spelling_hint(sub_key, list(SPECULATIVE_CONFIG))
                        raise ConfigError(f"unknown setting 'speculative_config.{sub_key}'{hint}")
                    set_once(
                        f"speculative_config.{sub_key}",
                        SPECULATIVE_CONFIG[sub_key],
                        convert_speculative_value(sub_key, sub_value),
                    )
                continue
            name = ALIASES.get(key, key)
            if name not in cls.model_fields:
                raise ConfigError(f"unknown setting {key!r}{spelling_hint(key, [*cls.model_fields, *ALIASES])}")
            set_once(key, name, _expert_parallel_size(kwargs, value) if key == EXPERT_PARALLEL_ALIAS else value)
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise as_config_error(error) from None

    @field_validator("kv_cache_dtype", mode="before")
    @classmethod
    def _refuse_unserved_cache_dtype(cls, dtype: Any) -> Any:
        if dtype not in KV_CACHE_DTYPES:
            reason = "; of FP8 e4m3 alone is, as e5m2 rounds twice as coarsely" if "fp8" in str(dtype) else ""
            raise ConfigError(f"{dtype!r} is not served{reason}; set fp8_e4m3, or auto for the dtype of the model")
        return dtype

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if (problem := problem_of(dict(self))) is not None:
            raise ConfigError(problem)
        if self.attention_backend == "flashinfer" and self.kv_cache_dtype == "fp8_e4m3":
            raise ConfigError(
                "attention_backend flashinfer cannot read kv_cache_dtype fp8_e4m3, whose scales, one for each cell and "
                "KV head, are not those of FlashInfer; set kv_cache_dtype to auto, or attention_backend to triton"
            )
        size_settings = [name for name in KV_SIZE_SETTINGS if getattr(self, name) is not None]
        if len(size_settings) > 1:
            raise ConfigError(f"{' and '.join(size_settings)} each size the KV cache; give one of them")
        if not (self.speculative_token_map or ".json").endswith((".json", ".safetensors")):
            raise ConfigError(
                f"speculative_token_map {self.speculative_token_map!r} must be a .json list of token ids or a "
                ".safetensors file with one tensor of them; a pickle (.pt) is not read, write its ids as JSON"
            )
        for fact, value in self.speculative_draft_overrides.items():
            if fact not in DRAFT_FACTS:
                raise ConfigError(
                    f"speculative_draft_overrides: unknown fact {fact!r}{spelling_hint(fact, [*DRAFT_FACTS])}"
                )
            if value not in DRAFT_FACTS[fact]:
                raise ConfigError(
                    f"speculative_draft_overrides: {fact} must be one of {DRAFT_FACTS[fact]}, got {value!r}"
                )
        if self.capture_sizes is not None:
            if self.capture == "off":
                raise ConfigError(
                    "capture_sizes is for programs, and with capture off there are none; set capture to auto or on"
                )
            if not self.capture_sizes or any(b <= a for a, b in pairwise((0, *self.capture_sizes))):
                raise ConfigError(f"capture_sizes must be positive and ascend, got {list(self.capture_sizes)}")
        if self.chunked_prefill_size == 0:
            raise ConfigError("chunked_prefill_size must be positive, or -1 for as many rows as context_length")
        if self.tp_size % self.attn_dp_size:
            raise ConfigError(f"attn_dp_size {self.attn_dp_size} must divide tp_size {self.tp_size}")
        if self.tp_size % self.ep_size:
            raise ConfigError(
                f"ep_size {self.ep_size} must divide tp_size {self.tp_size}; set it to tp_size, or to 1 to cut each "
                "expert over all ranks"
            )
        return self


def _expert_parallel_size(kwargs: Mapping[str, Any], enabled: Any) -> Any:
    """Convert vLLM's `enable_expert_parallel` to `ep_size`: the number of ranks if it is true, 1 if it is false."""
    if not isinstance(enabled, bool):
        raise ConfigError(f"{EXPERT_PARALLEL_ALIAS} must be true or false, got {enabled!r}; ep_size takes a number")
    return kwargs.get("tp_size", kwargs.get("tensor_parallel_size", 1)) if enabled else 1
