"""Derives from the settings, once, the values that follow from them. Other modules use these values and do not derive
them from the settings again.

Some decisions are made elsewhere, because they need the checkpoint, the device or a step: `arch/dtypes.py` decides what
`dtype: auto` and `kv_cache_dtype: auto` mean, `engine/backends.py` which kernels run, `engine/captures.py` what is
captured, and `dp_attention/plan.py` how each step is padded.

A replica knows only the settings, and has a `ResolvedSettings`. A rank knows the checkpoints and the device as well:
`arch/resolve.py` adds the values that follow from these, and makes a `ResolvedConfig`.
"""

from dataclasses import dataclass
from typing import Any, Self

from cluster.config import ConfigError
from cluster.config.engine_config import EngineConfig
from cluster.config.speculation import NGRAM
from cluster.config.tree_shape import TreeShape, largest, lookup_tiers, tiers, tree_shape

DEFAULT_LOOKUP_TOKENS = 8
UNLIMITED = 1 << 30
"""This number of prompt rows per step means that there is no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSettings:
    """The values that follow from the settings of an engine. Sizes are in rows or tokens.

    `settings` are the settings themselves: many of them are used as they are. `tiers` are all tree shapes that a step
    may use: first the shapes without looked-up tokens, in order of depth and then of size, then those with a branch of
    `lookup_tokens` looked-up tokens (tokens that followed the same text earlier in the request; 0 if there are no such
    shapes). `shape` has the levels and nodes of all tiers. `forced_shape` has in addition all nodes that a grammar may
    add: no tree of a step is larger. If `adaptive_trees`, each step chooses among the tiers by their costs. (If
    `speculative_mode` is unset, `resolve_models` sets it before.) A step runs at most `chunk_rows` prompt rows on each
    rank, and at most `mixed_chunk_rows` if some request decodes. If `prefill_time_limited` is True, the prompt rows of
    a step in which a request decodes may also take only the share `prefill_share` of its time. `group_size` is the
    number of ranks in an attention group.
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
        """Return the values that follow from `settings`. A subclass passes its additional fields in `subclass_fields`.
        If `share_rows` is False, every request gets equally many target rows in a step; otherwise adaptive trees may
        give more rows to some requests than to others. If the depth of the trees depends on the draft's MTP layers,
        `speculative_num_steps` must be set before this call, as `resolve_models` does.

        Raises:
            ConfigError: the settings of the tree contradict each other (see `tree_shape`), or trees are fixed although
                `speculative_lookup_tokens` is set.
        """
        shape, chunked_size, mixed_size = (
            tree_shape(settings),
            settings.chunked_prefill_size,
            settings.mixed_prefill_size,
        )
        chunk_rows = chunked_size if chunked_size > 0 else UNLIMITED
        adaptive_trees = settings.speculative_mode == "adaptive" and shape.num_steps > 0
        # FlashInfer's plan of a step needs equally many rows for each request.
        share_rows = share_rows and adaptive_trees and settings.attention_backend != "flashinfer"
        # The chains of a draft do not share rows: that adds tiers, among which steps choose worse (docs/log.md).
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
        """Whether steps look up tokens (find the end of a request's text earlier in the text, and propose what followed
        there): for n-gram speculation, or as a branch beside a draft's tree.
        """
        return self.settings.speculative_algorithm == NGRAM or self.lookup_tokens > 0

    @property
    def last_drafted_tier(self) -> int:
        """The index in `tiers` of the last tier without looked-up tokens."""
        return max(tier for tier, shape in enumerate(self.tiers) if not shape.lookup_tokens)

    @property
    def max_positions_ahead(self) -> int:
        """How many positions the rows of a step may lie beyond the committed tokens that the host knows of. The depth
        of a tree counts twice, because the host may not know yet how many tokens of the previous tree were accepted.
        """
        return 2 * self.forced_shape.num_steps + 3

    def max_tier(self, num_decodes: int, max_draft_tokens: int | None = None) -> int:
        """Return the index in `tiers` of the last tier that a step may use in which `num_decodes` requests of a rank
        decode. None of these requests accepts more than `max_draft_tokens` drafted tokens in a step; if it is None,
        there is no such limit.
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
    """Return `tokenizer_path`, or the target's `model_path` if it is unset."""
    return settings.tokenizer_path or settings.model_path
