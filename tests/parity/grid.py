"""The grid of configurations on which law 1 is tested. The tests run coverings of the grid: cases in which all pairs of
values of any two axes occur, or all triples of values of any three axes.
"""

from dataclasses import asdict, dataclass
from functools import cache

from tests.parity.harness import (
    RunResult,
    config_of,
    grid_requests,
    plain_run,
    plain_texts,
    run,
    scarce_config,
    speculative_engine,
    tiny_pair,
)
from tests.parity.trees import adaptive, engine_with_random_trees
from tests.support.pairwise import covering

AXES: dict[str, tuple[object, ...]] = {
    "topk": (1, 2, 4, 8),
    "num_steps": (1, 2, 3, 5),
    "page_size": (1, 4, 16),
    "batch": (1, 3, 8),
    "chunk": (7, 64, -1),
    "num_aux": (1, 3, 5),
    "sampling": ("greedy", "0.8", "filtered"),
    "draft": ("model", "corrected", "oracle"),
    "memory": ("ample", "scarce", "cached", "no radix"),
    "kv_cache_dtype": ("auto", "fp8_e4m3"),
    "trees": ("fixed", "adaptive"),
}


@dataclass(frozen=True)
class Case:
    """One configuration of the grid. `batch` is the number of requests.

    `memory` is one of: ample; scarce (one page more than the longest request needs, so that other requests are
    retracted); cached (every prompt is submitted twice); no radix (no prefix cache). With adaptive `trees` each step
    has a random tree of the tiers.
    """

    topk: int
    num_steps: int
    page_size: int
    batch: int
    chunk: int
    num_aux: int
    sampling: str
    draft: str
    memory: str
    kv_cache_dtype: str = "auto"
    trees: str = "fixed"

    def __str__(self) -> str:
        return "-".join(str(v) for v in asdict(self).values())


@dataclass
class CaseResult:
    """The result of one case. The tests add these results up."""

    case: Case
    mismatches: list[str]
    retracted: int
    cached_tokens: int
    accept_lens: set[int]


@cache
def cases(strength: int) -> list[Case]:
    """Return cases in which all combinations of values of any `strength` axes occur."""
    return [Case(*row) for row in covering(list(AXES.values()), strength)]


def check(case: Case) -> CaseResult:
    """Run one case and compare the tokens and finish reason of every request with plain decoding."""
    requests = grid_requests(case.sampling, case.batch)
    settings: dict[str, object] = {
        "page_size": case.page_size,
        "chunked_prefill_size": case.chunk,
        "disable_radix_cache": case.memory == "no radix",
        "kv_cache_dtype": case.kv_cache_dtype,
    }
    target, draft = tiny_pair(case.num_aux)
    config = config_of(target, draft, case.topk, case.num_steps, **settings)
    if case.trees == "adaptive":
        config = adaptive(config)
    if case.memory == "scarce":
        config = scarce_config(config, requests)
    texts = plain_texts(case.sampling, case.kv_cache_dtype)
    if case.trees == "adaptive":
        engine = engine_with_random_trees(lambda: speculative_engine(config, case.draft, texts), seed=1)
    else:
        engine = speculative_engine(config, case.draft, texts)
    result = run(engine, requests)
    mismatches = compare(case, result)
    retracted, accept_lens, cached_tokens = result.retracted, set(result.accept_lens), 0
    if case.memory == "cached":
        second_result = run(engine, requests)
        mismatches += compare(case, second_result)
        accept_lens |= set(second_result.accept_lens)
        cached_tokens = sum(output.cached_tokens for output in second_result.last.values())
        assert cached_tokens > 0, f"{case}: no token of the prompts submitted again was cached"
    return CaseResult(case, mismatches, retracted, cached_tokens, accept_lens)


def compare(case: Case, result: RunResult) -> list[str]:
    """Return one message for each request of `result` that differs from plain decoding."""
    plain_completions = plain_run(case.sampling, case.kv_cache_dtype).completions
    return [
        f"{case} {name}: {completion} instead of {plain_completions[name]}"
        for name, completion in result.completions.items()
        if completion != plain_completions[name]
    ]
