"""What the engine counts, and what it tells those who follow it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster.batch import StepInput
from cluster.device.staging import StagedLists
from cluster.engine import Engine, build_engine
from cluster.engine.lockstep import Lockstep, StepInFlight
from cluster.observability.exposition import Sums
from tests.parity.harness import GREEDY, config_of, grid_requests, request, run, speculative, tiny_pair, truth


@pytest.mark.parametrize("tiers", [{}, {3: 1}, {3: 0}, {1: 0}])
def test_request_and_step_statistics_count_the_same_accept_lengths(tiers: dict[int, int]) -> None:
    """Trees only: a step whose tier is 0 verifies none. Tokens behind the end of a request count nowhere."""
    config = config_of(*tiny_pair(), 2, 3, speculative_batch_tiers=tiers)
    engine = speculative(config, "oracle", truth("0.8"), 0.9)
    result = run(engine, grid_requests("0.8", 6))
    counts = [output.speculation for output in result.last.values() if output.speculation is not None]
    trees = sum(each.steps for each in counts)
    tokens = sum(each.accepted_tokens + each.steps for each in counts)
    assert trees == len(result.accept_lens) and tokens == sum(result.accept_lens)
    assert engine.status().accept_length == pytest.approx(tokens / trees if trees else 0.0)
    assert (trees == 0) == (tiers == {1: 0})
    if not tiers:
        assert tokens == sum(map(len, result.tokens.values())) - len(result.tokens)


def test_finished_request_metrics_count_reasons_and_completed_stages() -> None:
    engine = build_engine(config_of(tiny_pair()[0], max_running_requests=1))
    run(engine, [request("ends", [5], GREEDY, max_tokens=3)])
    for name in ("prefills", "waits"):
        engine.submit(request(name, [5] * 20, GREEDY, max_tokens=3))
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
    """What orders bring to the device is the host's table, whenever one is run."""
    engine = build_engine(config_of(tiny_pair()[0], disable_radix_cache=True))
    sent = watched(engine)
    for turn in range(3):
        one, other = grid_requests("greedy", 2)
        run(engine, [other])
        engine.submit(one)
        engine.step()
        engine.abort(one.request_id)
        for _ in range(turn):
            engine.step()
    assert len(sent) > 30 and any(write.entry < 0 for order in sent for write in order.writes)


def watched(engine: Engine) -> list[StepInput]:
    """Orders as they are run, after each of which the device's page table must equal the host's."""
    assembler, table = engine._parts.lockstep.programs.assembler, engine._parts.cache.table
    true, sent = assembler.send, []

    def send(order: StepInput, forced: int) -> StagedLists:
        sent.append(order)
        made = true(order, forced)
        assert np.array_equal(table.device_pages.numpy(), table.host_pages)
        return made

    assembler.send = send  # type: ignore[method-assign]
    return sent


def test_prompt_rows_are_limited_only_while_a_request_decodes() -> None:
    engine = build_engine(config_of(tiny_pair()[0], mixed_prefill_size=4))
    engine.submit(request("a", [5], GREEDY, max_tokens=3))
    while engine.has_work:
        engine.step()
    engine.submit(request("b", [6] * 20, GREEDY, max_tokens=3))
    assert engine.step().stats.prompt_rows == 20, "nobody decodes any more"
    engine.submit(request("c", [7] * 20, GREEDY, max_tokens=3))
    assert engine.step().stats.prompt_rows == 4


@pytest.mark.parametrize(("of_others", "rows"), [((), 20), ((0, 0), 20), ((0, 700), 4)])
def test_prompt_rows_are_limited_while_other_groups_decode(
    monkeypatch: pytest.MonkeyPatch, of_others: tuple[int, ...], rows: int
) -> None:
    true = Lockstep.run

    def with_others(*given: Any) -> StepInFlight:
        ran = true(*given)
        decode_us, prompt_rows = (ran.plan.decode_us + of_others, ran.plan.prompt_rows + of_others)
        return replace(ran, plan=ran.plan._replace(decode_us=decode_us, prompt_rows=prompt_rows))

    monkeypatch.setattr(Lockstep, "run", with_others)
    engine = build_engine(config_of(tiny_pair()[0], mixed_prefill_size=4))
    engine.submit(request("a", [5], GREEDY, max_tokens=1))
    engine.step()
    assert engine._prefilling_groups == (700 in of_others)
    engine.submit(request("b", [6] * 20, GREEDY, max_tokens=1))
    assert engine.step().stats.prompt_rows == rows
