"""Memory that nobody may read, filled with NaN and infinity before every step of every engine.

On by default in the packages whose conftest.py imports `poisoned`: without it a read of what was never written, masked
or not, would find zeros and go unnoticed.
"""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from cluster.batch import StepInput
from cluster.engine import Engine, StepResult
from tests.late import LatePrograms
from tests.tables import held_slots

NOTHING = StepInput()
POISONS = (math.nan, math.inf)
"""In turns, step by step."""
NO_CODE = 255
"""In a cache in FP8, where neither a code nor a scale of that byte is a number."""


def memory_of(engine: Engine) -> list[Tensor]:
    """What the engine's models keep by slot, the slots in the first dimension."""
    step = engine._parts.lockstep.step
    draft = step._draft
    runners = getattr(draft, "_runners", [draft._runner] if hasattr(draft, "_runner") else [])
    pools = [step._target.pool, *(runner.pool for runner in runners)]
    return [pool.kv.transpose(0, 1) for pool in pools] + list(getattr(draft, "_passed_hidden", ()))


def written(engine: Engine) -> Tensor:
    """Which slots hold something: pages of the radix tree, and the committed tokens of running requests."""
    cache = engine._parts.cache
    held = torch.zeros((cache.total_pages + 1) * cache.page_size, dtype=torch.bool)
    held.view(cache.total_pages + 1, cache.page_size)[[node.page for node in cache._tree.nodes()]] = True
    for sequence in engine._parts.scheduler.running:
        held[held_slots(cache.table, sequence.row, sequence.committed)] = True
    return held


def poison(engine: Engine, memory: list[Tensor], value: float, order: StepInput = NOTHING) -> None:
    """Fill the sink, all free pages and the free ends of used ones, and what idle requests carry; what the step of a
    late `order` reads stays, though the host may have moved on.
    """
    held, table = written(engine), engine._parts.cache.table
    size = table.page_size
    for copy in order.copies:
        held[copy.source * size : copy.source * size + copy.tokens] = True
    read = [(decode.row, int(table.lens[decode.row])) for decode in order.decodes]
    assert all(decode.min_seq_len <= count for decode, (_, count) in zip(order.decodes, read, strict=True))
    for row, count in read + [(chunk.row, chunk.start) for chunk in order.chunks]:
        held[table.first_slots(torch.tensor([row]), min(count, table.host_pages.shape[1] * size))] = True
    held[:size] = False  # the sink
    free = (~held).nonzero()[:, 0]
    for cells in memory:
        cells.index_fill_(0, free, value if cells.is_floating_point() else NO_CODE)
    carried, idle = engine._parts.lockstep.step.draft_inputs, engine._parts.cache.table.idle_row
    carried.hidden[idle] = value
    carried.topk_logprobs[idle] = value


@pytest.fixture(scope="package", autouse=True)
def poisoned() -> Iterator[None]:
    """Every step of every engine built meanwhile is taken in poisoned memory."""
    made, take = Engine.__init__, Engine.step

    def __init__(self: Engine, *given: object) -> None:
        made(self, *given)  # type: ignore[arg-type]
        self._memory = memory_of(self)  # type: ignore[attr-defined]

    def step(self: Engine) -> StepResult:
        late, value = self._parts.lockstep.programs, POISONS[self._loop.steps % 2]
        if isinstance(late, LatePrograms):  # what the host writes now would overtake steps under way
            late.before = lambda order: poison(self, self._memory, value, order)  # type: ignore[attr-defined]
        else:
            with torch.inference_mode():
                poison(self, self._memory, value)  # type: ignore[attr-defined]
        return take(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "__init__", __init__)
        patch.setattr(Engine, "step", step)
        yield
