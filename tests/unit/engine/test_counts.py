"""What the engine counts, and what it tells those who follow it."""

import pytest

from cluster.batch import Batch, Order
from cluster.engine import Engine, build_engine
from cluster.kv.slots import SlotTable
from tests.parity.harness import config_of, grid_requests, run, speculative, tiny_pair, truth


@pytest.mark.parametrize("tiers", [{}, {3: 1}, {3: 0}, {1: 0}])
def test_requests_and_steps_count_the_same_accept_lengths(tiers: dict[int, int]) -> None:
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


def test_a_quiet_step_loses_nothing_of_the_slot_journal() -> None:
    """What those who follow replay from the orders that were sent is the leader's table, whenever one is sent."""
    engine = build_engine(config_of(tiny_pair()[0], disable_radix_cache=True))
    table = engine._p.cache.table
    table.journal = []
    copy = SlotTable(table.idle_row, table.slots.shape[1], table.page_size, table.slots.device)
    sent = watched(engine, copy)
    for turn in range(3):
        one, other = grid_requests("greedy", 2)
        run(engine, [other])
        engine.submit(one)
        engine.step()
        engine.abort(one.request_id)
        for _ in range(turn):
            engine.step()
    assert len(sent) > 30 and any(write.entry < 0 for order in sent for write in order.writes)


def watched(engine: Engine, copy: SlotTable) -> list[Order]:
    """Orders as they are run, replayed into a table that must then equal the engine's."""
    assembler, table = engine._p.lockstep.assembler, engine._p.cache.table
    true, sent = assembler.batch, []

    def batch(order: Order) -> Batch:
        sent.append(order)
        copy.replay(order.writes)
        assert copy.slots.equal(table.slots)
        return true(order)

    assembler.batch = batch  # type: ignore[method-assign]
    return sent
