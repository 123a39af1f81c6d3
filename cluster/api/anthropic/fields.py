"""The fields that /v1/messages ignores or refuses; see `cluster.api.core.fields.FieldTable`."""

from typing import Any

from cluster.api.core.fields import FieldTable
from cluster.api.core.translated import build_field_table

# These fields label, meter or route a call, or tune the prompt cache, so they cannot change the answer.
HARMLESS = frozenset(
    {"metadata", "cache_control", "inference_geo", "user_profile_id", "workspace_id", "diagnostics", "billing_policy"}
)

# Refused fields, each with its neutral values, which mean "off" and are accepted. null is accepted for every field.
REFUSED: dict[str, tuple[Any, ...]] = {
    "service_tier": ("auto", "standard_only"),
    "container": (),
    "mcp_servers": ([],),
    "context_management": ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "compaction": (),
    "fallbacks": ([],),
    "fallback_credit_token": (),
    "speed": ("standard",),
    "thread": (),
    "betas": ([],),
    "output_format": (),
}
REMEDIES: dict[str, str] = {
    "service_tier": "all requests are served alike: leave it out or send 'auto'",
    "container": "no code runs here: leave it out",
    "mcp_servers": "no server is asked for tools: send them as tools, and run them in the client",
    "context_management": "nothing is dropped or compacted here: leave it out, and leave messages out yourself",
    "compaction": "nothing is compacted here: leave it out, and leave messages out yourself",
    "fallbacks": "one model is served: leave it out",
    "fallback_credit_token": "one model is served: leave it out",
    "speed": "all requests are served alike: leave it out or send 'standard'",
    "thread": "nothing is stored here: send the earlier messages",
    "betas": "send it as the header anthropic-beta",
    "output_format": "use output_config.format",
    # Fields of the other endpoints.
    "stop": "use stop_sequences",
    "max_completion_tokens": "use max_tokens",
    "max_output_tokens": "use max_tokens",
    "response_format": "use output_config.format",
    "reasoning_effort": "use output_config.effort",
    "parallel_tool_calls": "use tool_choice.disable_parallel_tool_use",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "n": "send several requests",
    "logprobs": "use /v1/chat/completions",
    "top_logprobs": "use /v1/chat/completions",
}
TABLE: FieldTable = build_field_table(HARMLESS, REFUSED, REMEDIES)
COUNT_TABLE: FieldTable = build_field_table(HARMLESS | {"max_tokens", "stream", "stop_sequences"}, REFUSED, REMEDIES)
"""The table of /v1/messages/count_tokens, which ignores `max_tokens`, `stream` and `stop_sequences` too."""
