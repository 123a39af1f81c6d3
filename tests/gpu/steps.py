"""Checks of captured steps on a GPU.

The device is a parameter. `tests/capture/test_gpu_dry.py` runs the same checks on a CPU, where tapes replace CUDA
graphs, so this code has run before it first runs on a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from cluster.capture.cuda_graph import Graph
from cluster.config import ConfigError, EngineConfig
from cluster.device.transfers import HostCopies, copy_to_device
from cluster.engine import Engine, StepResult, build_engine
from tests.capture.test_stream import config, plain_tokens, requests_of_kind
from tests.parity.automata import with_automata
from tests.parity.harness import run


@contextmanager
def no_device_wait(device: str) -> Iterator[None]:
    """Make every wait for the GPU an error, such as a copy of unpinned memory or the read of a value by the host."""
    if device != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def config_on(device: str, base: EngineConfig, **settings: object) -> EngineConfig:
    """Return the config for a device, with an attention backend whose kernels can be captured on it."""
    backend = "triton" if device == "cuda" else "auto"
    return base.model_copy(update={"device": device, "attention_backend": backend, **settings})


def replays(engine: Engine, kind: str, sampling: str) -> tuple[dict[str, list[int]], int]:
    """Serve the requests of a test kind. Return the tokens of each request, and the number of replayed steps."""
    steps: list[StepResult] = []
    tokens = run(engine, requests_of_kind(kind, sampling), lambda _, step: steps.append(step)).tokens
    return tokens, sum("replay" in step.stats.phase_seconds for step in steps)


def check_tokens(
    device: str, target: str, draft: str | None, shape: str, kind: str, sampling: str, **more: Any
) -> None:
    """Check that captured steps, eager steps, and plain decoding on the CPU give the same tokens."""
    expected = plain_tokens(target, kind, sampling)
    base_config = config(target, draft, shape, **more)
    eager = with_automata(build_engine(config_on(device, base_config, capture="off")))
    assert replays(eager, kind, sampling) == (expected, 0)
    if device == "cuda" and any(expert_backend is not None for expert_backend in eager._parts.resolved.experts):
        # In float64 the matrix products of the experts read row counts on the host, so the step cannot be captured.
        assert replays(with_automata(build_engine(config_on(device, base_config, capture="auto"))), kind, sampling) == (
            expected,
            0,
        )
        with pytest.raises(ConfigError, match="capture on"):
            build_engine(config_on(device, base_config, capture="on"))
        return
    for capture_mode in ("auto", "on"):
        captured, count = with_automata(build_engine(config_on(device, base_config, capture=capture_mode))), 0
        for _ in range(3):
            tokens, replayed = replays(captured, kind, sampling)
            assert tokens == expected
            count += replayed
        assert count > 3
        programs = [program.captured for program in captured._parts.lockstep.programs.captured.values()]
        assert device != "cuda" or all(isinstance(program, Graph) for program in programs)
        if device == "cuda" and kind != "grammar":
            assert all(len(program) == 1 for program in programs), "each program must be a single graph"


def check_waits(device: str, target: str, draft: str | None, shape: str, kind: str, steps: int) -> None:
    """Run this many steps, from admission to release of requests, and check that the host waits only for events."""
    engine = with_automata(build_engine(config_on(device, config(target, draft, shape), capture="on")))
    for _ in range(2):  # warm-up: one-time allocations, and captures
        replays(engine, kind, "0.8")
    first_step, replayed = engine.status().steps, 0
    with no_device_wait(device):
        while engine.status().steps - first_step < steps:
            tokens, newly_replayed = replays(engine, kind, "0.8")
            replayed += newly_replayed
    assert tokens == plain_tokens(target, kind, "0.8")
    assert replayed > steps // 2


def check_host_copies(device: str) -> None:
    """Check the asynchronous copies between host and device.

    A copy to the host has the values of the moment when the copy was started, although the device overwrites the tensor
    afterwards. Pinned memory of a copy to the device is freed at once, but is not reused before the copy is complete.
    """
    target_device = torch.device(device)
    x = torch.zeros(1 << 16, dtype=torch.int64, device=target_device)
    copies = []
    for value in range(50):
        if device == "cuda":
            torch.cuda._sleep(200_000)
        x.copy_(copy_to_device(torch.full((1 << 16,), value), target_device))
        copies.append(HostCopies([x if device == "cuda" else x.clone()]))
    for value, copy in enumerate(copies):
        (copied,) = copy.wait()
        assert copied.device.type == "cpu" and bool((copied == value).all())
