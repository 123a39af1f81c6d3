"""Law 1 for every kind of KV pool, with trees of every size, all page sizes, cached prefixes and retraction.

The oracle is plain decoding of each request alone, with pools that keep every token. Unused slots of all pools are
poisoned before each step (`poison.py`).
"""

from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Any

import pytest

from cluster.config import EngineConfig
from cluster.config.resolved import ResolvedSettings
from cluster.config.tree_shape import tree_shape
from cluster.engine import build_engine
from cluster.request import Request
from tests.parity.drafts import correct
from tests.parity.harness import SAMPLING, RunResult, config_of, make_request, run, run_one_by_one, texts_of
from tests.parity.harness import scarce_config as scarce
from tests.parity.pairs import draft_of
from tests.support.families import VOCAB, family_checkpoint
from tests.support.pairwise import assert_covering, covering

KINDS = {
    "one KV head each": ("llama", "one head each, tied", "specforge"),
    "latents": ("deepseek_v3", "low-rank queries", "mla"),
    "windows": ("gpt_oss", "own layer types", "specforge"),
    "mostly windows": ("gemma3", "three local, one global", "specforge"),
    "all windows": ("mistral", "window of 9", "windows"),
    "two widths": ("mimo_v2", "one full KV head, two with a window", "specforge"),
    "other heads in windows": ("step3p7", "more heads in windows", "specforge"),
    "chunks": ("llama4", "chunks of 8, every fourth layer without rope", "specforge"),
    "borrowed": ("gemma4", "layers that borrow, with inputs of their own", "specforge"),
}
"""By kind: the family of the target, its config, and the draft."""
NODES = {8: 64, 16: 128}
"""The most nodes of a tree, by topk; by default what the engine chooses."""
AXES: list[Sequence[Any]] = [
    list(KINDS), (1, 2, 4, 8, 16), (1, 2, 3, 4, 5, 6), (1, 4, 16, 64), (1, 3, 8), ("hit", "miss"), ("plenty", "scarce")
]  # fmt: skip
FAST = covering(AXES)
SLOW = list(dict.fromkeys(row for seed in range(3) for row in covering(AXES, 3, seed) if row not in FAST))
FIRST_LENGTH = 24
"""How many tokens request 0 generates; request i generates i more."""


@cache
def requests() -> tuple[Request, ...]:
    """Return requests that share prefixes of several lengths, and are much longer than any window."""
    random = Random(5)
    base = [random.randrange(2, VOCAB) for _ in range(60)]
    prompts = [base[:count] + [random.randrange(2, VOCAB) for _ in range(more)]
               for count, more in ((60, 3), (41, 5), (0, 34), (40, 1), (16, 20), (3, 2), (60, 9), (60, 4))]  # fmt: skip
    return tuple(
        make_request(
            f"{i}", prompt, SAMPLING["0.8" if i % 2 else "greedy"], seed=i, max_tokens=FIRST_LENGTH + i, ignore_eos=True
        )
        for i, prompt in enumerate(prompts)
    )


@cache
def oracle(kind: str) -> RunResult:
    target = family_checkpoint(*KINDS[kind][:2]).folder
    config = config_of(target, disable_radix_cache=True, swa_full_tokens_ratio=1)
    return run_one_by_one(build_engine(config), requests())


def config(kind: str, topk: int, levels: int, page_size: int, prefix: str) -> EngineConfig:
    family, case, draft = KINDS[kind]
    all_nodes = 1 + topk + (levels - 1) * topk**2
    settings: dict[str, Any] = {"speculative_num_draft_tokens": min(NODES[topk], all_nodes)} if topk in NODES else {}
    settings |= {"page_size": page_size, "chunked_prefill_size": 7, "max_total_tokens": 4096}
    settings |= {"disable_radix_cache": prefix == "miss", "speculative_algorithm": None}
    return config_of(family_checkpoint(family, case).folder, draft_of(draft), topk, levels, **settings)


@pytest.mark.parametrize(
    ("kind", "topk", "levels", "page_size", "batch", "prefix", "memory"),
    [*FAST, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW)],
)
def test_no_kind_of_pool_changes_a_token(
    kind: str, topk: int, levels: int, page_size: int, batch: int, prefix: str, memory: str
) -> None:
    own_requests = requests()[:batch]
    engine_config = config(kind, topk, levels, page_size, prefix)
    if memory == "scarce":
        # With fewer window pages, or without room for a second tree, fewer requests would run at once, and none would
        # be retracted.
        engine_config = engine_config.model_copy(update={"swa_full_tokens_ratio": 0.95})
        tree_pages = ResolvedSettings.from_settings(engine_config).shape.window // page_size
        engine_config = scarce(engine_config, own_requests, 1 + tree_pages)
    engine = build_engine(engine_config)
    correct(engine, texts_of(own_requests, oracle(kind)), 0.7)
    for turn in range(2 if prefix == "hit" else 1):
        result = run(engine, own_requests)
        for name, completion in result.completions.items():
            assert completion == oracle(kind).completions[name], name
        cached = sum(output.cached_tokens for output in result.last.values())
        assert cached > 0 or not turn or memory == "scarce"
    if memory == "scarce" and batch == 8 and page_size <= 4 and engine._parts.cache.window is None:
        assert result.retracted > 0
    assert max(result.accept_lens) > 1 and tree_shape(engine_config).num_steps == levels


def test_rows_have_every_pair_or_triple_of_values() -> None:
    assert_covering(FAST, AXES)
    assert_covering([*FAST, *SLOW], AXES, strength=3)
    tokens = sum(
        (2 if prefix == "hit" else 1) * sum(FIRST_LENGTH + i for i in range(batch))
        for *_, batch, prefix, _ in [*FAST, *SLOW]
    )
    assert tokens > 100_000, tokens
