"""Speed side by side in one process: this engine and `transformers`, in turns, in float32 and in bfloat16."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.real.answers import BATCHES, engine_of, say, tokenizer_of
from benchmarks.real.kept import Kept
from cluster.bench.reference import Transformers
from cluster.bench.report import median, ratio
from cluster.bench.runs import EngineRun, run_greedily

DTYPES = ("float32", "bfloat16")
PROMPT_TOKENS, NEW_TOKENS = 64, 32
LONG_TOKENS = 8192

Contenders = dict[str, Callable[[list[list[int]], int], EngineRun]]


def source_tokens(folder: str, count: int) -> list[int]:
    """Ids of ordinary source code: the standard library's argparse, as often as needed."""
    ids = list(tokenizer_of(folder)(Path(argparse.__file__).read_text(encoding="utf-8"))["input_ids"])
    return (ids * (count // len(ids) + 1))[:count]


def measured(folder: str, repeats: int, kept: Kept) -> dict[str, Any]:
    """Tokens per second of whole runs at each batch, and seconds to the first token after `LONG_TOKENS`: medians over
    the repeats, and ratios within a repeat. Nobody reuses a prefix, so each repeat does all the work. JSON-ready.
    """
    rows, text = [], source_tokens(folder, LONG_TOKENS)
    for dtype in DTYPES:
        engine, theirs = engine_of(folder, dtype, max(BATCHES), reuse=False), Transformers(folder, dtype)
        contenders: Contenders = {"aerie": partial(run_greedily, engine), "transformers": theirs.run}
        for batch in BATCHES:
            say(f"speed: {dtype}, batch {batch}")
            prompts = [text[at * PROMPT_TOKENS : (at + 1) * PROMPT_TOKENS] for at in range(batch)]
            speeds = kept.get(
                f"{dtype}, {batch}", partial(turns, contenders, prompts, NEW_TOKENS, repeats, "tokens_per_second")
            )
            rows.append({"dtype": dtype, "what": f"tokens/s, batch {batch}", **figures(speeds, more_is_better=True)})
        say(f"speed: {dtype}, {LONG_TOKENS} tokens")
        seconds = kept.get(f"{dtype}, first", partial(turns, contenders, [text], 1, repeats, "seconds"))
        what = f"first token after {LONG_TOKENS}, s"
        rows.append({"dtype": dtype, "what": what, **figures(seconds, more_is_better=False)})
    return {"rows": rows, "threads": torch.get_num_threads(), "repeats": repeats}


def turns(
    contenders: Contenders, prompts: list[list[int]], new_tokens: int, repeats: int, figure: str
) -> dict[str, list[float]]:
    """A figure (a field of `EngineRun`) of every contender's run in each repeat. They take turns, in reverse order
    every other time; a first, shorter turn warms all of them up.
    """
    for run in contenders.values():
        run([prompt[:PROMPT_TOKENS] for prompt in prompts], min(4, new_tokens))
    found: dict[str, list[float]] = {who: [] for who in contenders}
    for repeat in range(repeats):
        for who in list(contenders)[:: -1 if repeat % 2 else 1]:
            found[who].append(getattr(contenders[who](prompts, new_tokens), figure))
    return found


def figures(values: dict[str, list[float]], more_is_better: bool) -> dict[str, float]:
    """The medians of both contenders, and how many times as fast Aerie is: the median of the ratios of each repeat."""
    pairs = list(zip(values["aerie"], values["transformers"], strict=True))
    ratios = [ratio(ours, theirs) if more_is_better else ratio(theirs, ours) for ours, theirs in pairs]
    return {who: median(of) for who, of in values.items()} | {"times": median(ratios)}
