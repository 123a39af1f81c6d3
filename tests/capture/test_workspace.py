"""The KV cache gets the device memory that the weights and the largest steps leave. After the start the engine never
runs out of memory.
"""

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
from tests.parity.harness import VOCAB, run, tiny_pair
from tests.support.limited_device import DeviceMemoryError, SimulatedMemory

CONTEXT, NEW_TOKENS, OTHER_BYTES, DEVICE_BYTES = 160, 16, 100_000, 1_500_000
MEASURED_BREAKDOWNS = dict[tuple[int, ...], MemoryBreakdown]()


@pytest.fixture(autouse=True)
def pools_in_simulated_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch allocate the KV pools, so that they take memory of the simulated device."""
    monkeypatch.setattr(pool, "zeros", lambda shape, dtype, device: torch.zeros(shape, dtype=dtype, device=device))


@pytest.fixture
def measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reuse the measurement of an earlier test with the same device memory and equal numbers of requests and rows."""

    def measure_or_reuse(
        models: RankModels, mesh: Mesh, device: object, memory: DeviceMemory, *arguments: Any
    ) -> MemoryBreakdown:
        settings = models.resolved.settings
        key = memory.total_bytes, settings.max_running_requests, settings.chunked_prefill_size
        if key not in MEASURED_BREAKDOWNS:
            MEASURED_BREAKDOWNS[key] = measure_memory(models, mesh, device, memory, *arguments)  # type: ignore[arg-type]
        return MEASURED_BREAKDOWNS[key]

    monkeypatch.setattr(build, "measure_memory", measure_or_reuse)


def config(**settings: object) -> EngineConfig:
    target, draft = tiny_pair()
    default_settings: dict[str, object] = {
        "model_path": target,
        "speculative_draft_model_path": draft,
        "speculative_eagle_topk": 3,
        "speculative_num_steps": 3,
        "speculative_mode": "fixed",  # as on a GPU, for which memory is measured
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
    return EngineConfig.from_kwargs(default_settings | settings)


def start_engine(device_bytes: int, **settings: object) -> tuple[Engine, SimulatedMemory]:
    """Start an engine on a simulated device of `device_bytes`; return the engine and the device."""
    memory = SimulatedMemory(device_bytes, OTHER_BYTES)
    with memory:
        prepared = prepare_single_rank(config(**settings), memory)
        return engine_of(prepared, prepared.draft()), memory


def mixed_requests(count: int) -> list[Request]:
    """`count` requests with random sampling parameters and prompts of random length, up to the longest allowed."""
    generator, requests = random.Random(5), []
    for index in range(count):
        prompt = tuple(
            generator.randrange(3, VOCAB) for _ in range(generator.choice([1, 20, 45, CONTEXT - NEW_TOKENS]))
        )
        params = RequestParams(
            temperature=generator.choice([0.0, 1.0]),
            top_p=generator.choice([1.0, 0.9]),
            seed=index,
            max_tokens=NEW_TOKENS,
            ignore_eos=True,
            logprobs=generator.choice([None, 20]),
            prompt_logprobs=generator.choice([None, None, 5]),
            adjustments=generator.choice([None, LogitAdjustments(presence_penalty=0.5)]),
        )
        requests.append(Request(f"r{index}", prompt, params))
    return requests


def serve(engine: Engine, memory: SimulatedMemory, requests: list[Request]) -> int:
    """Run the requests; return the number of generated tokens."""
    with memory:
        return sum(map(len, run(engine, requests).tokens.values()))


def test_engine_serves_within_memory_and_kv_cache_uses_most_free_memory() -> None:
    engine, memory = start_engine(DEVICE_BYTES)
    info = engine.info()
    assert serve(engine, memory, mixed_requests(10)) == 10 * NEW_TOKENS
    kv_bytes = info.kv_tokens * info.kv_bytes_per_token
    assert "what is left: of 0.002 GB weights take" in info.kv_sized_by
    assert 0.8 * DEVICE_BYTES < memory.peak_total_bytes <= DEVICE_BYTES
    assert kv_bytes > 0.2 * DEVICE_BYTES


@pytest.mark.slow
@pytest.mark.usefixtures("measured_once")
def test_kv_cache_without_space_for_the_largest_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last check before serving refuses the KV cache, after a faked measurement that leaves too much
    memory for it.
    """
    monkeypatch.setattr(MemoryBreakdown, "kv_bytes", property(lambda needs: needs.free - 150_000))
    with pytest.raises(ConfigError, match=r"largest steps do not fit beside the KV cache.*lower max_total_tokens"):
        start_engine(DEVICE_BYTES, max_total_tokens=1500)
    monkeypatch.setattr(MemoryBreakdown, "kv_bytes", property(lambda needs: needs.free + 100_000))
    with pytest.raises(ConfigError, match=r"KV caches do not fit .*lower max_total_tokens"):
        start_engine(DEVICE_BYTES, max_total_tokens=1840)


@pytest.mark.slow
def test_refused_start_suggests_a_max_running_requests_value_that_works() -> None:
    device_bytes = 2_400_000
    with pytest.raises(ConfigError, match="no memory is left for a KV cache") as captured_error:
        start_engine(device_bytes, max_running_requests=32, chunked_prefill_size=128)
    message = str(captured_error.value)
    for part in ("weights take", "workspaces", "spare", "max_running_requests (now 32) to", "GB"):
        assert part in message
    suggested_requests = int(re.search(r"max_running_requests \(now 32\) to (\d+)", message)[1])  # type: ignore[index]
    assert 1 <= suggested_requests < 32
    engine, memory = start_engine(device_bytes, max_running_requests=suggested_requests, chunked_prefill_size=128)
    assert serve(engine, memory, [Request("one", (3, 4), RequestParams(max_tokens=3, seed=1))]) == 3


@pytest.mark.slow
def test_trial_programs_are_freed_before_the_kv_cache_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial run frees its captured programs too, and so the memory that belongs to them."""
    program_refs, living_program_counts = list[weakref.ref[Programs]](), list[int]()
    original_init, original_allocate = Programs.__init__, build.allocate

    def record_program(programs: Programs, *arguments: Any) -> None:
        program_refs.append(weakref.ref(programs))
        original_init(programs, *arguments)

    def allocate(*arguments: Any) -> RankMemory:
        living_program_counts.append(sum(program_ref() is not None for program_ref in program_refs))
        return original_allocate(*arguments)

    monkeypatch.setattr(Programs, "__init__", record_program)
    monkeypatch.setattr(build, "allocate", allocate)
    memory = SimulatedMemory(2_500_000, OTHER_BYTES)
    with memory:
        prepare_single_rank(config(capture="on"), memory)
    assert len(program_refs) == 2 and living_program_counts == [0]


@pytest.mark.parametrize(
    ("request_bytes", "row_bytes", "suggestion"),
    [
        (40, 0, r"max_running_requests \(now 16\) to 10$"),
        (1, 8, r"chunked_prefill_size \(now 64\) to 49$"),
        (500, 500, r"context_length or the tree's size, or raise tp_size"),
    ],
)
def test_memory_refusal_names_the_largest_setting_that_fits(
    request_bytes: int, row_bytes: int, suggestion: str
) -> None:
    """500 bytes are free. The smallest KV cache takes 50 of them, and at least 10 stay spare."""
    resolved = resolve_models(config(max_running_requests=16, chunked_prefill_size=64))

    def breakdown_with_workspace(workspace: int) -> MemoryBreakdown:
        return MemoryBreakdown(1000, 500, 300, workspace, 0)

    with pytest.raises(ConfigError, match=r"no memory is left .*weights take.*" + suggestion):
        memory_breakdown_of(
            resolved,
            Mesh(),
            50,
            breakdown_with_workspace,
            lambda requests, rows: requests * request_bytes + rows * row_bytes,
        )


@pytest.mark.slow
@pytest.mark.usefixtures("measured_once")
def test_too_large_max_total_tokens_is_refused_with_a_value_that_fits() -> None:
    """For the messages about other settings see tests/unit/kv/test_budget.py."""
    with pytest.raises(ConfigError, match="lower max_total_tokens to") as captured_error:
        start_engine(DEVICE_BYTES, max_total_tokens=10**5)
    fitting_tokens = int(re.search(r"lower max_total_tokens to (\d+),", str(captured_error.value))[1])  # type: ignore[index]
    engine, _ = start_engine(DEVICE_BYTES, max_total_tokens=fitting_tokens)
    assert engine.info().kv_tokens >= fitting_tokens - 4
    with pytest.raises(ConfigError, match="lower max_total_tokens to"):
        start_engine(DEVICE_BYTES, max_total_tokens=fitting_tokens + 200)


@pytest.mark.slow
def test_captured_programs_must_leave_memory_for_the_largest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a captured program cannot be used for anything else, even between two replays."""
    memory = SimulatedMemory(400_000)
    monkeypatch.setattr(workspace, "run_largest", lambda *_: torch.zeros(25_000))

    def capture_program(element_count: int) -> str:
        with memory.capturing():
            torch.zeros(element_count)
        return "captured"

    with memory:
        largest_step_bytes = measure_largest_steps(None, None, memory, None)  # type: ignore[arg-type]
        assert 100_000 <= largest_step_bytes < 120_000
        assert leave_room_for_steps(largest_step_bytes, lambda: capture_program(40_000), Mesh(), memory) == "captured"
        with pytest.raises(ConfigError, match=r"too little for the largest steps.*lower .*capture_sizes"):
            leave_room_for_steps(largest_step_bytes, lambda: capture_program(45_000), Mesh(), memory)
        with pytest.raises(ConfigError, match=r"captured programs do not fit.*lower .*capture_sizes"):
            leave_room_for_steps(largest_step_bytes, lambda: capture_program(90_000), Mesh(), memory)


@pytest.mark.usefixtures("measured_once")
def test_weight_size_excludes_temporary_memory_of_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    original_load = build.load_models

    def load_with_temporary(*arguments: Any) -> RankModels:
        models = original_load(*arguments)
        torch.zeros(100_000)
        return models

    monkeypatch.setattr(build, "load_models", load_with_temporary)
    memory = SimulatedMemory(DEVICE_BYTES, OTHER_BYTES)
    with memory:
        assert 0 < prepare_single_rank(config(max_total_tokens=200), memory).weights < 400_000


def test_weights_larger_than_the_device_are_refused() -> None:
    with pytest.raises(ConfigError, match="the weights do not fit the device"):
        start_engine(OTHER_BYTES + 40_000)


def test_simulated_memory_models_fragmentation_and_private_program_memory() -> None:
    memory = SimulatedMemory(200_000, 0)
    with memory:
        memory.reset_peak()
        small = [torch.zeros(500) for _ in range(12)]
        assert memory.peak_bytes() >= 24_000
        del small[::2]
        reserved_before = memory.reserved
        assert memory.allocated == 12_000 + 6 * ((-2000) % 16)
        large = torch.zeros(6000)
        assert memory.reserved > reserved_before, "a large tensor must not fit into free pieces of split blocks"
        del large, small
        assert memory.free_bytes() == 200_000
        with memory.capturing():
            torch.zeros(6000)
        torch.zeros(6000)
        assert memory.allocated == 0 and memory.free_bytes() < 200_000 - 24_000, "program memory was reused"
        with pytest.raises(DeviceMemoryError):
            torch.zeros(60_000)
