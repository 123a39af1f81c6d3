"""A draft that rests reads later what it has missed: it then proposes what a draft that never rested proposes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from cluster.batch import ExtendMode
from cluster.config.speculation import MISSED_TOKENS
from cluster.engine import Engine, build_engine
from cluster.request import Request
from cluster.spec.inputs import EagleDraftInput
from tests.parity.harness import GREEDY, OVERLAP, SAMPLING, config_of, make_request, prompts, run, tiny_pair
from tests.parity.trees import adaptive, engine_with_trees
from tests.support.slow_cases import diagonals_fast

REQUESTS = [
    make_request(f"r{i}", prompt, SAMPLING["0.8"], seed=i, max_tokens=80, ignore_eos=True)
    for i, prompt in enumerate(prompts()[:3])
]
LATE = make_request("late", prompts()[6], GREEDY, max_tokens=60, ignore_eos=True)
reads_the_device_between_steps = pytest.mark.skipif(OVERLAP > 0, reason="the last step has not run yet")


def engine_of(tiers: Sequence[int], rests: bool = True, **settings: object) -> Engine:
    """Return an engine whose steps choose `tiers`; if not `rests`, its draft reads every token at once."""
    engine = engine_with_trees(lambda: build_engine(adaptive(config_of(*tiny_pair(), 1, 3, **settings))), tiers)
    coordinator = engine.lockstep.coordinator
    if not rests:
        coordinator._rule = replace(coordinator._rule, draft_rests=False)
    return engine


def step_until(engine: Engine, done: Callable[[int, Any], bool], requests: Sequence[Request]) -> list[ExtendMode]:
    """Submit `requests`, step until `done(number of steps with decoding requests, plan)`, and return their extend
    modes.
    """
    for request in requests:
        engine.submit(request)
    modes: list[ExtendMode] = []
    plans: list[Any] = []
    agree = engine.lockstep.coordinator.agree
    engine.lockstep.coordinator.agree = lambda facts: plans.append(agree(facts)) or plans[-1]  # type: ignore[method-assign,func-returns-value]
    while not (plans and done(len(modes), plans[-1])):
        engine.step()
        if any(plans[-1].decodes):
            modes.append(plans[-1].extend_mode)
    engine.lockstep.coordinator.agree = agree  # type: ignore[method-assign]
    return modes


def draft_inputs(engine: Engine) -> EagleDraftInput:
    """Return what the running requests carry."""
    rows = torch.tensor([sequence.row for sequence in engine._parts.scheduler.running])
    return engine.lockstep.step.draft_inputs.take(rows)


def accept_lens_to_the_end(engine: Engine) -> list[list[int]]:
    """Run the requests to their end; return the accept lengths of each step."""
    accept_lens = []
    while engine.has_work:
        accept_lens.append(engine.step().stats.accept_lens)
    return accept_lens


@reads_the_device_between_steps
@pytest.mark.parametrize(
    ("rested", "settings"),
    diagonals_fast(2, [1, 2, 7, MISSED_TOKENS - 1], [{}, {"page_size": 1}, {"kv_cache_dtype": "fp8_e4m3"}]),
)
def test_draft_that_rested_proposes_as_one_that_never_rested(rested: int, settings: dict[str, object]) -> None:
    tiers = [3, 3, *[0] * (rested + 1), 3]  # the step after the last 0 is the one in which the resting draft wakes
    resting = engine_of([3, 3, *[0] * rested, 3], **settings)
    reading = engine_of(tiers, rests=False, **settings)
    modes = step_until(resting, lambda steps, plan: steps == rested + 3, REQUESTS)
    assert modes == [ExtendMode.ACCEPTED] * 2 + [ExtendMode.NOTHING] * rested + [ExtendMode.MISSED]
    assert set(step_until(reading, lambda steps, plan: steps == rested + 3, REQUESTS)) == {ExtendMode.ACCEPTED}
    woken, expected = draft_inputs(resting), draft_inputs(reading)
    assert torch.equal(woken.bonus, expected.bonus)
    assert torch.equal(woken.topk_index, expected.topk_index)
    torch.testing.assert_close(woken.hidden, expected.hidden, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(woken.topk_logprobs, expected.topk_logprobs, rtol=1e-9, atol=1e-9)
    # All later trees are the same too: the cells of the draft's cache are those that it would have written before.
    assert accept_lens_to_the_end(resting) == accept_lens_to_the_end(reading)


@reads_the_device_between_steps
def test_requests_that_join_a_resting_draft_are_read_with_their_prompt() -> None:
    resting, reading = engine_of([3, *[0] * 8, 3]), engine_of([3, *[0] * 9, 3], rests=False)
    for engine in (resting, reading):
        step_until(engine, lambda steps, plan: steps == 4, REQUESTS)
    late_modes = step_until(resting, lambda steps, plan: plan.extend_mode is ExtendMode.MISSED, [LATE])
    assert late_modes[0] is ExtendMode.PROMPTS and late_modes[-1] is ExtendMode.MISSED
    step_until(reading, lambda steps, plan: steps == len(late_modes), [LATE])
    woken, expected = draft_inputs(resting), draft_inputs(reading)
    assert woken.bonus.shape == (4,) and torch.equal(woken.topk_index, expected.topk_index)
    torch.testing.assert_close(woken.hidden, expected.hidden, rtol=1e-9, atol=1e-9)
    assert accept_lens_to_the_end(resting) == accept_lens_to_the_end(reading)


def test_long_rest_leaves_no_unwritten_cells_to_the_draft_and_keeps_tokens() -> None:
    """All memory that the engine does not use is NaN in these tests; the draft must not read what it never wrote."""
    rested = 2 * MISSED_TOKENS
    resting = engine_of([3, *[0] * rested, 3])
    plain = run(build_engine(config_of(tiny_pair()[0])), REQUESTS)
    assert run(resting, REQUESTS).completions == plain.completions
    resting = engine_of([3, *[0] * rested, 3])
    modes = step_until(resting, lambda steps, plan: plan.extend_mode is ExtendMode.MISSED, REQUESTS)
    assert len(modes) == rested + 2
    woken = draft_inputs(resting)
    assert woken.hidden.isfinite().all() and woken.topk_logprobs.isfinite().all()


@reads_the_device_between_steps
def test_rows_of_new_requests_have_missed_nothing() -> None:
    """A table row whose request ended while the draft rested goes to a new request."""
    engine = engine_of([*[0] * 40, 3], max_running_requests=1)
    first = make_request("first", prompts()[2], GREEDY, max_tokens=10, ignore_eos=True)
    second = make_request("second", prompts()[4], GREEDY, max_tokens=60, ignore_eos=True)
    run(engine, [first])
    counts = engine.lockstep.step._draft._counts  # type: ignore[attr-defined]
    assert counts[0] > 0
    engine.submit(second)
    engine.step()  # its prompt
    engine.step()  # its first step without a tree
    assert len(engine._parts.scheduler.running) == 1
    assert counts[0] == 1
