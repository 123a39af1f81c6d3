"""What captured steps are held to on a GPU. `device` is a parameter, so that a CPU goes the same way, by tapes
(`tests/static/test_gpu_dry.py`): nothing here is called for the first time where a GPU is.
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
from tests.parity.automata import walked
from tests.parity.harness import run
from tests.static.test_stream import alone, asked, config


@contextmanager
def nobody_waits(device: str) -> Iterator[None]:
    """Whatever waits for the GPU is an error: the copies of numbers that are not pinned, values that are asked for."""
    if device != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on(device: str, of: EngineConfig, **settings: object) -> EngineConfig:
    """The same on a device, with attention by the kernels that are captured there."""
    backend = "triton" if device == "cuda" else "auto"
    return of.model_copy(update={"device": device, "attention_backend": backend, **settings})


def replays(engine: Engine, kind: str, sampling: str) -> tuple[dict[str, list[int]], int]:
    """The texts of a turn, and how many of its steps were replayed."""
    steps: list[StepResult] = []
    tokens = run(engine, asked(kind, sampling), lambda _, step: steps.append(step)).tokens
    return tokens, sum("replay" in step.stats.phase_seconds for step in steps)


def check_tokens(
    device: str, target: str, draft: str | None, shape: str, kind: str, sampling: str, **more: Any
) -> None:
    """Captured, launched anew, and by plain decoding on the CPU: the same texts."""
    expected = alone(target, kind, sampling)
    of = config(target, draft, shape, **more)
    anew = walked(build_engine(on(device, of, capture="off")))
    assert replays(anew, kind, sampling) == (expected, 0)
    if device == "cuda" and any(part is not None for part in anew._parts.resolved.experts):
        # In float64 the products of experts read their counts on the host, so such a step is not captured.
        assert replays(walked(build_engine(on(device, of, capture="auto"))), kind, sampling) == (expected, 0)
        with pytest.raises(ConfigError, match="capture on"):
            build_engine(on(device, of, capture="on"))
        return
    for prompts in ("auto", "on"):
        captured, count = walked(build_engine(on(device, of, capture=prompts))), 0
        for _ in range(3):
            tokens, again = replays(captured, kind, sampling)
            assert tokens == expected
            count += again
        assert count > 3
        programs = [one.captured for one in captured._parts.lockstep.programs.captured.values()]
        assert device != "cuda" or all(isinstance(one, Graph) for one in programs)
        if device == "cuda" and kind != "grammar":
            assert all(len(one) == 1 for one in programs), "one graph"


def check_waits(device: str, target: str, draft: str | None, shape: str, kind: str, steps: int) -> None:
    """So many steps, admission to release, in which nobody waits but for events."""
    engine = walked(build_engine(on(device, config(target, draft, shape), capture="on")))
    for _ in range(2):  # what is made once, and what is captured
        replays(engine, kind, "0.8")
    begun, again = engine.status().steps, 0
    with nobody_waits(device):
        while engine.status().steps - begun < steps:
            tokens, more = replays(engine, kind, "0.8")
            again += more
    assert tokens == alone(target, kind, "0.8")
    assert again > steps // 2


def check_landing(device: str) -> None:
    """What lands is as it was when it was sent off, though the device has written over it since; pinned memory that is
    let go at once is not given to others while its copy is under way.
    """
    there = torch.device(device)
    x = torch.zeros(1 << 16, dtype=torch.int64, device=there)
    landings = []
    for number in range(50):
        if device == "cuda":
            torch.cuda._sleep(200_000)
        x.copy_(copy_to_device(torch.full((1 << 16,), number), there))
        landings.append(HostCopies([x if device == "cuda" else x.clone()]))
    for number, landing in enumerate(landings):
        (landed,) = landing.wait()
        assert landed.device.type == "cpu" and bool((landed == number).all())
