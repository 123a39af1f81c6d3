"""Before every step of every engine, fill the memory that the step must not read with NaN or infinity.

This is on in every package whose conftest.py imports the fixture `poison_unused_memory`. Without it, a step that reads
cells which were never written would find zeros, masked or not, and no test would notice.
"""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from cluster.batch import StepInput
from cluster.engine import Engine, StepResult
from cluster.kv.pool import KVPool
from tests.support.late_device import LatePrograms
from tests.support.page_tables import held_slots

EMPTY_STEP_INPUT = StepInput()
POISONS = (math.nan, math.inf)
"""The values with which memory is filled. They alternate from step to step."""
FP8_NAN_BYTE = 255
"""The byte with which an FP8 cache is filled. A code of this byte, and a scale of this byte, is not a number."""


def tensors_by_slot(engine: Engine) -> list[Tensor]:
    """Return all tensors of the engine's models that have an entry per slot. Their first dimension is the slot."""
    step = engine._parts.lockstep.step
    draft = step._draft
    runners = getattr(draft, "_runners", [draft._runner] if hasattr(draft, "_runner") else [])
    pools = [pool for runner in (step._target, *runners) for pool in runner.pools.other_pools]
    return [pool.kv.transpose(0, 1) for pool in pools] + list(getattr(draft, "_passed_hidden", ()))


def written_slots(engine: Engine) -> Tensor:
    """Return a mask of the slots that hold data: the pages of the radix tree, and the committed tokens of running
    requests.
    """
    cache = engine._parts.cache
    is_written = torch.zeros((cache.total_pages + 1) * cache.page_size, dtype=torch.bool)
    is_written.view(cache.total_pages + 1, cache.page_size)[[node.page for node in cache._tree.nodes()]] = True
    for sequence in engine._parts.scheduler.running:
        is_written[held_slots(cache.table, sequence.row, sequence.committed)] = True
    return is_written


def window_pools(engine: Engine) -> list[KVPool]:
    """Return all window pools of the engine's models."""
    step = engine._parts.lockstep.step
    draft = step._draft
    runners = getattr(draft, "_runners", [draft._runner] if hasattr(draft, "_runner") else [])
    return [pool for runner in (step._target, *runners) for pool in runner.pools.window_pools]


def poison_window_pools(engine: Engine, is_kept: Tensor, value: float) -> None:
    """Fill with `value` the slots of window pools that belong to no slot in the mask `is_kept` of the other pools. The
    map of the host and that of the device both count, as the device learns of changes later. The sink page is not
    filled: pages that a request has given up are this page, so it must hold numbers.
    """
    for pool in window_pools(engine):
        assert pool.window_map is not None
        size, is_kept_own = pool.window_map.page_size, torch.zeros(pool.slots, dtype=torch.bool)
        pages = is_kept.view(-1, size).any(1)
        for window_pages in (torch.tensor(pool.window_map.host_pages), pool.window_map.device_pages.long()):
            kept = window_pages[pages]
            is_kept_own.view(-1, size)[kept] |= is_kept.view(-1, size)[pages]
        is_kept_own[:size] = True
        free = (~is_kept_own).nonzero()[:, 0]
        pool.kv.index_fill_(1, free, value if pool.kv.is_floating_point() else FP8_NAN_BYTE)


def poison(engine: Engine, slot_tensors: list[Tensor], value: float, step_input: StepInput = EMPTY_STEP_INPUT) -> None:
    """Fill unused memory with `value`: the sink page, all free pages, the free ends of used pages, and the draft input
    of the idle row. `step_input` belongs to a step that runs late: the slots that this step reads are kept, even if the
    host has released them meanwhile.
    """
    is_kept, table = written_slots(engine), engine._parts.cache.table
    size = table.page_size
    for copy in step_input.copies:
        is_kept[copy.source * size : copy.source * size + copy.tokens] = True
    kept_lengths = [(decode.row, int(table.lens[decode.row])) for decode in step_input.decodes]
    assert all(decode.min_seq_len <= count for decode, (_, count) in zip(step_input.decodes, kept_lengths, strict=True))
    for row, count in kept_lengths + [(chunk.row, chunk.start) for chunk in step_input.chunks]:
        is_kept[table.first_slots(torch.tensor([row]), min(count, table.host_pages.shape[1] * size))] = True
    poison_window_pools(engine, is_kept, value)
    is_kept[:size] = False  # the sink page
    free = (~is_kept).nonzero()[:, 0]
    for slot_tensor in slot_tensors:
        slot_tensor.index_fill_(0, free, value if slot_tensor.is_floating_point() else FP8_NAN_BYTE)
    draft_inputs, idle_row = engine._parts.lockstep.step.draft_inputs, engine._parts.cache.table.idle_row
    draft_inputs.hidden[idle_row] = value
    draft_inputs.topk_logprobs[idle_row] = value


@pytest.fixture(scope="package", autouse=True)
def poison_unused_memory() -> Iterator[None]:
    """Poison unused memory before each step of every engine that the tests of this package build."""
    original_init, original_step = Engine.__init__, Engine.step

    def __init__(self: Engine, *args: object) -> None:
        original_init(self, *args)  # type: ignore[arg-type]
        self._memory = tensors_by_slot(self)  # type: ignore[attr-defined]

    def step(self: Engine) -> StepResult:
        programs, value = self._parts.lockstep.programs, POISONS[self._loop.steps % 2]
        if isinstance(programs, LatePrograms):  # to write now would change memory of the steps under way
            programs.before_step = lambda step_input: poison(self, self._memory, value, step_input)  # type: ignore[attr-defined]
        else:
            with torch.inference_mode():
                poison(self, self._memory, value)  # type: ignore[attr-defined]
        return original_step(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "__init__", __init__)
        patch.setattr(Engine, "step", step)
        yield
