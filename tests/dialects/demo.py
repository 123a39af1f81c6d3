"""The trained demo pair as an instrument: the accept lengths of a draft on fixed prompts.

In float64: what is compared exactly must not hang on how one CPU rounds float32.
"""

import bisect
import csv
import inspect
import queue
import shlex
import stat
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path

from cluster.config import EngineConfig
from cluster.engine import Engine, build_engine
from cluster.offline.stepping import complete
from cluster.request import Request, RequestParams

ROOT = Path(__file__).resolve().parents[2]
TARGET, DRAFT = str(ROOT / "models/demo/target"), str(ROOT / "models/demo/draft")
MODULES = (queue, shlex, textwrap, csv, bisect, stat)
PROMPT = 160
NEW = 80


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    tokenizer = build_engine(EngineConfig(model_path=TARGET, context_length=128, num_threads=1)).tokenizer
    assert tokenizer is not None
    return tuple(tuple(tokenizer.encode(inspect.getsource(m))[-PROMPT:]) for m in MODULES)


def accept_lens(
    draft: str, change: Callable[[Engine], None] | None = None, topk: int = 1, **settings: object
) -> tuple[list[int], list[list[int]]]:
    """Accept length of every step, and the texts; `change` may spoil the engine first."""
    given = {
        "model_path": TARGET,
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": draft,
        "speculative_num_steps": 4,
        "speculative_eagle_topk": topk,
        "context_length": 256,
        "max_running_requests": 8,
        "num_threads": 1,
        "mixed_prefill_size": 512,
        "dtype": "float64",
    }
    engine = build_engine(EngineConfig.from_kwargs(given | settings))
    if change is not None:
        change(engine)
    lens: list[int] = []
    true = engine.step

    def step():  # type: ignore[no-untyped-def]
        result = true()
        lens.extend(result.stats.accept_lens)
        return result

    engine.step = step  # type: ignore[method-assign]
    requests = [
        Request(f"r{i}", prompt, RequestParams(temperature=1.0, seed=i, max_tokens=NEW, ignore_eos=True))
        for i, prompt in enumerate(prompts())
    ]
    texts = complete(engine, requests)  # fills lens
    return lens, texts


def mean(lens: list[int]) -> float:
    return sum(lens) / len(lens)


@cache
def right(topk: int = 1) -> tuple[list[int], list[list[int]]]:
    return accept_lens(DRAFT, topk=topk)
