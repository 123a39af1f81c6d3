"""A KV cache in FP8 holds for each token the same bytes as in plain decoding, in every layer of target and draft. This
is tested with trees, chunks, shared pages and partly shared pages, retraction and compaction.
"""

from collections.abc import Callable
from functools import cache

import pytest
from torch import Tensor

from cluster.config import EngineConfig
from cluster.engine import Engine, StepResult, build_engine
from cluster.request import Request
from tests.parity.harness import GREEDY, SAMPLING, config_of, make_request, prompts, run, scarce_config, tiny_pair
from tests.support.page_tables import held_slots
from tests.unit.kernels.library import skip_unless_c_backend

StoredCells = dict[str, list[Tensor]]
SETTINGS = {"dtype": "float32", "attention_backend": "c", "kv_cache_dtype": "fp8_e4m3"}


def shared_prefix_requests() -> list[Request]:
    """Return five requests. Four of the prompts share a prefix of 14 or 23 tokens, which ends inside a page."""
    long_prompt = prompts()[0][:30]
    prompt_list = [
        long_prompt,
        long_prompt[:14] + prompts()[2][:9],
        long_prompt[:23],
        prompts()[4],
        long_prompt[:14] + prompts()[3][:6],
    ]
    return [
        make_request(
            f"r{index}", prompt, GREEDY if index % 2 else SAMPLING["0.8"], seed=index, max_tokens=14, ignore_eos=True
        )
        for index, prompt in enumerate(prompt_list)
    ]


def cell_recorder(
    engine: Engine, include_draft: bool, stored_cells: StoredCells
) -> Callable[[Engine, StepResult], None]:
    """Return a callback for after each step. It stores in `stored_cells` the committed cells of each running request:
    for each pool a tensor `[layers, tokens, bytes]`.
    """
    step = engine._parts.lockstep.step
    pools = [*step._target.pools.all, *(step._draft._runner.pools.all if include_draft else [])]

    def note(engine: Engine, _: StepResult) -> None:
        for sequence in engine._parts.scheduler.running:
            if sequence.committed > sequence.lease.cached_tokens:
                slots = held_slots(engine._parts.cache.table, sequence.lease.row, sequence.committed)
                stored_cells[sequence.request.request_id] = [pool.kv[:, slots].clone() for pool in pools]

    return note


def run_recording_cells(
    config: EngineConfig, requests: list[Request], include_draft: bool
) -> tuple[StoredCells, int, int]:
    """Run the requests. Return the cells recorded last for each, the number of retractions, and the number of cached
    prompt tokens.
    """
    stored_cells: StoredCells = {}
    engine = build_engine(config)
    result = run(engine, requests, cell_recorder(engine, include_draft, stored_cells))
    return stored_cells, result.retracted, sum(output.cached_tokens for output in result.last.values())


@cache
def plain_cells() -> StoredCells:
    """The oracle of the target's cells: plain decoding of the requests, one by one, each prompt in one chunk."""
    stored_cells: StoredCells = {}
    for request in shared_prefix_requests():
        stored_cells |= run_recording_cells(
            config_of(tiny_pair()[0], disable_radix_cache=True, **SETTINGS), [request], False
        )[0]
    return stored_cells


@cache
def chain_cells() -> StoredCells:
    """The oracle of the draft's cells: the same with chains of one drafted token. The draft's pool then holds cells of
    committed tokens only.
    """
    stored_cells: StoredCells = {}
    for request in shared_prefix_requests():
        config = config_of(*tiny_pair(), 1, 1, disable_radix_cache=True, chunked_prefill_size=-1, **SETTINGS)
        stored_cells |= run_recording_cells(config, [request], True)[0]
    return stored_cells


@pytest.mark.parametrize("memory", ["ample", "scarce"])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 7), (4, -1), (16, 7)])
def test_fp8_cache_holds_the_same_bytes_as_plain_decoding(page_size: int, chunk: int, memory: str) -> None:
    skip_unless_c_backend()
    config = config_of(*tiny_pair(), 4, 3, page_size=page_size, chunked_prefill_size=chunk, **SETTINGS)
    config = scarce_config(config, shared_prefix_requests(), 2) if memory == "scarce" else config
    stored_cells, retracted, cached = run_recording_cells(config, shared_prefix_requests(), True)
    assert (retracted > 0) == (memory == "scarce") and cached > 0
    expected_target, expected_draft = plain_cells(), chain_cells()
    request_ids = {request.request_id for request in shared_prefix_requests()}
    assert stored_cells.keys() == expected_target.keys() == expected_draft.keys() == request_ids
    for name, (target, draft) in stored_cells.items():
        for stored, expected in ((target, expected_target[name][0]), (draft, expected_draft[name][1])):
            known_count = (
                min(stored.shape[1], expected.shape[1]) - 1
            )  # the draft's last cell still needs its next token
            assert known_count > 10 and (stored[:, :known_count] == expected[:, :known_count]).all(), name
