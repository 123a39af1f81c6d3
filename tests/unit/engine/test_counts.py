"""The engine's counts and metrics, the page table that it sends to the device, and the limit on prompt rows."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster.batch import StepInput
from cluster.device.staging import StagedLists
from cluster.engine import Engine, build_engine
from cluster.engine.lockstep import Lockstep, StepInFlight
from cluster.observability.exposition import Sums
from tests.parity.harness import (
    GREEDY,
    config_of,
    grid_requests,
    make_request,
    plain_texts,
    run,
    speculative_engine,
    tiny_pair,
)


@pytest.mark.parametrize("tiers", [{}, {3: 1}, {3: 0}, {1: 0}])
def test_request_and_step_statistics_count_the_same_accept_lengths(tiers: dict[int, int]) -> None:
    """Only verified trees count: a step whose tier is 0 verifies no tree. Tokens after a request's end do not count."""
    config = config_of(*tiny_pair(), 2, 3, speculative_batch_tiers=tiers)
    engine = speculative_engine(config, "oracle", plain_texts("0.8"), 0.9)
    result = run(engine, grid_requests("0.8", 6))
    counts = [output.speculation for output in result.last.values() if output.speculation is not None]
    trees = sum(request_counts.steps for request_counts in counts)
    tokens = sum(request_counts.accepted_tokens + request_counts.steps for request_counts in counts)
    assert trees == len(result.accept_lens) and tokens == sum(result.accept_lens)
    assert engine.status().accept_length == pytest.approx(tokens / trees if trees else 0.0)
    assert (trees == 0) == (tiers == {1: 0})
    if not tiers:
        assert tokens == sum(map(len, result.tokens.values())) - len(result.tokens)


def test_finished_request_metrics_count_reasons_and_completed_stages() -> None:
    engine = build_engine(config_of(tiny_pair()[0], max_running_requests=1))
    run(engine, [make_request("ends", [5], GREEDY, max_tokens=3)])
    for name in ("prefills", "waits"):
        engine.submit(make_request(name, [5] * 20, GREEDY, max_tokens=3))
    engine.step()
    while not engine._sequences["prefills"].prompt_committed:
        engine.step()
    for name in ("waits", "prefills", "nobody"):
        engine.abort(name)
    counts = Sums([engine.metrics.serialize()])
    reasons = counts.by("finished_reason", "aerie_finished_requests_total")
    assert reasons == {"stop": 0, "length": 1, "abort": 2, "error": 0}
    stages = [counts.total(f"aerie_{stage}_seconds_count") for stage in ("queue", "prefill", "decode")]
    assert stages == [2, 2, 2]


def test_device_page_table_equals_host_page_table_after_every_step() -> None:
    """Step inputs carry the changes of the host's page table to the device."""
    engine = build_engine(config_of(tiny_pair()[0], disable_radix_cache=True))
    step_inputs = record_step_inputs(engine)
    for extra_steps in range(3):
        aborted_request, finished_request = grid_requests("greedy", 2)
        run(engine, [finished_request])
        engine.submit(aborted_request)
        engine.step()
        engine.abort(aborted_request.request_id)
        for _ in range(extra_steps):
            engine.step()
    assert len(step_inputs) > 30 and any(write.entry < 0 for step_input in step_inputs for write in step_input.writes)


def record_step_inputs(engine: Engine) -> list[StepInput]:
    """Return a list to which the engine adds each step input that it sends from now on. After each one, check that the
    device's page table equals the host's.
    """
    assembler, table = engine._parts.lockstep.programs.assembler, engine._parts.cache.table
    original_send, step_inputs = assembler.send, []

    def send(step_input: StepInput, forced: int) -> StagedLists:
        step_inputs.append(step_input)
        staged = original_send(step_input, forced)
        assert np.array_equal(table.device_pages.numpy(), table.host_pages)
        return staged

    assembler.send = send  # type: ignore[method-assign]
    return step_inputs


def test_prompt_rows_are_limited_only_while_a_request_decodes() -> None:
    engine = build_engine(config_of(tiny_pair()[0], mixed_prefill_size=4))
    engine.submit(make_request("a", [5], GREEDY, max_tokens=3))
    while engine.has_work:
        engine.step()
    engine.submit(make_request("b", [6] * 20, GREEDY, max_tokens=3))
    assert engine.step().stats.prompt_rows == 20, "no request decodes any more"
    engine.submit(make_request("c", [7] * 20, GREEDY, max_tokens=3))
    assert engine.step().stats.prompt_rows == 4


@pytest.mark.parametrize(("peer_values", "expected_rows"), [((), 20), ((0, 0), 20), ((0, 700), 4)])
def test_prompt_rows_are_limited_while_other_groups_decode(
    monkeypatch: pytest.MonkeyPatch, peer_values: tuple[int, ...], expected_rows: int
) -> None:
    """`peer_values` are added to the plan as the decode times and the prompt rows of other groups."""
    original_run = Lockstep.run

    def run_with_peers(*args: Any) -> StepInFlight:
        step_in_flight = original_run(*args)
        decode_us, prompt_rows = (
            step_in_flight.plan.decode_us + peer_values,
            step_in_flight.plan.prompt_rows + peer_values,
        )
        return replace(step_in_flight, plan=step_in_flight.plan._replace(decode_us=decode_us, prompt_rows=prompt_rows))

    monkeypatch.setattr(Lockstep, "run", run_with_peers)
    engine = build_engine(config_of(tiny_pair()[0], mixed_prefill_size=4))
    engine.submit(make_request("a", [5], GREEDY, max_tokens=1))
    engine.step()
    assert engine._prefilling_groups == (700 in peer_values)
    engine.submit(make_request("b", [6] * 20, GREEDY, max_tokens=1))
    assert engine.step().stats.prompt_rows == expected_rows
