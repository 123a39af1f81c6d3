"""KV caches get what weights and the largest steps leave of a device; nothing runs out of memory after the start."""

import random
import re
import weakref
from typing import Any

import pytest
import torch

from cluster.arch.resolve import resolve_models
from cluster.config import ConfigError, EngineConfig
from cluster.distributed.mesh import Mesh
from cluster.engine import Engine, build, workspace
from cluster.engine.build import engine_of, prepare_single_rank
from cluster.engine.memory import RankMemory
from cluster.engine.models import RankModels
from cluster.engine.programs import Programs
from cluster.engine.workspace import leave_room_for_steps, measure_largest_steps, measure_memory, memory_breakdown_of
from cluster.kv import pool
from cluster.kv.budget import MemoryBreakdown
from cluster.kv.device_memory import DeviceMemory
from cluster.request import LogitAdjustments, Request, RequestParams
from tests.device_memory import DeviceMemoryError, SimulatedMemory
from tests.parity.harness import VOCAB, run, tiny_pair

CONTEXT, NEW, BESIDE, TOTAL = 160, 16, 100_000, 1_500_000
MEASURED = dict[tuple[int, ...], MemoryBreakdown]()


@pytest.fixture(autouse=True)
def in_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools are seen by the simulated device, as torch makes them."""
    monkeypatch.setattr(pool, "zeros", lambda shape, dtype, device: torch.zeros(shape, dtype=dtype, device=device))


@pytest.fixture
def measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices alike, with as many requests and rows, have been measured by the first test that needs it."""

    def needs(models: RankModels, mesh: Mesh, device: object, memory: DeviceMemory, *more: Any) -> MemoryBreakdown:
        settings = models.resolved.settings
        key = memory.total_bytes, settings.max_running_requests, settings.chunked_prefill_size
        if key not in MEASURED:
            MEASURED[key] = measure_memory(models, mesh, device, memory, *more)  # type: ignore[arg-type]
        return MEASURED[key]

    monkeypatch.setattr(build, "measure_memory", needs)


def config(**settings: object) -> EngineConfig:
    target, draft = tiny_pair()
    given: dict[str, object] = {
        "model_path": target,
        "speculative_draft_model_path": draft,
        "speculative_eagle_topk": 3,
        "speculative_num_steps": 3,
        "dtype": "float32",
        "device": "cpu",
        "attention_backend": "torch",
        "capture": "off",
        "num_threads": 1,
        "context_length": CONTEXT,
        "page_size": 4,
        "max_running_requests": 6,
        "chunked_prefill_size": 32,
        "mixed_prefill_size": 24,
    }
    return EngineConfig.from_kwargs(given | settings)


def started(total: int, **settings: object) -> tuple[Engine, SimulatedMemory]:
    memory = SimulatedMemory(total, BESIDE)
    with memory:
        prepared = prepare_single_rank(config(**settings), memory)
        return engine_of(prepared, prepared.draft()), memory


def crowd(count: int) -> list[Request]:
    """Requests of all kinds, as many and as long as there may be."""
    draw, requests = random.Random(5), []
    for index in range(count):
        prompt = tuple(draw.randrange(3, VOCAB) for _ in range(draw.choice([1, 20, 45, CONTEXT - NEW])))
        params = RequestParams(
            temperature=draw.choice([0.0, 1.0]),
            top_p=draw.choice([1.0, 0.9]),
            seed=index,
            max_tokens=NEW,
            ignore_eos=True,
            logprobs=draw.choice([None, 20]),
            prompt_logprobs=draw.choice([None, None, 5]),
            adjustments=draw.choice([None, LogitAdjustments(presence_penalty=0.5)]),
        )
        requests.append(Request(f"r{index}", prompt, params))
    return requests


def serve(engine: Engine, memory: SimulatedMemory, requests: list[Request]) -> int:
    """Run the requests; how many tokens came."""
    with memory:
        return sum(map(len, run(engine, requests).tokens.values()))


def test_engine_serves_within_memory_and_kv_cache_uses_most_free_memory() -> None:
    engine, memory = started(TOTAL)
    info = engine.info()
    assert serve(engine, memory, crowd(10)) == 10 * NEW
    kept = info.kv_tokens * info.kv_bytes_per_token
    assert "what is left: of 0.002 GB weights take" in info.kv_sized_by
    assert 0.8 * TOTAL < memory.most <= TOTAL
    assert kept > 0.2 * TOTAL


@pytest.mark.slow
@pytest.mark.usefixtures("measured_once")
def test_kv_cache_without_space_for_the_largest_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last check before serving, with a measurement that says nothing is needed."""
    monkeypatch.setattr(MemoryBreakdown, "kv_bytes", property(lambda needs: needs.free - 150_000))
    with pytest.raises(ConfigError, match=r"largest steps do not fit beside the KV cache.*lower max_total_tokens"):
        started(TOTAL, max_total_tokens=1500)
    monkeypatch.setattr(MemoryBreakdown, "kv_bytes", property(lambda needs: needs.free + 100_000))
    with pytest.raises(ConfigError, match=r"KV caches do not fit .*lower max_total_tokens"):
        started(TOTAL, max_total_tokens=1840)


@pytest.mark.slow
def test_refused_start_suggests_a_max_running_requests_value_that_works() -> None:
    total = 2_400_000
    with pytest.raises(ConfigError, match="no memory is left for a KV cache") as refused:
        started(total, max_running_requests=32, chunked_prefill_size=128)
    words = str(refused.value)
    for part in ("weights take", "workspaces", "spare", "max_running_requests (now 32) to", "GB"):
        assert part in words
    fewer = int(re.search(r"max_running_requests \(now 32\) to (\d+)", words)[1])  # type: ignore[index]
    assert 1 <= fewer < 32
    engine, memory = started(total, max_running_requests=fewer, chunked_prefill_size=128)
    assert serve(engine, memory, [Request("one", (3, 4), RequestParams(max_tokens=3, seed=1))]) == 3


@pytest.mark.slow
def test_trial_programs_are_freed_before_the_kv_cache_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its programs too, and so the memory that they have for themselves."""
    made, alive = list[weakref.ref[Programs]](), list[int]()
    begin, make = Programs.__init__, build.allocate

    def begun(programs: Programs, *given: Any) -> None:
        made.append(weakref.ref(programs))
        begin(programs, *given)

    def allocate(*given: Any) -> RankMemory:
        alive.append(sum(one() is not None for one in made))
        return make(*given)

    monkeypatch.setattr(Programs, "__init__", begun)
    monkeypatch.setattr(build, "allocate", allocate)
    memory = SimulatedMemory(2_500_000, BESIDE)
    with memory:
        prepare_single_rank(config(capture="on"), memory)
    assert len(made) == 2 and alive == [0]


@pytest.mark.parametrize(
    ("each", "row", "said"),
    [
        (40, 0, r"max_running_requests \(now 16\) to 10$"),
        (1, 8, r"chunked_prefill_size \(now 64\) to 49$"),
        (500, 500, r"context_length or the tree's size, or raise tp_size"),
    ],
)
def test_memory_refusal_names_the_largest_setting_that_fits(each: int, row: int, said: str) -> None:
    """500 bytes are free, 50 of them are for the smallest cache, and at least 10 stay spare."""
    resolved = resolve_models(config(max_running_requests=16, chunked_prefill_size=64))

    def own(workspace: int) -> MemoryBreakdown:
        return MemoryBreakdown(1000, 500, 300, workspace, 0)

    with pytest.raises(ConfigError, match=r"no memory is left .*weights take.*" + said):
        memory_breakdown_of(resolved, Mesh(), 50, own, lambda requests, rows: requests * each + rows * row)


@pytest.mark.slow
@pytest.mark.usefixtures("measured_once")
def test_too_large_max_total_tokens_is_refused_with_a_value_that_fits() -> None:
    """What is said of the other settings: tests/unit/kv/test_budget.py."""
    with pytest.raises(ConfigError, match="lower max_total_tokens to") as refused:
        started(TOTAL, max_total_tokens=10**5)
    fits = int(re.search(r"lower max_total_tokens to (\d+),", str(refused.value))[1])  # type: ignore[index]
    engine, _ = started(TOTAL, max_total_tokens=fits)
    assert engine.info().kv_tokens >= fits - 4
    with pytest.raises(ConfigError, match="lower max_total_tokens to"):
        started(TOTAL, max_total_tokens=fits + 200)


@pytest.mark.slow
def test_captured_programs_must_leave_memory_for_the_largest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program's memory is no other's, though nothing in it is in use between two replays."""
    memory = SimulatedMemory(400_000)
    monkeypatch.setattr(workspace, "run_largest", lambda *_: torch.zeros(25_000))

    def program(numbers: int) -> str:
        with memory.capturing():
            torch.zeros(numbers)
        return "captured"

    with memory:
        taken = measure_largest_steps(None, None, memory, None)  # type: ignore[arg-type]
        assert 100_000 <= taken < 120_000
        assert leave_room_for_steps(taken, lambda: program(40_000), Mesh(), memory) == "captured"
        with pytest.raises(ConfigError, match=r"too little for the largest steps.*lower .*capture_sizes"):
            leave_room_for_steps(taken, lambda: program(45_000), Mesh(), memory)
        with pytest.raises(ConfigError, match=r"captured programs do not fit.*lower .*capture_sizes"):
            leave_room_for_steps(taken, lambda: program(90_000), Mesh(), memory)


@pytest.mark.usefixtures("measured_once")
def test_weight_size_excludes_temporary_memory_of_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    true = build.load_models

    def load(*given: Any) -> RankModels:
        models = true(*given)
        torch.zeros(100_000)
        return models

    monkeypatch.setattr(build, "load_models", load)
    memory = SimulatedMemory(TOTAL, BESIDE)
    with memory:
        assert 0 < prepare_single_rank(config(max_total_tokens=200), memory).weights < 400_000


def test_weights_larger_than_the_device_are_refused() -> None:
    with pytest.raises(ConfigError, match="the weights do not fit the device"):
        started(BESIDE + 40_000)


def test_simulated_memory_models_fragmentation_and_private_program_memory() -> None:
    memory = SimulatedMemory(200_000, 0)
    with memory:
        memory.reset_peak()
        small = [torch.zeros(500) for _ in range(12)]
        assert memory.peak_bytes() >= 24_000
        del small[::2]
        held = memory.reserved
        assert memory.allocated == 12_000 + 6 * ((-2000) % 16)
        large = torch.zeros(6000)
        assert memory.reserved > held, "what is free in cut blocks is of no use for large tensors"
        del large, small
        assert memory.free_bytes() == 200_000
        with memory.capturing():
            torch.zeros(6000)
        torch.zeros(6000)
        assert memory.allocated == 0 and memory.free_bytes() < 200_000 - 24_000, "a program's memory is its own"
        with pytest.raises(DeviceMemoryError):
            torch.zeros(60_000)
