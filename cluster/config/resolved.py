"""Where settings become facts. Other modules take the facts, and derive none of them from the settings again.

Not here: `arch/dtypes.py` decides what `dtype: auto` and `kv_cache_dtype: auto` are, `engine/backends.py` the kernels,
`engine/captures.py` what is captured, and `dp_attention/plan.py` the padding of each step. These need the checkpoint,
the device or a step.

A replica knows the settings alone, and has `ResolvedSettings`. A rank has the checkpoints and the device too:
`arch/resolve.py` adds the facts that follow from these, and makes a `ResolvedConfig`.
"""

from dataclasses import dataclass
from typing import Any, Self

from cluster.config import ConfigError
from cluster.config.engine_config import EngineConfig
from cluster.config.speculation import NGRAM
from cluster.config.tree_shape import TreeShape, largest, lookup_tiers, tiers, tree_shape

DEFAULT_LOOKUP_TOKENS = 8
UNLIMITED = 1 << 30
"""The number of prompt rows per step that stands for no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSettings:
    """The facts that the settings of an engine decide. Sizes are in rows or tokens.

    `settings` are the settings themselves: many of them need no conversion. `tiers` are all trees that a step may use:
    first those without looked-up tokens, in order of depth and then of size, then those with `lookup_tokens` looked-up
    tokens. `shape` has all their levels and nodes, and `forced_shape` has in addition all nodes that a grammar may add:
    no tree of a step is larger. If `adaptive_trees`, each step chooses among the tiers by their costs. (If
    `speculative_mode` is unset, `resolve_models` sets it first.) A step runs at
    most `chunk_rows` prompt rows on each rank, and at most `mixed_chunk_rows` if some request decodes. If
    `prefill_time_limited` is True, the prompt rows of such a step may also take only the share `prefill_share` of its
    time. `group_size` is the number of ranks in an attention group.
    """

    settings: EngineConfig
    shape: TreeShape
    tiers: tuple[TreeShape, ...]
    forced_shape: TreeShape
    adaptive_trees: bool
    lookup_tokens: int
    chunk_rows: int
    mixed_chunk_rows: int
    prefill_time_limited: bool
    group_size: int
    fp8_cache: bool
    draft_is_sharded: bool

    @classmethod
    def from_settings(cls, settings: EngineConfig, share_rows: bool = True, **subclass_fields: Any) -> Self:
        """Return the facts that `settings` decide. A subclass passes its additional fields in `subclass_fields`. If
        `share_rows` is False, requests never share the rows of a step. If the depth of the trees depends on the draft's
        MTP layers, `speculative_num_steps` must be set before, as `resolve_models` does.

        Raises:
            ConfigError: the settings of the tree contradict each other; see `tree_shape`. Or trees are fixed and
                `speculative_lookup_tokens` is set.
        """
        shape, chunked_size, mixed_size = (
            tree_shape(settings),
            settings.chunked_prefill_size,
            settings.mixed_prefill_size,
        )
        chunk_rows = chunked_size if chunked_size > 0 else UNLIMITED
        adaptive_trees = settings.speculative_mode == "adaptive" and shape.num_steps > 0
        # FlashInfer plans a step by the requests' numbers of rows, which must all be equal.
        share_rows = share_rows and adaptive_trees and settings.attention_backend != "flashinfer"
        # A draft's chains do not share rows: steps chose worse among so many chains (docs/log.md).
        is_ngram = settings.speculative_algorithm == NGRAM
        all_tiers = tiers(shape, share_rows and (shape.topk > 1 or is_ngram))
        lookup_tokens = settings.speculative_lookup_tokens
        if lookup_tokens and not adaptive_trees:
            raise ConfigError(
                "speculative_lookup_tokens needs trees that each step chooses; set speculative_mode to adaptive, or "
                "leave out speculative_lookup_tokens"
            )
        if lookup_tokens is None:
            lookup_tokens = DEFAULT_LOOKUP_TOKENS if share_rows and not is_ngram else 0
        if lookup_tokens:
            all_tiers += lookup_tiers(shape, lookup_tokens, share_rows)
        shape = largest(all_tiers)
        return cls(
            settings=settings,
            shape=shape,
            tiers=all_tiers,
            adaptive_trees=adaptive_trees,
            lookup_tokens=shape.lookup_tokens,
            forced_shape=shape.with_forced_nodes(),
            chunk_rows=chunk_rows,
            mixed_chunk_rows=chunk_rows if mixed_size is None else min(chunk_rows, mixed_size),
            prefill_time_limited=mixed_size is None,
            group_size=settings.tp_size // settings.attn_dp_size,
            fp8_cache=settings.kv_cache_dtype == "fp8_e4m3",
            draft_is_sharded=settings.speculative_draft_parallel == "sharded",
            **subclass_fields,
        )

    @property
    def looks_up_tokens(self) -> bool:
        """Whether steps look up the tokens of requests: for n-gram speculation, or beside a draft."""
        return self.settings.speculative_algorithm == NGRAM or self.lookup_tokens > 0

    @property
    def last_drafted_tier(self) -> int:
        """The number of the last tier without looked-up tokens."""
        return max(tier for tier, shape in enumerate(self.tiers) if not shape.lookup_tokens)

    @property
    def max_positions_ahead(self) -> int:
        """How many positions the rows of a step may lie beyond the longest committed length that the host knows. The
        depth of a tree counts twice, because the host may not know yet how many tokens of the previous tree were
        accepted.
        """
        return 2 * self.forced_shape.num_steps + 3

    def max_tier(self, num_decodes: int, max_draft_tokens: int | None = None) -> int:
        """Return the number of the last tier that a step may use in which `num_decodes` requests of a rank decode.
        None of them accepts more than `max_draft_tokens` drafted tokens in a step; None is no limit.
        """
        if not self.settings.speculative_batch_tiers and max_draft_tokens is None:
            return len(self.tiers) - 1
        limits = self.settings.speculative_batch_tiers.items()
        max_levels = min(
            self.shape.num_steps if max_draft_tokens is None else max_draft_tokens,
            self.shape.num_steps,
            *(max_levels for min_decodes, max_levels in limits if num_decodes >= min_decodes),
        )
        return max(tier for tier, shape in enumerate(self.tiers) if shape.num_steps <= max_levels)


def tokenizer_folder(settings: EngineConfig) -> str:
    """Return the folder of the tokenizer, which is the target's unless it is set."""
    return settings.tokenizer_path or settings.model_path
