"""Seeded workloads: which rank gets which request before which step. The same seed gives the same actions."""

from collections.abc import Sequence
from random import Random
from typing import Any

from tests.distributed.gang import Action
from tests.parity.automata import automaton

SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 12, "top_p": 0.9},
)

ADJUSTED: tuple[dict[str, Any], ...] = (
    {"adjustments": {"presence_penalty": 1.0, "frequency_penalty": 0.4, "repetition_penalty": 1.3}},
    {"adjustments": {"allowed_token_ids": [1, 2, 4, 8, 11, 15], "min_tokens": 5}},
    {"adjustments": {"bias": [[3, 4.0], [7, -100.0]], "bad_words_token_ids": [[5], [6, 8], [9, 9, 9], [3, 3]]}},
    {},
)
"""Extra parameters that adjust logits; one of the four is empty. Such a list is an argument of `workload`."""
SCORED: tuple[dict[str, Any], ...] = (
    {"prompt_logprobs": 2},
    {"prompt_logprobs": 0, "max_tokens": 0},
    {"prompt_logprobs": 20, "logprobs": 1},
    {},
    {**ADJUSTED[0], "prompt_logprobs": 1},
)
"""Extra parameters that ask for the log-probabilities of prompts; one of the five is empty."""
CONSTRAINED: tuple[dict[str, Any], ...] = (
    *({"grammar": automaton(seed)} for seed in range(4)),
    {"grammar": automaton(5), **ADJUSTED[2]},
    {},
)
"""Extra parameters that constrain the tokens by a grammar; one of the six is empty."""


def workload(
    seed: int,
    dp_size: int,
    request_count: int,
    *,
    vocab: int,
    horizon: int,
    source_tokens: Sequence[int] = (),
    max_prompt_tokens: int = 40,
    max_new_tokens: int = 16,
    idle_ranks: tuple[int, ...] = (),
    abort_share: float = 0.0,
    skew: float = 3.0,
    extra_params: Sequence[dict[str, Any]] = ({},),
) -> list[Action]:
    """The actions of `request_count` requests, submitted before random steps below `horizon`, sorted by step.

    Ranks in `idle_ranks` get no requests; each other rank is `skew` times less likely to get one than the rank before.
    A prompt is a random part of `source_tokens`, or random ids if there are none; 40 % of the prompts begin with one of
    three shared prefixes. The share `abort_share` of the requests is aborted 0 to 8 steps after its submission. 20 % of
    the requests may end early with an end token. Requests get the parameters of `extra_params` in turn, in addition.
    """
    random = Random(seed)
    active_ranks = [rank for rank in range(dp_size) if rank not in idle_ranks]
    weights = [skew**-i for i in range(len(active_ranks))]

    def random_prompt_part(length: int) -> list[int]:
        if not source_tokens:
            return [random.randrange(vocab) for _ in range(length)]
        start = random.randrange(len(source_tokens) - length)
        return list(source_tokens[start : start + length])

    prefixes = [random_prompt_part(max_prompt_tokens // 2) for _ in range(3)]
    actions = []
    for number in range(request_count):
        step, rank = random.randrange(horizon), random.choices(active_ranks, weights)[0]
        prompt = random_prompt_part(random.randint(1, max_prompt_tokens // 2))
        if random.random() < 0.4:
            prompt = random.choice(prefixes) + prompt
        params = random.choice(SAMPLINGS) | {
            "seed": random.getrandbits(40),
            "max_tokens": random.randint(1, max_new_tokens),
            "ignore_eos": random.random() < 0.8,
        }
        params |= extra_params[number % len(extra_params)]
        request_id = f"r{number}"
        actions.append(
            Action(step, rank, "submit", {"request_id": request_id, "prompt_token_ids": prompt, "params": params})
        )
        if random.random() < abort_share:
            actions.append(Action(step + random.randint(0, 8), rank, "abort", {"request_id": request_id}))
    return sorted(actions, key=lambda action: action.step)
