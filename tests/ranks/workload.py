"""Seeded workloads: who asks what of which rank, and when. The same seed gives the same actions."""

from collections.abc import Sequence
from random import Random
from typing import Any

from tests.parity.automata import automaton
from tests.ranks.gang import Action

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
"""What a request may have besides; every fourth has nothing."""
SCORED: tuple[dict[str, Any], ...] = (
    {"prompt_logprobs": 2},
    {"prompt_logprobs": 0, "max_tokens": 0},
    {"prompt_logprobs": 20, "logprobs": 1},
    {},
    {**ADJUSTED[0], "prompt_logprobs": 1},
)
CONSTRAINED: tuple[dict[str, Any], ...] = (
    *({"grammar": automaton(seed)} for seed in range(4)),
    {"grammar": automaton(5), **ADJUSTED[2]},
    {},
)


def workload(
    seed: int,
    dp_size: int,
    requests: int,
    *,
    vocab: int,
    horizon: int,
    text: Sequence[int] = (),
    longest: int = 40,
    most_tokens: int = 16,
    idle: tuple[int, ...] = (),
    aborts: float = 0.0,
    skew: float = 3.0,
    besides: Sequence[dict[str, Any]] = ({},),
) -> list[Action]:
    """`requests` requests over `horizon` steps; ranks in `idle` get none, the others unevenly by `skew`.

    Prompts are cuts of `text`, or random ids where there is none. A share of them shares a prefix, a share of `aborts`
    is aborted some steps after it came, some may end early with an end token. Their parameters have those `besides` by
    turns.
    """
    random = Random(seed)
    ranks = [rank for rank in range(dp_size) if rank not in idle]
    weights = [skew**-i for i in range(len(ranks))]

    def piece(length: int) -> list[int]:
        if not text:
            return [random.randrange(vocab) for _ in range(length)]
        start = random.randrange(len(text) - length)
        return list(text[start : start + length])

    prefixes = [piece(longest // 2) for _ in range(3)]
    actions = []
    for number in range(requests):
        step, rank = random.randrange(horizon), random.choices(ranks, weights)[0]
        prompt = piece(random.randint(1, longest // 2))
        if random.random() < 0.4:
            prompt = random.choice(prefixes) + prompt
        params = random.choice(SAMPLINGS) | {
            "seed": random.getrandbits(40),
            "max_tokens": random.randint(1, most_tokens),
            "ignore_eos": random.random() < 0.8,
        }
        params |= besides[number % len(besides)]
        name = f"r{number}"
        actions.append(Action(step, rank, "submit", {"request_id": name, "prompt_token_ids": prompt, "params": params}))
        if random.random() < aborts:
            actions.append(Action(step + random.randint(0, 8), rank, "abort", {"request_id": name}))
    return sorted(actions, key=lambda action: action.step)
