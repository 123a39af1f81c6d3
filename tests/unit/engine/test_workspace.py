"""KV caches get what weights and the largest steps leave of a device; nothing runs out of memory after the start."""

import random
import re

import pytest
import torch

from cluster.config import ConfigError, EngineConfig
from cluster.engine import Engine, workspace
from cluster.engine.build import engine_of, prepare_alone
from cluster.engine.workspace import beside, needs_of, rehearsed
from cluster.kv import pool
from cluster.kv.budget import Needs
from cluster.mesh import Mesh
from cluster.request import Adjustments, Request, SamplingParams
from tests.device_memory import DeviceMemoryError, SimulatedMemory
from tests.parity.harness import VOCAB, tiny_pair

CONTEXT, BESIDE = 160, 100_000


@pytest.fixture(autouse=True)
def in_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools are seen by the simulated device, as torch makes them."""
    monkeypatch.setattr(pool, "zeros", lambda shape, dtype, device: torch.zeros(shape, dtype=dtype, device=device))


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
        "max_running_requests": 12,
        "chunked_prefill_size": 64,
        "mixed_prefill_size": 48,
    }
    return EngineConfig.from_kwargs(given | settings)


def started(total: int, **settings: object) -> tuple[Engine, SimulatedMemory]:
    memory = SimulatedMemory(total, BESIDE)
    with memory:
        prepared = prepare_alone(config(**settings), memory)
        return engine_of(prepared, prepared.draft()), memory


def crowd(count: int) -> list[Request]:
    """Requests of all kinds, as many and as long as there may be."""
    draw, requests = random.Random(5), []
    for index in range(count):
        prompt = tuple(draw.randrange(3, VOCAB) for _ in range(draw.choice([1, 20, 70, CONTEXT - 40])))
        params = SamplingParams(
            temperature=draw.choice([0.0, 1.0]),
            top_p=draw.choice([1.0, 0.9]),
            seed=index,
            max_tokens=30,
            ignore_eos=True,
            logprobs=draw.choice([None, 20]),
            prompt_logprobs=draw.choice([None, None, 5]),
            adjustments=draw.choice([None, Adjustments(presence_penalty=0.5)]),
        )
        requests.append(Request(f"r{index}", prompt, params))
    return requests


def serve(engine: Engine, memory: SimulatedMemory, requests: list[Request]) -> int:
    """Run the requests; how many tokens came."""
    tokens = 0
    with memory:
        for request in requests:
            engine.submit(request)
        while engine.has_work:
            tokens += sum(len(output.token_ids) for output in engine.step().outputs)
    return tokens


def test_nothing_runs_out_after_the_start_and_little_is_left_unused() -> None:
    total = 2_500_000
    engine, memory = started(total)
    info = engine.info()
    assert serve(engine, memory, crowd(20)) == 20 * 30
    kept = info.kv_tokens * info.kv_bytes_per_token
    assert "what is left: of 0.003 GB weights take" in info.kv_sized_by
    assert 0.8 * total < memory.most <= total
    assert kept > 0.2 * total


def test_a_cache_that_takes_all_there_is_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last check before serving, with a measurement that says nothing is needed."""
    monkeypatch.setattr(Needs, "left", property(lambda needs: needs.free - 200_000))
    with pytest.raises(ConfigError, match=r"largest steps do not fit beside the KV cache.*lower max_total_tokens"):
        started(2_500_000)
    monkeypatch.setattr(Needs, "left", property(lambda needs: needs.free))
    with pytest.raises(ConfigError, match=r"do not fit .*lower max_total_tokens"):
        started(1_900_000)


@pytest.mark.slow
def test_what_leaves_no_memory_says_what_to_lower_and_to_what() -> None:
    total = 2_400_000
    with pytest.raises(ConfigError, match="no memory is left for a KV cache") as refused:
        started(total, max_running_requests=32, chunked_prefill_size=128)
    words = str(refused.value)
    for part in ("weights take", "workspaces", "spare", "max_running_requests (now 32) to", "GB"):
        assert part in words
    fewer = int(re.search(r"max_running_requests \(now 32\) to (\d+)", words)[1])  # type: ignore[index]
    assert 1 <= fewer < 32
    engine, memory = started(total, max_running_requests=fewer, chunked_prefill_size=128)
    assert serve(engine, memory, [Request("one", (3, 4), SamplingParams(max_tokens=3, seed=1))]) == 3


class Plain:
    """A device where nothing is taken but what `measure` says."""

    total = 1000

    def free(self) -> int:
        return 500


@pytest.mark.parametrize(
    ("each", "row", "said"),
    [
        (40, 0, r"max_running_requests \(now 16\) to 10$"),
        (1, 8, r"chunked_prefill_size \(now 64\) to 49$"),
        (500, 500, r"context_length or the tree's size, or raise tp_size"),
    ],
)
def test_a_refusal_names_the_largest_that_fits(each: int, row: int, said: str) -> None:
    """500 bytes are free, 50 of them are for the smallest cache, and at least 10 stay spare."""
    settings = config(max_running_requests=16, chunked_prefill_size=64)

    def needs(most: int) -> Needs:
        measure = lambda requests, rows: requests * each + rows * row  # noqa: E731
        return needs_of(settings, CONTEXT, Mesh(), Plain(), 300, most, False, measure)  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match=r"no memory is left .*weights take.*" + said):
        needs(50)


@pytest.mark.parametrize(
    ("setting", "value", "unit"),
    [("max_total_tokens", 100_000, 1), ("kv_cache_gb", 0.5, 1e-4), ("mem_fraction_static", 0.99, 1e-4)],
)
def test_a_size_that_is_set_and_does_not_fit_says_which_does(setting: str, value: float, unit: float) -> None:
    total, least = 2_500_000, {"max_running_requests": 12, "context_length": CONTEXT}
    with pytest.raises(ConfigError, match=f"lower {setting} to") as refused:
        started(total, **{setting: value}, **least)
    fits = float(re.search(rf"lower {setting} to ([0-9.]+)", str(refused.value))[1])  # type: ignore[index]
    if setting == "kv_cache_gb":
        return  # in steps of 0.0001 GB, which this device has too little for
    engine, _ = started(total, **{setting: int(fits) if unit == 1 else fits})
    assert engine.info().kv_tokens > 0
    with pytest.raises(ConfigError):
        started(total, **{setting: int(fits * 1.03) if unit == 1 else fits + 0.02})


def test_captured_programs_leave_the_largest_steps_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program's memory is no other's, though nothing in it is in use between two replays."""
    memory = SimulatedMemory(400_000)
    monkeypatch.setattr(workspace, "run_largest", lambda *_: torch.zeros(25_000))

    def program(numbers: int) -> str:
        with memory.capturing():
            torch.zeros(numbers)
        return "captured"

    with memory:
        taken = rehearsed(None, config(), CONTEXT, memory, None)  # type: ignore[arg-type]
        assert 100_000 <= taken < 120_000
        assert beside(taken, lambda: program(40_000), Mesh(), memory) == "captured"
        with pytest.raises(ConfigError, match=r"too little for the largest steps.*lower .*capture_sizes"):
            beside(taken, lambda: program(45_000), Mesh(), memory)
        with pytest.raises(ConfigError, match=r"captured programs do not fit.*lower .*capture_sizes"):
            beside(taken, lambda: program(90_000), Mesh(), memory)


def test_weights_that_do_not_fit_are_refused_as_such() -> None:
    with pytest.raises(ConfigError, match="the weights do not fit the device"):
        started(BESIDE + 40_000)


def test_the_device_is_as_unkind_as_it_says() -> None:
    memory = SimulatedMemory(200_000, 0)
    with memory:
        memory.begin()
        small = [torch.zeros(500) for _ in range(12)]
        assert memory.taken() >= 24_000
        del small[::2]
        held = memory.reserved
        assert memory.allocated == 12_000 + 6 * ((-2000) % 16)
        large = torch.zeros(6000)
        assert memory.reserved > held, "what is free in cut blocks is of no use for large tensors"
        del large, small
        assert memory.free() == 200_000
        with memory.capturing():
            torch.zeros(6000)
        torch.zeros(6000)
        assert memory.allocated == 0 and memory.free() < 200_000 - 24_000, "a program's memory is its own"
        with pytest.raises(DeviceMemoryError):
            torch.zeros(60_000)
