"""Prompts that meet while they run: computed once, and every request's tokens, memory and trees are as if alone."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from random import Random

import pytest

from cluster.config import EngineConfig
from cluster.engine import Engine, StepResult, build_engine
from cluster.request import Request
from tests.pairwise import covering
from tests.parity.drafts import Texts, correct
from tests.parity.harness import SAMPLING, VOCAB, Run, config_of, request, run, run_alone, scarce, texts_of, tiny_pair
from tests.parity.reference import draft_reference, target_reference
from tests.parity.test_draft_runners import settings as multilayer
from tests.parity.watch import Watch

LONG = 160


@cache
def text_of(seed: int, length: int = LONG) -> tuple[int, ...]:
    random = Random(seed)
    return tuple(random.randrange(2, VOCAB) for _ in range(length))


def samples(prompt: tuple[int, ...], count: int = 8) -> list[Request]:
    """Of one prompt, every one with another seed."""
    common = {"max_tokens": 14, "ignore_eos": True}
    return [request(f"s{i}", prompt, SAMPLING["0.8"], seed=50 + i, **common) for i in range(count)]


def family(page_size: int) -> list[Request]:
    """Prompts that part ways within a page, at its end, just after it, and where a chunk ends."""
    base = text_of(1, 48)
    at = [20, 4 * page_size, 4 * page_size - 1, 4 * page_size + 1, 21, 47, 48, 17]
    made = []
    for i, cut in enumerate(at):
        cut = min(cut, 47)
        ids = (*base[:cut], (base[cut] + 1) % VOCAB, *text_of(10 + i, 9))
        made.append(request(f"f{i}", ids, SAMPLING["greedy" if i % 2 else "0.8"], seed=i, max_tokens=10 + i))
    return [*made, request("whole", base, SAMPLING["0.8"], seed=99, max_tokens=12, ignore_eos=True)]


@cache
def alone(kind: str, page_size: int) -> Run:
    """Plain decoding of each, without any sharing."""
    asked = family(page_size) if kind == "family" else samples(text_of(0))
    return run_alone(build_engine(config_of(tiny_pair()[0], disable_radix_cache=True)), asked)


def watched(config: EngineConfig, known: Texts, rate: float = 0.7) -> tuple[Engine, Watch]:
    target, draft = tiny_pair()
    engine, watch = build_engine(config), Watch(target_reference(target), draft_reference(draft, target), known)
    watch.attach(engine)
    correct(engine, known, rate)
    return engine, watch


def rows_into(counted: list[int], then: Callable[[Engine, StepResult], None] | None = None):  # type: ignore[no-untyped-def]
    def after(engine: Engine, step: StepResult) -> None:
        counted.append(step.stats.prompt_rows)
        if then is not None:
            then(engine, step)

    return after


@pytest.mark.parametrize(("page_size", "chunk"), [(16, -1), (16, 64), (1, 64), (4, 33), (64, -1)])
def test_eight_samples_of_a_prompt_compute_the_prompt_once(page_size: int, chunk: int) -> None:
    asked, plain = samples(text_of(0)), alone("samples", 16)
    engine = build_engine(config_of(*tiny_pair(), 3, 3, page_size=page_size, chunked_prefill_size=chunk))
    rows: list[int] = []
    result = run(engine, asked, rows_into(rows))
    assert result.ended == plain.ended
    assert sum(rows) <= (200 if page_size < 64 else LONG + 7 * 32)
    cached = [result.last[one.request_id].cached_tokens for one in asked]
    assert sum(rows) + sum(cached) == 8 * LONG, "what was not computed for a request is what it is told"


def test_shared_prompt_ending_within_a_page_is_computed_once() -> None:
    asked = [replace(one, prompt_token_ids=text_of(0)[:155]) for one in samples(text_of(0))]
    rows: list[int] = []
    run(build_engine(config_of(*tiny_pair(), 3, 3, page_size=16)), asked, rows_into(rows))
    assert sum(rows) == 155 + 7


@pytest.mark.parametrize(
    ("page_size", "memory", "together"), covering([(1, 4, 16), ("ample", "scarce"), (True, False)])
)
def test_prompts_with_common_prefixes_match_unshared_runs(page_size: int, memory: str, together: bool) -> None:
    """At once, or one after the other while the first ones still run."""
    asked, plain = family(page_size), alone("family", page_size)
    config = config_of(*tiny_pair(), 3, 3, page_size=page_size, chunked_prefill_size=19)
    config = scarce(config, asked, 24 // page_size) if memory == "scarce" else config
    engine, watch = watched(config, texts_of(asked, plain))
    coming = [] if together else asked[:-1]

    def after(engine: Engine, step: StepResult) -> None:
        watch(engine, step)
        if coming:
            engine.submit(coming.pop())

    result = run(engine, asked if together else asked[-1:], after, later=[] if together else asked[:-1])
    assert result.ended == plain.ended
    assert not watch.errors, watch.errors[0]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_prompts_with_different_cache_salts_share_no_prefix(page_size: int) -> None:
    """At once, so that none may wait for another's prompt either, and then again, when all is cached."""
    asked, plain = samples(text_of(0), 6), alone("samples", 16)
    asked = [replace(one, cache_salt=at % 3) for at, one in enumerate(asked)]
    rows: list[int] = []
    engine = build_engine(config_of(*tiny_pair(), 3, 3, page_size=page_size))
    result = run(engine, asked, rows_into(rows))
    assert result.ended == {name: end for name, end in plain.ended.items() if name in result.ended}
    cached = [result.last[one.request_id].cached_tokens for one in asked]
    assert cached[:3] == [0, 0, 0], "the first of each salt found nothing"
    assert min(cached[3:]) >= LONG - page_size, "the second found what the first had computed"
    assert sum(rows) + sum(cached) == 6 * LONG
    again = [replace(one, cache_salt=salt) for one, salt in zip(asked, (0, 2, 3), strict=False)]
    found = run(engine, again)
    assert [found.last[one.request_id].cached_tokens >= LONG - page_size for one in again] == [True, True, False]
    assert found.last[again[2].request_id].cached_tokens == 0


@pytest.mark.parametrize("dialect", ["mimo", "step"])
@pytest.mark.parametrize("page_size", [4, 16])
def test_multi_layer_draft_state_is_shared_with_cached_prefixes(dialect: str, page_size: int) -> None:
    """Without the same trees the accept lengths of the samples would not be those without sharing."""
    asked = samples(text_of(0)[:45], 4)
    runs = []
    for disabled in (False, True):
        config = multilayer(dialect, 1, page_size=page_size, disable_radix_cache=disabled)
        rows: list[int] = []
        result = run(build_engine(config), asked, rows_into(rows))
        runs.append((result.ended, {n: o.speculation and o.speculation.accepted for n, o in result.last.items()}))
        assert sum(rows) == (4 * 45 if disabled else 45 + 3)
    assert runs[0] == runs[1]


@pytest.mark.parametrize("at", [1, 2, 4, 5])
def test_abort_of_the_first_sharing_request_keeps_its_computed_prefix(at: int) -> None:
    asked, plain = samples(text_of(0)), alone("samples", 16)
    engine = build_engine(config_of(*tiny_pair(), 3, 3, page_size=16, chunked_prefill_size=48))
    rows: list[int] = []

    def leave(engine: Engine, _: StepResult) -> None:
        if len(rows) == at:
            engine.abort("s0")

    result = run(engine, asked, rows_into(rows, leave))
    assert {n: e for n, e in result.ended.items() if n != "s0"} == {n: e for n, e in plain.ended.items() if n != "s0"}
    assert sum(rows) <= 200 + 48, "what it had computed is used"
