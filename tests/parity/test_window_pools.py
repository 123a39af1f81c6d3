"""Law 1 with window pools: layers with a sliding window keep only the last tokens, and every text stays the same.

The oracle is plain decoding of each request alone, with pools that keep every token. Unused slots of all pools are
poisoned before each step (`poison.py`).
"""

from collections.abc import Sequence
from functools import cache
from itertools import product
from random import Random

import pytest

from cluster.engine import Engine, StepResult, build_engine
from cluster.kv.window_pages import WindowPages, WindowSpan
from cluster.request import Request
from tests.parity.drafts import correct
from tests.parity.harness import SAMPLING, RunResult, config_of, make_request, run, run_one_by_one, texts_of
from tests.parity.pairs import draft_of
from tests.support.families import VOCAB, family_checkpoint
from tests.support.pairwise import covering

FAMILIES = {
    "some layers": ("gpt_oss", "own layer types"),
    "all layers": ("mistral", "window of 9"),
    "most layers": ("gemma3", "three local, one global"),
    "two widths": ("mimo_v2", "one full KV head, two with a window"),
}
"""By which layers of the target have a sliding window."""
DRAFTS = {"some layers": "specforge", "all layers": "windows", "most layers": "step x3", "two widths": "mimo-v2 x3"}
"""The draft of each: without a window, with one, with three runners, and with three runners with a window."""
SHAPES = {"plain": None, "chain": (1, 3), "tree": (4, 3), "wide tree": (16, 2)}


def requests() -> list[Request]:
    """Return requests that share prefixes of several lengths, and are much longer than any window."""
    random = Random(3)
    base = [random.randrange(2, VOCAB) for _ in range(70)]
    prompts = [base[:count] + [random.randrange(2, VOCAB) for _ in range(more)]
               for count, more in ((70, 3), (70, 9), (41, 5), (40, 1), (16, 30), (3, 2), (0, 64), (70, 4))]  # fmt: skip
    return [
        make_request(f"{i}", prompt, SAMPLING["0.8" if i % 2 else "greedy"], seed=i, max_tokens=30 + i, ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]


@cache
def oracle(family: str) -> RunResult:
    config = config_of(target_of(family), disable_radix_cache=True, swa_full_tokens_ratio=1)
    engine = build_engine(config)
    assert engine._parts.cache.window is None
    return run_one_by_one(engine, requests())


def target_of(family: str) -> str:
    return family_checkpoint(*FAMILIES[family]).folder


def build(family: str, shape: str, **settings: object) -> Engine:
    drafted = SHAPES[shape]
    draft = [] if drafted is None else [draft_of(DRAFTS[family]), *drafted]
    settings |= {"chunked_prefill_size": 7, "speculative_algorithm": None}
    engine = build_engine(config_of(target_of(family), *draft, **settings))
    if drafted is not None:
        correct(engine, texts_of(requests(), oracle(family)), 0.7)
    return engine


CASES = [*product(FAMILIES, SHAPES, (1, 4, 16), ("window pages", "pages"))]
FAST = covering([list(FAMILIES), list(SHAPES), [1, 4, 16], ["window pages", "pages"]])


@pytest.mark.parametrize(
    ("family", "shape", "page_size", "scarce"),
    [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in CASES],
)
def test_window_pools_change_no_token(
    family: str, shape: str, page_size: int, scarce: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If there are few window pages, cached prefixes lose theirs. If there are few pages, requests are retracted."""
    taken = retracted = cached = 0
    cover = WindowPages.cover

    def counting_cover(pages: WindowPages, span: WindowSpan, own_pages: Sequence[int], stop: int) -> None:
        nonlocal taken
        before = pages.evictable
        cover(pages, span, own_pages, stop)
        taken += before - pages.evictable

    def count(engine: Engine, result: StepResult) -> None:
        nonlocal retracted
        retracted += result.stats.retracted

    monkeypatch.setattr(WindowPages, "cover", counting_cover)
    few_windows = scarce == "window pages"
    tokens, ratio = (480 if page_size == 16 else 260, 0.45) if few_windows else (208 if page_size == 16 else 172, 0.95)
    engine = build(family, shape, page_size=page_size, max_total_tokens=tokens, swa_full_tokens_ratio=ratio)
    assert engine._parts.cache.window is not None
    for _ in range(2):
        result = run(engine, requests(), count)
        for name, completion in oracle(family).completions.items():
            assert result.completions[name] == completion, name
        cached += sum(output.cached_tokens for output in result.last.values())
    assert cached > 0 and (taken > 0 if few_windows else retracted > 0), (taken, cached, retracted)
