"""What prompt rows cost, how many of them a step holds, and that a long prompt shrinks its chunks as it goes on."""

import pytest
import torch

from cluster.arch import LayerGeometry
from cluster.config import EngineConfig
from cluster.engine.pace import STRETCH, Pace, pace_of
from cluster.engine.scheduler import Scheduler
from cluster.kv.cache import KVCache
from tests.unit.engine.test_scheduler import advance, names, sequence

PACE = Pace(base=32.0, reach=1000.0, tree=4)


@pytest.mark.parametrize("start", [0, 1, 999, 8000])
@pytest.mark.parametrize("allowance", [0.5, 7.0, 64.0, 5000.0])
def test_rows_are_the_most_that_the_allowance_pays(start: int, allowance: float) -> None:
    rows = PACE.rows(start, allowance)
    assert rows == 1 or PACE.cost(start, start + rows) <= allowance
    assert PACE.cost(start, start + rows + 1) > allowance


def test_a_step_is_stretched_from_that_of_the_busiest_rank() -> None:
    alone = 32.0 + 8 * 4
    assert PACE.allowance(0, 8) + 32.0 == pytest.approx(STRETCH * alone)
    assert PACE.allowance(8, 2) + alone == pytest.approx(STRETCH * alone), "a rank that has become the busiest itself"
    assert PACE.allowance(4, 8) == pytest.approx(PACE.allowance(0, 8) - 4 * 4)


def test_a_row_far_into_the_prompt_costs_its_attention() -> None:
    layer = LayerGeometry(hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=704, eps=1e-5)
    pace = pace_of(layer, 4, "cpu")
    assert pace.reach == pytest.approx((256 * (512 + 256) + 3 * 256 * 704) / 512)
    assert pace.cost(0, 1) == pytest.approx(1.0, abs=1e-3)
    assert pace.cost(int(pace.reach), int(pace.reach) + 1) == pytest.approx(2.0, abs=1e-3)
    assert pace_of(layer, 4, "cpu", attn_dp=2).reach == pytest.approx((256 * (512 + 256) + 3 * 256 * 352) / 512)
    assert pace_of(layer, 4, "cuda").allowance(0, 1) > pace.allowance(0, 1)


def paced(mixed: int | None = None) -> Scheduler:
    config = EngineConfig(model_path="", chunked_prefill_size=300, mixed_prefill_size=mixed)
    return Scheduler(config, KVCache(400, 16, 4, 6000, False, torch.device("cpu")), 6, PACE)


def test_chunks_are_whole_while_nobody_decodes_and_paced_while_somebody_does() -> None:
    scheduler = paced()
    scheduler.waiting.append(sequence("a", 4000))
    sizes = []
    for busiest in (0, 2, 2, 2, 0):
        plan = scheduler.schedule(busiest)
        sizes.append(plan.prompt_rows)
        advance(plan)
    assert sizes[0] == sizes[-1] == 300
    assert all(1 <= size <= PACE.allowance(0, 2) for size in sizes[1:4])
    assert sizes[1] >= sizes[3]
    scheduler.running[0].committed = 3000
    assert scheduler.schedule(2).prompt_rows < sizes[3] / 2


def test_own_decoding_requests_count_as_well() -> None:
    scheduler = paced()
    scheduler.waiting.append(sequence("a", 10))
    advance(scheduler.schedule())
    scheduler.waiting.append(sequence("b", 4000))
    decodes, chunks = names(plan := scheduler.schedule())
    assert (decodes, len(chunks)) == (["a"], 1)
    assert plan.prompt_rows == PACE.rows(0, PACE.allowance(1, 0)) < 300


def test_several_prompts_share_the_allowance() -> None:
    scheduler = paced()
    scheduler.waiting.extend([sequence("a", 10), sequence("b", 5), sequence("c", 4000), sequence("d", 100)])
    plan = scheduler.schedule(2)
    assert [chunk.sequence.request.request_id for chunk in plan.chunks] == ["a", "b", "c"]
    assert sum(PACE.cost(chunk.start, chunk.stop) for chunk in plan.chunks) <= PACE.allowance(0, 2)


def test_a_fixed_number_of_rows_replaces_the_pace() -> None:
    scheduler = paced(mixed=7)
    scheduler.waiting.append(sequence("a", 4000))
    assert [scheduler.schedule(busiest).prompt_rows for busiest in (2, 0)] == [7, 300]
