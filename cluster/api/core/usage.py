"""Token usage and speculation metrics of a call, in the fields that clients and benchmark tools read."""

from collections.abc import Sequence
from typing import Any

from cluster.api.core.choices import OutputSequence
from cluster.request import SpeculationCounts


def usage_so_far(choice: OutputSequence) -> dict[str, int]:
    """Return the usage of one sequence so far, for `continuous_usage_stats`."""
    return {
        "prompt_tokens": choice.prompt_tokens,
        "completion_tokens": choice.tokens,
        "total_tokens": choice.prompt_tokens + choice.tokens,
    }


def usage(choices: Sequence[OutputSequence]) -> dict[str, Any]:
    """Return the usage of a whole call in tokens. A prompt with several choices counts once.

    Completion tokens include a final stop token. Prediction tokens are the draft's: all verified nodes except roots,
    accepted or not.
    """
    first_of_prompt = {choice.prompt_index: choice for choice in reversed(choices)}.values()
    prompt = sum(choice.prompt_tokens for choice in first_of_prompt)
    completion = sum(choice.tokens for choice in choices)
    counts = [choice.speculation for choice in choices if choice.speculation]
    accepted = sum(count.accepted_tokens for count in counts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in first_of_prompt)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(choice.reasoning_tokens for choice in choices),
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(count.drafted for count in counts) - accepted,
        },
    }


def speculation_metrics(choices: Sequence[OutputSequence]) -> dict[str, Any] | None:
    """Return `metrics` in vLLM's form, which AIPerf reads, or None if there was no speculation or the call has several
    sequences.

    `acceptance_histogram[j]` counts steps that accepted j draft tokens; its length is `num_spec_tokens + 1`.
    """
    counts = choices[0].speculation if len(choices) == 1 else None
    return {"speculative_decoding": _speculative_decoding(counts)} if counts else None


def _speculative_decoding(counts: SpeculationCounts) -> dict[str, Any]:
    histogram = list(counts.accepted) or [0]
    return {
        "mean_acceptance_length": counts.accept_length,
        "draft_acceptance_rate": counts.accepted_tokens / counts.drafted if counts.drafted else 0.0,
        "acceptance_histogram": histogram,
        "num_spec_steps": counts.steps,
        "num_accepted_draft_tokens": counts.accepted_tokens,
        "num_draft_tokens": counts.drafted,
        "num_spec_tokens": len(histogram) - 1,
    }
