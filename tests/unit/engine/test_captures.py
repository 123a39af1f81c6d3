"""Which steps are captured, by device, kernels and settings, and at which sizes; and the capture of CUDA graphs."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from cluster.arch import read_target
from cluster.arch.resolve import resolve_models
from cluster.capture.cuda_graph import Graph
from cluster.capture.tape import Tape
from cluster.config import ConfigError
from cluster.device.wait_hook import wait_hook_set
from cluster.distributed.mesh import Axis, Mesh
from cluster.dp_attention.sizes import multiples, sizes_up_to
from cluster.engine import build_engine, captures
from cluster.engine.captures import Decoding, buckets_of, captures_of, decoding_steps, row_bytes
from tests.parity.harness import SAMPLING, config_of, make_request, run, tiny_pair
from tests.support.families import random_model

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
TWO_GROUPS = Mesh(world=Axis(0, 4), attn=Axis(0, 2))


def fake_models(name: str, experts: bool = False, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return fake `RankModels` whose kernels are called `name`."""
    flashinfer = object() if name == "flashinfer" else None
    kernels = SimpleNamespace(name=name, flashinfer=flashinfer, library=None)
    resolved = SimpleNamespace(experts=(object() if experts else None, None))
    return SimpleNamespace(kernels=kernels, dtype=dtype, resolved=resolved)


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "CudaSegments", object)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


@pytest.mark.parametrize("capture", ["auto", "on"])
def test_triton_kernels_are_captured_on_cuda(capture: str) -> None:
    selected = captures_of(config_of(tiny_pair()[0], capture=capture), CUDA, fake_models("triton"), Mesh())
    assert selected is not None and selected.buckets.sizes == sizes_up_to(512) and not selected.buckets.equal_sizes
    assert selected.buckets.allow_prompts == (capture == "on")


@pytest.mark.parametrize(
    ("name", "ranks", "reason"),
    [("torch", 1, "as far as the longest"), ("flashinfer", 2, "a rank whose plan .* would run eagerly")],
)
def test_backend_without_graph_support_runs_eagerly_or_is_refused_with_capture_on(
    name: str, ranks: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    mesh = Mesh(world=Axis(0, ranks), attn=Axis(0, ranks))
    with caplog.at_level("INFO"):
        assert captures_of(config_of(tiny_pair()[0], capture="auto"), CUDA, fake_models(name), mesh) is None
    assert re.search(reason, caplog.text)
    with pytest.raises(ConfigError, match=f"capture on: .*{reason}.*set attention_backend to triton"):
        captures_of(config_of(tiny_pair()[0], capture="on"), CUDA, fake_models(name), mesh)


def test_flashinfer_decode_steps_are_captured_only_with_capture_on(caplog: pytest.LogCaptureFixture) -> None:
    selected = captures_of(config_of(tiny_pair()[0], capture="on"), CUDA, fake_models("flashinfer"), Mesh())
    assert selected is not None and selected.buckets.sizes == sizes_up_to(512) and not selected.buckets.allow_prompts
    with caplog.at_level("INFO"):
        assert captures_of(config_of(tiny_pair()[0], capture="auto"), CUDA, fake_models("flashinfer"), Mesh()) is None
    assert "have not run on a GPU yet; capture on captures steps that decode" in caplog.text


def test_groups_with_exact_dp_padding_are_not_captured() -> None:
    for capture in ("auto", "on"):
        config = config_of(tiny_pair()[0], capture=capture, dp_padding="exact")
        assert captures_of(config, CUDA, fake_models("triton"), Mesh()) is not None, "one group is captured"
        if capture == "auto":
            assert captures_of(config, CUDA, fake_models("triton"), TWO_GROUPS) is None
            continue
        with pytest.raises(ConfigError, match=r"different sizes.*set dp_padding to auto or padded"):
            captures_of(config, CUDA, fake_models("triton"), TWO_GROUPS)


@pytest.mark.parametrize(("dtype", "capability"), [(torch.float16, (9, 0)), (torch.bfloat16, (8, 0))])
def test_experts_with_host_synchronizing_products_are_not_captured(
    dtype: torch.dtype, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA refuses to wait for the host while a graph is captured, so the server would not start."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    remedy = "dtype to bfloat16, or " if dtype == torch.float16 else ""
    auto, on = (config_of(tiny_pair()[0], capture=capture) for capture in ("auto", "on"))
    assert captures_of(auto, CUDA, fake_models("triton", False, dtype), Mesh()) is not None
    assert captures_of(auto, CUDA, fake_models("triton", True, dtype), Mesh()) is None
    with pytest.raises(
        ConfigError, match=rf"products of experts wait for the host.*; set {remedy}capture to auto or off"
    ):
        captures_of(on, CUDA, fake_models("triton", True, dtype), Mesh())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert captures_of(on, CUDA, fake_models("triton", True), Mesh()) is not None


def test_capture_off_captures_nothing() -> None:
    for name in ("triton", "torch", "flashinfer"):
        assert captures_of(config_of(tiny_pair()[0], capture="off"), CUDA, fake_models(name), Mesh()) is None


def test_cpu_capture_uses_tapes_of_exact_sizes() -> None:
    selected = captures_of(config_of(tiny_pair()[0], capture="on"), CPU, fake_models("torch"), TWO_GROUPS)
    assert selected is not None
    tapes = [selected.capture(cast(Any, lambda: torch.ones(3) + 1)) for _ in range(2)]
    assert all(isinstance(tape, Tape) for tape in tapes) and tapes[0].bytes > tapes[1].bytes, "tapes share memory"
    assert selected.buckets.sizes == () and not selected.buckets.equal_sizes and selected.buckets.allow_prompts


def test_capture_sizes_are_multiples_of_the_group_size_with_several_groups() -> None:
    buckets = buckets_of(config_of(tiny_pair()[0], capture="on"), CUDA, TWO_GROUPS)
    assert buckets.equal_sizes and all(size % 2 == 0 for size in buckets.sizes)
    assert buckets.sizes == multiples(sizes_up_to(512), 2) and buckets.sizes[:4] == (2, 4, 6, 8)
    config = config_of(tiny_pair()[0], capture="on", capture_sizes=(2, 3))
    with pytest.raises(ConfigError, match=r"capture_sizes has 3, .* give multiples of 2"):
        buckets_of(config, CUDA, TWO_GROUPS)
    assert buckets_of(config, CUDA, Mesh(world=Axis(0, 2), attn=Axis(0, 2))).sizes == (2, 3), "one group"


class RecordingSegments:
    """Fake `CudaSegments` that record in `events` when they begin, end, launch and drop. `fails`: `begin` raises."""

    def __init__(self, fails: bool = False) -> None:
        self.events: list[str] = []
        self._fails = fails

    def ready(self) -> None:
        self.events.append("ready")

    def begin(self) -> None:
        self.events.append("begin")
        if self._fails:
            raise RuntimeError("begin")

    def end(self) -> Any:
        self.events.append("end")
        return lambda: self.events.append("launch")

    def drop(self) -> None:
        self.events.append("drop")

    def reserved_bytes(self) -> int:
        return 0


@pytest.mark.parametrize("fails", [True, False])
def test_failed_graph_capture_is_dropped(fails: bool) -> None:
    segments = RecordingSegments(fails)
    with pytest.raises(RuntimeError if fails else ZeroDivisionError):
        Graph(lambda: 1 // 0, segments)
    assert segments.events == ["ready", "begin", "drop"]


def test_graph_waits_with_the_watchdog_hook_before_capture() -> None:
    """So the error names a peer that is lost just then: the watched wait comes before any call that blocks the host."""
    segments = RecordingSegments()
    with wait_hook_set(lambda: segments.events.append("watched")):
        Graph(lambda: 1, segments)
    assert segments.events == ["watched", "ready", "begin", "end", "launch"]


def test_engine_close_drops_captured_programs_with_the_communicators(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's communicators wait for the captured programs to be dropped before they end."""
    engine = build_engine(config_of(tiny_pair()[0], capture="on"))
    for _ in range(2):
        run(engine, [make_request("a", [3, 1, 4], SAMPLING["greedy"], max_tokens=6)])
    programs = engine.lockstep.programs
    assert programs.captured and programs.checksum
    monkeypatch.setattr(Mesh, "close", lambda mesh, reason, drop: drop())
    engine.close("a bug")
    assert not programs.captured and not programs.checksum


@pytest.mark.parametrize("active_experts", [2, 8])
def test_the_estimate_for_a_row_covers_what_tapes_of_experts_allocate(active_experts: int, tmp_path: Path) -> None:
    """A lower estimate would let tapes take more memory than `AUTO_BYTES` allows."""
    sizes = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    experts = {"num_experts": 8, "num_experts_per_tok": active_experts, "moe_intermediate_size": 96}
    config = Qwen3MoeConfig(**sizes, **experts, num_hidden_layers=2, intermediate_size=64)
    random_model(Qwen3MoeForCausalLM, config).save_pretrained(tmp_path)
    engine = build_engine(config_of(str(tmp_path), capture="on"))
    run(engine, [make_request(f"{i}", [3, 1, 4, i], SAMPLING["greedy"], max_tokens=12) for i in range(8)])
    captured = engine.lockstep.programs.captured
    rows = max(key.sizes[0].decodes for key in captured if not key.sizes[0].prompt_rows)
    tape_bytes = sum(program.captured.bytes for key, program in captured.items() if not key.sizes[0].prompt_rows)
    assert rows == 8 and 0 < tape_bytes <= row_bytes(read_target(str(tmp_path)), torch.float64) * rows


def steps_captured_at_start(num_steps: int, requests: int, **settings: Any) -> list[Decoding]:
    """Return the steps that an engine with adaptive trees captures at start with the default sizes of a GPU."""
    config = config_of(*tiny_pair(), 1, num_steps, **settings)
    config = config.model_copy(update={"speculative_mode": "adaptive", "max_running_requests": requests})
    resolved = resolve_models(config, "cuda", lambda: False)
    return list(decoding_steps(resolved, buckets_of(resolved.settings, CUDA, Mesh())))


@pytest.mark.parametrize("requests", [1, 8, 64])
def test_adaptive_trees_of_all_tiers_are_captured_for_as_many_requests_as_may_run(requests: int) -> None:
    """The default sizes go up to 512: most of them are above the number of requests."""
    steps = steps_captured_at_start(3, requests)
    assert {step.requests for step in steps} == {size for size in sizes_up_to(512) if size <= requests}
    assert {step.tier for step in steps} == {0, 1, 2, 3}


def test_steps_in_which_a_draft_wakes_are_captured_where_it_can_wake() -> None:
    steps = steps_captured_at_start(3, 256, speculative_batch_tiers={32: 0})
    assert {step.requests for step in steps if step.wakes} == {size for size in sizes_up_to(512) if size <= 32}
    assert all(step.tier == 0 for step in steps if step.wakes)
    assert {step.tier for step in steps if step.requests > 32} == {0}
    # The draft reads 16 rows of each request when it wakes, so with many requests that step is not captured.
    assert max(step.requests for step in steps_captured_at_start(3, 256) if step.wakes) == 64
