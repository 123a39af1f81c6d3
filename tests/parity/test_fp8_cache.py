"""A cache in FP8 holds of each token what plain decoding stores of it, byte for byte, in every layer of target and
draft: after trees, chunks, shared pages and parts of pages, retraction and compaction.
"""

from collections.abc import Callable
from functools import cache

import pytest
from torch import Tensor

from cluster.config import EngineConfig
from cluster.engine import Engine, StepResult, build_engine
from cluster.request import Request
from tests.parity.harness import GREEDY, SAMPLING, config_of, prompts, request, run, scarce, tiny_pair
from tests.tables import held_slots
from tests.unit.kernels.library import c_serves

Held = dict[str, list[Tensor]]
SETTINGS = {"dtype": "float32", "attention_backend": "c", "kv_cache_dtype": "fp8_e4m3"}


def asked() -> list[Request]:
    """Prompts of which some share a beginning, and part within a page."""
    long = prompts()[0][:30]
    texts = [long, long[:14] + prompts()[2][:9], long[:23], prompts()[4], long[:14] + prompts()[3][:6]]
    return [
        request(f"r{at}", text, GREEDY if at % 2 else SAMPLING["0.8"], seed=at, max_tokens=14, ignore_eos=True)
        for at, text in enumerate(texts)
    ]


def held_by(engine: Engine, of_draft: bool, found: Held) -> Callable[[Engine, StepResult], None]:
    """Notes after every step what each running request has committed: `[layers, tokens, bytes]` of each pool."""
    step = engine._parts.lockstep.step
    pools = [step._target.pool, *([step._draft._runner.pool] if of_draft else [])]

    def note(engine: Engine, _: StepResult) -> None:
        for sequence in engine._parts.scheduler.running:
            if sequence.committed > sequence.lease.cached_tokens:
                slots = held_slots(engine._parts.cache.table, sequence.lease.row, sequence.committed)
                found[sequence.request.request_id] = [pool.kv[:, slots].clone() for pool in pools]

    return note


def ran(config: EngineConfig, requests: list[Request], of_draft: bool) -> tuple[Held, int, int]:
    """What was held at last, how many requests were retracted, and how many prompt tokens were found in the cache."""
    found: Held = {}
    engine = build_engine(config)
    result = run(engine, requests, held_by(engine, of_draft, found))
    return found, result.retracted, sum(output.cached_tokens for output in result.last.values())


@cache
def plain() -> Held:
    """Plain decoding, each request alone, its prompt at once."""
    found: Held = {}
    for one in asked():
        found |= ran(config_of(tiny_pair()[0], disable_radix_cache=True, **SETTINGS), [one], False)[0]
    return found


@cache
def chains() -> Held:
    """The same with a chain of one: the draft's cells are those of committed tokens alone."""
    found: Held = {}
    for one in asked():
        config = config_of(*tiny_pair(), 1, 1, disable_radix_cache=True, chunked_prefill_size=-1, **SETTINGS)
        found |= ran(config, [one], True)[0]
    return found


@pytest.mark.parametrize("memory", ["ample", "scarce"])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 7), (4, -1), (16, 7)])
def test_fp8_cache_holds_the_same_bytes_as_plain_decoding(page_size: int, chunk: int, memory: str) -> None:
    c_serves()
    config = config_of(*tiny_pair(), 4, 3, page_size=page_size, chunked_prefill_size=chunk, **SETTINGS)
    config = scarce(config, asked(), 2) if memory == "scarce" else config
    found, retracted, cached = ran(config, asked(), True)
    assert (retracted > 0) == (memory == "scarce") and cached > 0
    alone, drafts = plain(), chains()
    for name, (target, draft) in found.items():
        for own, wanted in ((target, alone[name][0]), (draft, drafts[name][1])):
            known = min(own.shape[1], wanted.shape[1]) - 1  # the draft's last cell awaits its token
            assert known > 10 and (own[:, :known] == wanted[:, :known]).all(), name
