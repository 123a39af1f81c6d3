"""The grid of law 1, of which coverings run: of every two axes all pairs of values, or of every three all triples."""

from dataclasses import asdict, dataclass
from functools import cache

from tests.pairwise import covering
from tests.parity.harness import Run, config_of, grid_requests, plain_run, run, scarce, speculative, tiny_pair, truth

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
    "kept": ("auto", "fp8_e4m3"),
}


@dataclass(frozen=True)
class Case:
    """One configuration. `memory`: ample; scarce, one page more than the longest
    request needs, so that others retract; cached, every prompt submitted twice. `kept`: `kv_cache_dtype`."""

    topk: int
    num_steps: int
    page_size: int
    batch: int
    chunk: int
    num_aux: int
    sampling: str
    draft: str
    memory: str
    kept: str = "auto"

    def __str__(self) -> str:
        return "-".join(str(v) for v in asdict(self).values())


@dataclass
class Checked:
    """What a case showed, for the tests to add up."""

    case: Case
    mismatches: list[str]
    retracted: int
    cached_tokens: int
    accept_lens: set[int]


@cache
def cases(strength: int) -> list[Case]:
    """The cases in which all combinations of values of any `strength` axes occur."""
    return [Case(*row) for row in covering(list(AXES.values()), strength)]


def check(case: Case) -> Checked:
    """Run one case and compare every request's tokens and end with plain decoding."""
    requests = grid_requests(case.sampling, case.batch)
    settings: dict[str, object] = {
        "page_size": case.page_size,
        "chunked_prefill_size": case.chunk,
        "disable_radix_cache": case.memory == "no radix",
        "kv_cache_dtype": case.kept,
    }
    target, draft = tiny_pair(case.num_aux)
    config = config_of(target, draft, case.topk, case.num_steps, **settings)
    if case.memory == "scarce":
        config = scarce(config, requests)
    engine = speculative(config, case.draft, truth(case.sampling, case.kept))
    result = run(engine, requests)
    mismatches = compare(case, result)
    retracted, accept_lens, cached_tokens = result.retracted, set(result.accept_lens), 0
    if case.memory == "cached":
        again = run(engine, requests)
        mismatches += compare(case, again)
        accept_lens |= set(again.accept_lens)
        cached_tokens = sum(output.cached_tokens for output in again.last.values())
        assert cached_tokens > 0, f"{case}: prompts submitted again found nothing in the cache"
    return Checked(case, mismatches, retracted, cached_tokens, accept_lens)


def compare(case: Case, result: Run) -> list[str]:
    """Requests of `result` that differ from plain decoding, in words."""
    plain = plain_run(case.sampling, case.kept).ended
    return [
        f"{case} {name}: {ended} instead of {plain[name]}"
        for name, ended in result.ended.items()
        if ended != plain[name]
    ]
