"""Checks a draft when it is loaded, against the sample output in its own folder.

The sample runs through a real step, on all ranks of the gang. So the check covers the target with its aux hidden
states, and the draft's fc, norms and attention.
"""

import logging
import math

import torch

from cluster.arch.draft.sample import SAMPLE_FILE
from cluster.arch.resolve import ResolvedConfig
from cluster.batch import PromptChunk, RowSampling, StepInput
from cluster.config import ConfigError
from cluster.engine.lockstep import Lockstep
from cluster.kv.cache import KVCache
from cluster.spec.inputs import EagleDraftInput

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.05}
"""Tolerances: the relative error of the hidden state, and the error of the most likely token's probability. Rounding
shifts the demo draft's hidden state by 5e-7 in float32, 0.001 in float16 and 0.007 in bfloat16. A wrong rope layout
shifts it by 0.09, aux layers off by one by 0.21 and 0.26, other misreadings by 0.9 and more."""
FP8_CACHE = 0.05
"""The tolerance with KV caches in FP8, in any dtype; the demo draft's hidden state shifts by 0.02."""
HALF_PRECISION_TOLERANCE = (
    0.01  # a larger tolerance means half precision or an FP8 cache, where the most likely token may change
)


def take_sample(tokens: tuple[int, ...], lockstep: Lockstep, cache: KVCache) -> EagleDraftInput | None:
    """Run `tokens` as the prompt of one request, and return the output of the draft's extend phase, with one row.
    Return None on a follower. All ranks of the gang must call this.
    """
    if not lockstep.mesh.is_leader:
        lockstep.read(lockstep.run(StepInput(), 0, lockstep.any_tier))
        return None
    lease = cache.open(tokens, len(tokens) + lockstep.tree_shapes[-1].window)
    assert lease is not None, "an empty cache holds a request"
    cache.cover(lease, len(tokens))
    chunk = PromptChunk(lease.row, 0, len(tokens), True, tokens)
    greedy = RowSampling(lease.row, 0.0, 0, 1.0, 0.0, 0)
    table = cache.table
    step_input = StepInput(
        chunks=(chunk,),
        samplings=(greedy,),
        writes=table.unsent_writes,
        window_writes=table.unsent_window_writes,
    )
    lockstep.read(lockstep.run(step_input, 1, lockstep.any_tier))
    table.mark_sent()
    cache.close(lease, tokens, 0)
    row = torch.tensor([lease.row], device=lockstep.step.draft_inputs.bonus.device)
    return lockstep.step.draft_inputs.take(row)


def check_sample(resolved: ResolvedConfig, lockstep: Lockstep, cache: KVCache) -> None:
    """Raise if a draft does not reproduce its sample. Skip the check if there is no sample, or if the sample exceeds
    the context length or the cache.

    With a token map from a file the draft has fewer tokens and other probabilities, so only hidden states are compared.

    Raises:
        ConfigError: the message says how far off the draft is, and what may be wrong.
    """
    sample, folder = resolved.sample, resolved.settings.speculative_draft_model_path
    if sample is None:
        return
    token_count, has_token_map = len(sample.tokens), resolved.settings.speculative_token_map is not None
    if (
        token_count > resolved.context_length
        or token_count + resolved.shape.window > cache.total_pages * cache.page_size
    ):
        logger.warning("%s of %r is not checked: its %d tokens do not fit", SAMPLE_FILE, folder, token_count)
        return
    draft_output = take_sample(sample.tokens, lockstep, cache)
    if draft_output is None:
        return
    expected_hidden, tolerance = torch.tensor(sample.hidden, dtype=torch.float64), TOLERANCE[draft_output.hidden.dtype]
    if resolved.fp8_cache:
        tolerance = max(tolerance, FP8_CACHE)
    hidden_error = float((draft_output.hidden[0].double().cpu() - expected_hidden).norm() / expected_hidden.norm())
    probability_error = 0.0
    if not has_token_map:
        # In half precision or with an FP8 cache, two tokens that are equally likely up to rounding may swap between
        # machines. Then the sample's token may be missing from the proposals, and the best proposal is compared.
        proposals = draft_output.topk_index[0].tolist()
        index = (
            proposals.index(sample.token)
            if sample.token in proposals
            else 0
            if tolerance > HALF_PRECISION_TOLERANCE
            else None
        )
        actual_probability = 0.0 if index is None else math.exp(draft_output.topk_logprobs[0, index])
        probability_error = abs(actual_probability - math.exp(sample.logprob))
    if not (hidden_error <= tolerance and probability_error <= tolerance):
        raise ConfigError(
            f"draft {folder!r} does not reproduce its {SAMPLE_FILE}: its hidden state is off by {hidden_error:.3g}, "
            f"its most likely token's probability by {probability_error:.3g} (at most {tolerance:g}). Its config or "
            "speculative_draft_overrides describe another draft, or the target is another one. Correct them, or remove "
            "the file"
        )
