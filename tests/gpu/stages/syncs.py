"""Steps that wait for nothing but their results: with torch's errors on for whatever else waits for the device.

Dry, a trap takes the place of those errors, and a device without numbers runs the step as well. Requests come, end and
are dropped meanwhile, so rows, pages and shapes change from step to step.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from cluster.batch import DecodeRequest, PromptChunk, StepInput
from cluster.config import EngineConfig
from cluster.engine import Engine, build_engine
from cluster.request import Request, RequestParams
from cluster.spec.result import StepOutput
from tests.gpu.stages.stage import Stage, run
from tests.static.trap import Trap
from tests.tiny import tiny_draft, tiny_target

STEPS = 200
SAMPLING = (RequestParams(temperature=0.0), RequestParams(temperature=0.8, top_p=0.9, top_k=12))


@contextmanager
def watched(stage: Stage) -> Iterator[None]:
    """Nothing may wait for the device here, but for who reads what a step decided.

    Raises:
        RuntimeError, AssertionError: something did.
    """
    if stage.dry:
        with Trap() as trap:
            yield
        assert not trap.asked, f"the host asks in {dict(trap.asked)}"
        assert set(trap.sent) <= {"device.staging.int64_tensor"}, f"the host sends in {dict(trap.sent)}"
        return
    true = StepOutput.read

    def read(self: StepOutput) -> StepOutput:
        torch.cuda.set_sync_debug_mode("default")
        try:
            return true(self)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    with patch.object(StepOutput, "read", read):
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def steps(engine: Engine, stage: Stage, count: int, watch: bool) -> dict[str, list[int]]:
    """Run so many steps; the tokens of requests that nobody dropped."""
    tokens: dict[str, list[int]] = {}
    dropped: set[str] = set()
    for number in range(count):
        if number % 7 == 0:
            name = str(number)
            length = 1 + (13 * number) % 40
            params = replace(SAMPLING[number % 2], seed=number, max_tokens=30)
            engine.submit(Request(name, tuple(2 + (number + n) % 20 for n in range(length)), params))
            tokens[name] = []
        if number % 29 == 28:
            name = str(number // 7 * 7)
            engine.abort(name)
            dropped.add(name)
        if watch:
            with watched(stage):
                outputs = engine.step().outputs
        else:
            outputs = engine.step().outputs
        for output in outputs:
            tokens[output.request_id] += output.token_ids
    for name in tokens:
        engine.abort(name)
    while engine.has_work:
        engine.step()
    return {name: run for name, run in tokens.items() if name not in dropped}


def settled(engine: Engine, stage: Stage) -> dict[str, list[int]]:
    """The tokens of the same steps, run until nothing is made or captured any more that is made once."""
    programs = engine._parts.lockstep.programs
    for _ in range(8):
        before = programs.captured.keys(), set(programs._first_runs)
        tokens = steps(engine, stage, STEPS, watch=False)
        if before == (programs.captured.keys(), set(programs._first_runs)):
            return tokens
    raise AssertionError("each time that the same steps are run more of them are captured")


def work(stage: Stage) -> None:
    with tempfile.TemporaryDirectory() as name:
        target = tiny_target(Path(name) / "target", vocab_size=24)
        draft = tiny_draft(Path(name) / "draft", target)
        settings: dict[str, Any] = {
            "model_path": target,
            "dtype": "float64",
            "device": stage.device.type,
            "attention_backend": stage.either("c", "triton"),
            "max_running_requests": 8,
            "max_total_tokens": 4096,
            "page_size": 4,
            "mixed_prefill_size": 24,
            "chunked_prefill_size": 24,
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": draft,
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 2,
            "speculative_num_draft_tokens": 7,
        }
        for capture in ("off", "on"):
            with stage.check(f"{STEPS} steps, {'captured' if capture == 'on' else 'as they are'}") as facts:
                sizes = {"capture_sizes": (1, 2, 4, 8)} if capture == "on" else {}
                config = EngineConfig.from_kwargs(settings | {"capture": capture} | sizes)
                engine = build_engine(config)
                expected = settled(engine, stage)
                given = steps(engine, stage, STEPS, watch=True)
                facts["tokens"] = sum(map(len, given.values()))
                for name, run_of in given.items():  # prefixes are found the second time, so texts are not as long
                    length = min(len(run_of), len(expected[name]))
                    assert run_of[:length] == expected[name][:length], name
                assert facts["tokens"] > STEPS // 2
        with stage.check("something that waits is caught"):
            try:
                with watched(stage):
                    int(torch.ones(1, device=stage.device).sum())
            except (RuntimeError, AssertionError):
                pass
            else:
                raise AssertionError("a value was asked for and nobody minded")
        if stage.dry:
            with stage.check("a step on a device without numbers") as facts:
                facts["rows"] = without_numbers(build_engine(EngineConfig.from_kwargs(settings | BY_TORCH)))


BY_TORCH = {"attention_backend": "torch", "capture": "off"}


def without_numbers(engine: Engine) -> int:
    from tests.static.sim import NAME, simulated  # makes a device of its own, and torch then pins memory for that one

    chunk = PromptChunk(3, 0, 2, True, (5, 6))
    order = StepInput(decodes=(DecodeRequest(0, 7), DecodeRequest(1, 9)), chunks=(chunk,), lens=((0, 7), (1, 9)))
    with simulated(engine):
        programs = engine._parts.lockstep.programs
        output = programs._run(programs.assembler.send(order, 0), order.mode, engine._parts.resolved.shape)
        assert output.packed.device == torch.device(NAME, 0)
        return int(output.packed.shape[0])


if __name__ == "__main__":
    raise SystemExit(run("syncs", work))
