"""The fields that /v1/responses ignores or refuses; see `cluster.api.core.fields.FieldTable`."""

from typing import Any

from cluster.api.core.fields import FieldTable
from cluster.api.core.translated import build_field_table

# These fields tune the prompt cache, or built-in tools, which this server leaves out. They cannot change the answer.
HARMLESS = frozenset({"max_tool_calls", "prompt_cache_retention", "image"})

# Refused fields, each with its neutral values, which mean "off" and are accepted. null is accepted for every field.
REFUSED: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "store": (False,),
    "background": (False,),
    "prompt": (),
    "truncation": ("disabled",),
    "context_management": ([],),
    "moderation": (),
    "access_programs": (),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
    "service_tier": ("auto", "default"),
    "enable_response_messages": (False,),
    "previous_input_messages": ([],),
}
REMEDIES: dict[str, str] = {
    "previous_response_id": "nothing is stored here: send the earlier input and output as input",
    "conversation": "nothing is stored here: send the earlier items of the conversation as input",
    "store": "nothing is stored here: leave it out or send false, and send earlier items as input",
    "background": "an answer is made while its client waits: leave it out, and use stream for a long one",
    "prompt": "no prompts are stored here: send its text as instructions and input",
    "truncation": "no item is ever dropped: leave items out yourself, and it, or send 'disabled'",
    "context_management": "nothing is compacted here: leave it out, and leave items out yourself",
    "moderation": "no moderation is served here: leave it out",
    "access_programs": "it chooses among OpenAI's programs: leave it out",
    "prompt_cache_options": "prefixes are cached by themselves: leave it out",
    "service_tier": "all requests are served alike: leave it out or send 'auto'",
    "enable_response_messages": "the prompt as messages is not answered: leave it out",
    "previous_input_messages": "nothing is stored here: send the earlier items as input",
    # Fields of the other endpoints.
    "messages": "this endpoint takes input; use that, or /v1/chat/completions",
    "max_tokens": "use max_output_tokens",
    "max_completion_tokens": "use max_output_tokens",
    "response_format": "use text.format",
    "verbosity": "use text.verbosity",
    "reasoning_effort": "use reasoning.effort",
    "logprobs": "use include with message.output_text.logprobs, and top_logprobs",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "n": "send several requests",
}
TABLE: FieldTable = build_field_table(HARMLESS, REFUSED, REMEDIES)
