"""Pages, the radix tree, leases and window pools through random lives of requests: no request ever reads a cell of
other tokens, of another salt, of a refused tree node or of a freed page, and no page is lost.

The other tests of `kv/` look at one of these parts. Only this one would find a fault that needs several of them: a page
that is copied from while its request ends, a retracted request whose prefix has lost its window pages, a salt that
shares pages.
"""

from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.unit.kv.paper_engine import DEPTH, MAX_TOKENS, PaperEngine

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=20)


class Pools(RuleBasedStateMachine):
    """Random lives of requests with few different tokens, so that they have many prefixes in common."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        tokens=st.integers(60, 160),
        window=st.sampled_from([None, 1, 40, 1000]),
        radix=st.booleans(),
    )
    def build(self, page_size: int, tokens: int, window: int | None, radix: bool) -> None:
        window_pages = None if window is None else window // page_size
        self.engine = PaperEngine(tokens // page_size, page_size, window_pages, radix=radix)

    @rule(
        shared=st.integers(0, 40),
        own=TOKENS,
        salt=st.integers(0, 1),
        room=st.integers(1, 20),
        source=st.integers(0, 3),
    )
    def start(self, shared: int, own: list[int], salt: int, room: int, source: int) -> None:
        running = self.engine.running
        prefix = running[source % len(running)].tokens[:shared] if running else [0] * shared
        tokens = [*prefix, *own][: MAX_TOKENS - 1]
        self.engine.start(tokens, salt, min(MAX_TOKENS, len(tokens) + room))

    @precondition(lambda self: self.engine.running)
    @rule(
        numbers=st.lists(st.integers(0, 3), min_size=1, max_size=4),
        rows=st.integers(1, 12),
        accepted=st.lists(st.integers(0, DEPTH), min_size=4, max_size=4),
        new_tokens=TOKENS,
    )
    def step(self, numbers: list[int], rows: int, accepted: list[int], new_tokens: list[int]) -> None:
        running = self.engine.running
        unfinished = [n for n, request in enumerate(running) if len(request.tokens) < request.most]
        if unfinished:
            chosen = [unfinished[number % len(unfinished)] for number in numbers]
            self.engine.step(chosen, rows, accepted, new_tokens)

    @precondition(lambda self: self.engine.running)
    @rule(number=st.integers(0, 3), retract=st.booleans())
    def end(self, number: int, retract: bool) -> None:
        self.engine.end(number % len(self.engine.running), retract)

    @precondition(lambda self: self.engine.waiting)
    @rule()
    def resume(self) -> None:
        self.engine.resume()

    @invariant()
    def all_cells_are_right(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            while self.engine.running:
                self.engine.end(0)
            self.engine.check()
            assert self.engine.cache.used_pages == 0, "all requests have ended"


EXAMPLES = {"fast": (60, 40), "slow": (2000, 60)}
"""How many lives, and the most operations of each. The slow run has over 100,000 operations."""


@pytest.mark.parametrize("size", ["fast", pytest.param("slow", marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_no_state_of_the_pools_gives_a_request_the_cells_of_others(size: str) -> None:
    lives, operations = EXAMPLES[size]
    run_state_machine_as_test(
        Pools,
        settings=settings(
            max_examples=lives,
            stateful_step_count=operations,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def random_life(seed: int, steps: int, options: dict[str, Any]) -> PaperEngine:
    """Do random operations on requests until the engine has done `steps` steps. Check all invariants after each one."""
    random = Random(seed)
    engine = PaperEngine(**options)
    base = [random.randrange(2) for _ in range(MAX_TOKENS)]
    while engine.counts.steps < steps:
        choice = random.random()
        unfinished = [n for n, request in enumerate(engine.running) if len(request.tokens) < request.most]
        if choice < 0.12:
            tokens = [*base[: random.randrange(40)], *(random.randrange(2) for _ in range(random.randint(1, 12)))]
            engine.start(tokens, int(random.random() < 0.2), min(MAX_TOKENS, len(tokens) + random.randint(1, 20)))
        elif choice < 0.17 and engine.waiting:
            engine.resume()
        elif choice < 0.2 and engine.running:
            engine.end(random.randrange(len(engine.running)), random.random() < 0.4)
        elif unfinished:
            accepted = [random.randrange(DEPTH + 1) for _ in range(4)]
            numbers = random.sample(unfinished, random.randint(1, len(unfinished)))
            engine.step(numbers, random.randint(1, 12), accepted, [random.randrange(2) for _ in range(7)])
        elif engine.running:
            engine.end(random.randrange(len(engine.running)))
        engine.check()
    return engine


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("window_tokens", [None, 40, 1000])
def test_random_lives_of_requests_reuse_copy_retract_and_refuse(page_size: int, window_tokens: int | None) -> None:
    window_pages = None if window_tokens is None else window_tokens // page_size
    options = {"pages": 120 // page_size, "page_size": page_size, "window_pages": window_pages}
    counts = random_life(1, 600, options).counts
    assert counts.reused_pages > 20 and counts.retractions > 5 and counts.refused_nodes > 200
    assert counts.copies > 2 or page_size == 1
