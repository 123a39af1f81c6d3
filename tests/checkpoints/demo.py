"""Measures the accept lengths of a draft for the trained demo target on fixed prompts.

The engine runs in float64. The tests compare exactly, so the results must not depend on how a CPU rounds float32.
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
PROMPT_LENGTH = 160
MAX_NEW_TOKENS = 80


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """Return the last `PROMPT_LENGTH` tokens of the source text of each module in `MODULES`."""
    tokenizer = build_engine(EngineConfig(model_path=TARGET, context_length=128, num_threads=1)).tokenizer
    assert tokenizer is not None
    return tuple(tuple(tokenizer.encode(inspect.getsource(m))[-PROMPT_LENGTH:]) for m in MODULES)


def accept_lens(
    draft: str, modify_engine: Callable[[Engine], None] | None = None, topk: int = 1, **settings: object
) -> tuple[list[int], list[list[int]]]:
    """Generate text and return the accept lengths of all steps, and the tokens of each request.

    `modify_engine` may change the engine before the first step.
    """
    defaults = {
        "model_path": TARGET,
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": draft,
        "speculative_num_steps": 4,
        "speculative_mode": "fixed",
        "speculative_eagle_topk": topk,
        "context_length": 256,
        "max_running_requests": 8,
        "num_threads": 1,
        "mixed_prefill_size": 512,
        "dtype": "float64",
    }
    engine = build_engine(EngineConfig.from_kwargs(defaults | settings))
    if modify_engine is not None:
        modify_engine(engine)
    lens: list[int] = []
    original_step = engine.step

    def step():  # type: ignore[no-untyped-def]
        result = original_step()
        lens.extend(result.stats.accept_lens)
        return result

    engine.step = step  # type: ignore[method-assign]
    requests = [
        Request(f"r{i}", prompt, RequestParams(temperature=1.0, seed=i, max_tokens=MAX_NEW_TOKENS, ignore_eos=True))
        for i, prompt in enumerate(prompts())
    ]
    texts = complete(engine, requests)  # the patched `step` appends to `lens`
    return lens, texts


def mean(lens: list[int]) -> float:
    return sum(lens) / len(lens)


@cache
def reference_run(topk: int = 1) -> tuple[list[int], list[list[int]]]:
    """Return the accept lengths and the tokens with the unchanged demo draft. They are measured on the first call."""
    return accept_lens(DRAFT, topk=topk)
