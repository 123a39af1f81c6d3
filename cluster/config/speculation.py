"""Which settings of speculation go together."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.config.engine_config import EngineConfig

NGRAM = "NGRAM"
"""The algorithm that needs no draft: it looks up tokens of the request itself."""
TREE_SETTINGS = (
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_batch_tiers",
)
DRAFT_SETTINGS = ("speculative_draft_overrides", "speculative_token_map")


def problem_of(config: "EngineConfig") -> str | None:
    """Return what is wrong with the settings of speculation, with the remedy; None if they go together."""
    is_ngram, path = config.speculative_algorithm == NGRAM, config.speculative_draft_model_path
    if path is not None:
        if is_ngram:
            return (
                "speculative_algorithm NGRAM looks up tokens of the request and has no draft; leave out "
                "speculative_draft_model_path, or leave out speculative_algorithm to use that draft"
            )
        return None
    if config.speculative_algorithm is not None and not is_ngram:
        return "speculative_algorithm needs speculative_draft_model_path: the folder of the draft"
    for name in DRAFT_SETTINGS if is_ngram else (*TREE_SETTINGS, *DRAFT_SETTINGS):
        if getattr(config, name) not in (None, {}):
            return f"{name} needs speculative_draft_model_path: the folder of the draft"
    if is_ngram and config.speculative_eagle_topk not in (None, 1):
        return "speculative_eagle_topk must be 1 with speculative_algorithm NGRAM, which drafts chains; leave it out"
    return None
