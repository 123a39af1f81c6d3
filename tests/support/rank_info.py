"""A `RankInfo` of a rank without models, for tests of the code that reads it."""

from typing import Any

from cluster.config import EngineConfig
from cluster.status import RankInfo


def rank_info(page_size: int = 1, kv_pages: int = 1 << 24, **overrides: Any) -> RankInfo:
    """Return the info of the only rank of a plain decoding engine with a very large KV cache.

    `overrides` replace single fields.
    """
    defaults: dict[str, Any] = {
        "config": EngineConfig(model_path="none"),
        "rank": 0,
        "dp_rank": 0,
        "dtype": "float32",
        "device": "cpu",
        "context_length": 4096,
        "vocab_size": 1_000_000,
        "eos_token_ids": (1,),
        "attention_backend": "torch",
        "kernels": "torch",
        "attention": (),
        "quantised": (),
        "experts": (),
        "steps_ahead": 0,
        "captured": None,
        "num_threads": 1,
        "speculative_mode": "fixed",
        "speculative_num_steps": 0,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 1,
        "speculative_lookup_tokens": 0,
        "speculative_batch_tiers": {},
        "draft": None,
        "page_size": page_size,
        "kv_pages": kv_pages,
        "kv_tokens": page_size * kv_pages,
        "kv_cache_dtype": "float32",
        "kv_bytes_per_token": 256,
        "kv_window_bytes_per_token": 0,
        "kv_window_tokens": 0,
        "kv_window_request_tokens": 0,
        "kv_gb": 0.0,
        "kv_sized_by": "max_total_tokens",
        "max_request_tokens": 4096,
        "step_costs": None,
    }
    return RankInfo(**{**defaults, **overrides})
