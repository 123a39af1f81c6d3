"""Compare the speed of this engine and of `transformers` in one process, in float32 and bfloat16; they take turns."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.real.answers import BATCHES, log_progress, make_engine, tokenizer_of
from benchmarks.real.kept import ResultCache
from cluster.bench.reference import Transformers
from cluster.bench.report import median, ratio
from cluster.bench.runs import EngineRun, run_batch_greedily

DTYPES = ("float32", "bfloat16")
PROMPT_TOKENS, NEW_TOKENS = 64, 32
LONG_TOKENS = 8192

Contenders = dict[str, Callable[[list[list[int]], int], EngineRun]]


def source_tokens(folder: str, count: int) -> list[int]:
    """Return `count` token ids of ordinary source code: the standard library's argparse, repeated if needed."""
    ids = list(tokenizer_of(folder)(Path(argparse.__file__).read_text(encoding="utf-8"))["input_ids"])
    return (ids * (count // len(ids) + 1))[:count]


def measure_speed(folder: str, repeats: int, result_cache: ResultCache) -> dict[str, Any]:
    """Return the tokens per second at each batch size and the seconds to the first token after `LONG_TOKENS` tokens,
    JSON-ready: medians over the repeats, and ratios within a repeat. There is no prefix cache, so each repeat does all
    the work.
    """
    rows, text_ids = [], source_tokens(folder, LONG_TOKENS)
    for dtype in DTYPES:
        engine, reference = make_engine(folder, dtype, max(BATCHES), reuse=False), Transformers(folder, dtype)
        contenders: Contenders = {"aerie": partial(run_batch_greedily, engine), "transformers": reference.run}
        for batch in BATCHES:
            log_progress(f"speed: {dtype}, batch {batch}")
            prompts = [text_ids[index * PROMPT_TOKENS : (index + 1) * PROMPT_TOKENS] for index in range(batch)]
            speeds = result_cache.get_or_make(
                f"{dtype}, {batch}", partial(run_turns, contenders, prompts, NEW_TOKENS, repeats, "tokens_per_second")
            )
            rows.append({"dtype": dtype, "what": f"tokens/s, batch {batch}", **figures(speeds, more_is_better=True)})
        log_progress(f"speed: {dtype}, {LONG_TOKENS} tokens")
        seconds = result_cache.get_or_make(
            f"{dtype}, first", partial(run_turns, contenders, [text_ids], 1, repeats, "seconds")
        )
        what = f"first token after {LONG_TOKENS}, s"
        rows.append({"dtype": dtype, "what": what, **figures(seconds, more_is_better=False)})
    return {"rows": rows, "threads": torch.get_num_threads(), "repeats": repeats}


def run_turns(
    contenders: Contenders, prompts: list[list[int]], new_tokens: int, repeats: int, figure: str
) -> dict[str, list[float]]:
    """Return, for each contender, one number per repeat: the attribute of its `EngineRun` that `figure` names. Each
    contender first runs a shorter warm-up. Contenders take turns, in reverse order in every other repeat.
    """
    for run in contenders.values():
        run([prompt[:PROMPT_TOKENS] for prompt in prompts], min(4, new_tokens))
    figures_by_contender: dict[str, list[float]] = {contender: [] for contender in contenders}
    for repeat in range(repeats):
        for contender in list(contenders)[:: -1 if repeat % 2 else 1]:
            figures_by_contender[contender].append(getattr(contenders[contender](prompts, new_tokens), figure))
    return figures_by_contender


def figures(values: dict[str, list[float]], more_is_better: bool) -> dict[str, float]:
    """Return the medians of both contenders, and `times`, the median speedup of Aerie within a repeat."""
    pairs = list(zip(values["aerie"], values["transformers"], strict=True))
    ratios = [ratio(ours, theirs) if more_is_better else ratio(theirs, ours) for ours, theirs in pairs]
    return {contender: median(contender_values) for contender, contender_values in values.items()} | {
        "times": median(ratios)
    }
