"""N-gram speculation with a real model against plain decoding: answers that copy a text, and texts without repeats.

Each contender decodes greedily in bfloat16, and contenders take turns. Only steps in which all requests decode are
timed. Copied texts are source code
and prose that the model is asked to repeat; the others are the prompts of `prompts.txt` that ask for no repetition.
"""

import colorsys
import fnmatch
import inspect
import shlex
import string
import textwrap
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.real.answers import log_progress, tokenizer_of
from benchmarks.real.kept import ResultCache
from benchmarks.real.prompts import Prompt
from cluster.bench.report import median, ratio
from cluster.bench.steady_runs import run_steadily
from cluster.config import EngineConfig
from cluster.engine import Engine, build_engine

DTYPE, NEW_TOKENS, BATCHES, OTHERS = "bfloat16", 96, (1, 8), 8
COPIED = (textwrap.shorten, textwrap.dedent, string.capwords, shlex.quote, fnmatch.filter, colorsys.rgb_to_hsv)
COPIED_TEXTS = (
    "The museum opens at nine in the morning from Tuesday to Sunday. It is closed on Mondays. Tickets cost twelve "
    "euros for adults and six euros for children under fourteen. The garden behind the main building is free.",
    "Water is pumped from the river into a basin, where sand and mud sink to the ground. From there it flows through "
    "three layers of gravel. Ozone removes the remaining germs. At the end the water is stored in a tank on the hill.",
)
MAX_CHARACTERS = 700
GOAL_COPIED, GOAL_OTHER = 2.0, 0.99


def contenders(folder: str, requests: int) -> dict[str, Engine]:
    """Return the engines by name: plain decoding, n-gram speculation with fixed chains, and with adaptive ones."""
    settings: dict[str, Any] = {"model_path": folder, "dtype": DTYPE, "max_running_requests": requests}
    settings |= {"num_threads": torch.get_num_threads(), "disable_radix_cache": True, "context_length": 2048}
    ngram = settings | {"speculative_algorithm": "NGRAM"}
    configs = {"plain": settings}
    configs |= {mode: ngram | {"speculative_mode": mode} for mode in ("fixed", "adaptive")}
    return {name: build_engine(EngineConfig.from_kwargs(config)) for name, config in configs.items()}


def copied_prompts() -> list[Prompt]:
    """Return prompts whose answers copy a text of the prompt."""
    codes = [f"```python\n{inspect.getsource(code)[:MAX_CHARACTERS]}\n```" for code in COPIED]
    return [
        Prompt(f"copy {i}", messages=(("user", f"Repeat this exactly as it is, word for word:\n\n{text}"),))
        for i, text in enumerate([*codes, *COPIED_TEXTS])
    ]


def measure_ngram(folder: str, prompts: Sequence[Prompt], repeats: int, result_cache: ResultCache) -> dict[str, Any]:
    """Return tokens per second of each contender, and ratios to plain decoding within a repeat, by kind and batch."""
    tokenizer, engines = tokenizer_of(folder), contenders(folder, max(BATCHES))
    others = [prompt for prompt in prompts if not prompt.name.startswith("repeat") and prompt.text][:OTHERS]
    kinds = {"copied": copied_prompts(), "other": others}
    rows = []
    for kind, texts in kinds.items():
        ids = [prompt.token_ids(tokenizer)[-512:] for prompt in texts]
        for batch in BATCHES:
            log_progress(f"n-gram: {kind}, batch {batch}")

            def speeds(batch: int = batch, ids: list[list[int]] = ids) -> dict[str, list[float]]:
                result: dict[str, list[float]] = {name: [] for name in engines}
                for repeat in range(-1, repeats):  # the first repeat warms up
                    for name in list(engines)[:: -1 if repeat % 2 else 1]:
                        parts = [ids[i : i + batch] for i in range(0, len(ids), batch)]
                        runs = [run_steadily(engines[name], part, 0.0, NEW_TOKENS) for part in parts]
                        tokens, seconds = sum(run.steady_tokens for run in runs), sum(run.seconds for run in runs)
                        if repeat >= 0:
                            result[name].append(tokens / seconds)
                return result

            by_name = result_cache.get_or_make(f"{kind}, {batch}", speeds)
            row: dict[str, Any] = {"kind": kind, "batch": batch}
            for name, values in by_name.items():
                row[name] = median(values)
                row[f"{name} times"] = median([ratio(a, b) for a, b in zip(values, by_name["plain"], strict=True)])
            rows.append(row)
            log_progress(f"n-gram: {row}")
    return {"rows": rows, "threads": torch.get_num_threads(), "repeats": repeats}
