"""Which settings of speculation go together."""

from collections.abc import Mapping
from typing import Any

NGRAM = "NGRAM"
"""The algorithm that needs no draft: it finds the end of a request's text earlier in the text, and proposes the tokens
that followed there.
"""
MISSED_TOKENS = 16
"""M, the tokens of each request that a draft reads when it wakes. More tokens make the first trees a little better, and
the step in which the draft wakes slower: it runs R M rows of the draft.
"""
TREE_SETTINGS = (
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_batch_tiers",
    "synthetic_acceptance",
)
DRAFT_SETTINGS = ("speculative_draft_overrides", "speculative_token_map", "speculative_lookup_tokens")


def problem_of(settings: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the settings of speculation, and the remedy; None if nothing is wrong. `settings` holds
    all settings of an engine, by name.
    """
    algorithm, path = settings["speculative_algorithm"], settings["speculative_draft_model_path"]
    is_ngram = algorithm == NGRAM
    if not all(0 <= chance <= 1 for chance in settings["synthetic_acceptance"]):
        return f"synthetic_acceptance must hold chances from 0 to 1, got {list(settings['synthetic_acceptance'])}"
    for requests, levels in settings["speculative_batch_tiers"].items():
        if requests < 1 or levels < 0:
            return (
                f"speculative_batch_tiers must map numbers of requests to numbers of levels, got {requests}: {levels}"
            )
    if path is not None:
        if is_ngram:
            return (
                "speculative_algorithm NGRAM looks up tokens of the request and has no draft; leave out "
                "speculative_draft_model_path, or leave out speculative_algorithm to use that draft"
            )
        return None
    if algorithm is not None and not is_ngram:
        return "speculative_algorithm needs speculative_draft_model_path: the folder of the draft"
    for name in DRAFT_SETTINGS if is_ngram else (*TREE_SETTINGS, *DRAFT_SETTINGS):
        if settings[name] not in (None, {}, (), 0):
            return f"{name} needs speculative_draft_model_path: the folder of the draft"
    if is_ngram and settings["speculative_eagle_topk"] not in (None, 1):
        return "speculative_eagle_topk must be 1 with speculative_algorithm NGRAM, which drafts chains; leave it out"
    return None
