"""Other names of settings, most of them vLLM's, which `EngineConfig` also accepts, mapped to the names used here."""

from typing import Any

EXPERT_PARALLEL_ALIAS = "enable_expert_parallel"
"""The only name in `ALIASES` whose values differ as well: true means `ep_size` = number of ranks, false means 1."""
ALIASES: dict[str, str] = {
    "model": "model_path",
    "tokenizer": "tokenizer_path",
    "tensor_parallel_size": "tp_size",
    "data_parallel_size": "attn_dp_size",
    EXPERT_PARALLEL_ALIAS: "ep_size",
    "dp_size": "attn_dp_size",
    "block_size": "page_size",
    "max_model_len": "context_length",
    "max_num_seqs": "max_running_requests",
    "max_num_batched_tokens": "chunked_prefill_size",
    "seed": "random_seed",
    "gpu_memory_utilization": "mem_fraction_static",
    "cuda_graph_bs": "capture_sizes",
    "cudagraph_capture_sizes": "capture_sizes",
    "speculative_draft_model": "speculative_draft_model_path",
}
SPECULATIVE_CONFIG: dict[str, str] = {
    "method": "speculative_algorithm",
    "model": "speculative_draft_model_path",
    "num_speculative_tokens": "speculative_num_steps",
    "draft_parallel": "speculative_draft_parallel",
    "draft_overrides": "speculative_draft_overrides",
    "token_map": "speculative_token_map",
}


def convert_speculative_value(key: str, value: Any) -> Any:
    """Return the value of the key `key` of `speculative_config` as `EngineConfig` takes it. A `method` is returned in
    upper case, and vLLM's methods that end in `mtp` become NEXTN. Values of other keys are returned unchanged.
    """
    if key != "method" or not isinstance(value, str):
        return value
    return "NEXTN" if value.lower().endswith("mtp") else value.upper()
