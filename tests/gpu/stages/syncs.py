"""Checks that the host waits for the device only when it reads the results of a step.

On a GPU, torch raises an error for every other wait. In a dry run, `TransferTrap` detects the waits, and the step also
runs on a simulated device whose tensors have no values. Requests arrive, end and are aborted during the steps, so rows,
pages and shapes change from step to step.
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
from cluster.dp_attention.sizes import ProgramKey
from cluster.engine import Engine, build_engine
from cluster.request import Request, RequestParams
from cluster.spec.result import StepOutput
from tests.capture.trap import TransferTrap
from tests.gpu.stages.stage import Stage, run
from tests.support.tiny_checkpoints import tiny_draft, tiny_target

STEPS = 200
SAMPLING = (RequestParams(temperature=0.0), RequestParams(temperature=0.8, top_p=0.9, top_k=12))


@contextmanager
def no_device_wait(stage: Stage) -> Iterator[None]:
    """Forbid all waits for the device inside the block, except reads of the output of a step.

    Raises:
        RuntimeError, AssertionError: the block waited for the device.
    """
    if stage.dry:
        with TransferTrap() as trap:
            yield
        assert not trap.host_reads, f"the host reads values of the device in {dict(trap.host_reads)}"
        assert set(trap.host_sends) <= {"device.staging.int64_tensor"}, (
            f"copies to the device in {dict(trap.host_sends)}"
        )
        return
    original_read = StepOutput.read

    def read(self: StepOutput) -> StepOutput:
        torch.cuda.set_sync_debug_mode("default")
        try:
            return original_read(self)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    with patch.object(StepOutput, "read", read):
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def run_steps(engine: Engine, stage: Stage, count: int, check_waits: bool) -> dict[str, list[int]]:
    """Run `count` steps and return the tokens of the requests that were not aborted during these steps."""
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
        if check_waits:
            with no_device_wait(stage):
                outputs = engine.step().outputs
        else:
            outputs = engine.step().outputs
        for output in outputs:
            tokens[output.request_id] += output.token_ids
    for name in tokens:
        engine.abort(name)
    while engine.has_work:
        engine.step()
    return {name: request_tokens for name, request_tokens in tokens.items() if name not in dropped}


def tokens_after_warmup(engine: Engine, stage: Stage) -> dict[str, list[int]]:
    """Repeat the same steps until no new program is captured, and return the tokens of the last repetition."""
    programs = engine._parts.lockstep.programs
    for _ in range(8):
        state_before = set(programs.captured), set(programs._first_runs)
        tokens = run_steps(engine, stage, STEPS, check_waits=False)
        if state_before == (set(programs.captured), set(programs._first_runs)):
            return tokens
    raise AssertionError("every repetition of the same steps captured new programs")


def work(stage: Stage) -> None:
    with tempfile.TemporaryDirectory() as name:
        target = tiny_target(Path(name) / "target", vocab_size=24)
        draft = tiny_draft(Path(name) / "draft", target)
        settings: dict[str, Any] = {
            "model_path": target,
            "dtype": "float64",
            "device": stage.device.type,
            "attention_backend": stage.dry_or_gpu("c", "triton"),
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
            "speculative_mode": "fixed",  # adaptive trees depend on times, so a later repetition may need new programs
        }
        for capture in ("off", "on"):
            with stage.check(f"{STEPS} steps, {'captured' if capture == 'on' else 'eager'}") as facts:
                sizes = {"capture_sizes": (1, 2, 4, 8)} if capture == "on" else {}
                config = EngineConfig.from_kwargs(settings | {"capture": capture} | sizes)
                engine = build_engine(config)
                expected = tokens_after_warmup(engine, stage)
                actual = run_steps(engine, stage, STEPS, check_waits=True)
                facts["tokens"] = sum(map(len, actual.values()))
                # The second run finds cached prefixes, so after the same number of steps its texts are not as long.
                for name, request_tokens in actual.items():
                    length = min(len(request_tokens), len(expected[name]))
                    assert request_tokens[:length] == expected[name][:length], name
                assert facts["tokens"] > STEPS // 2
        with stage.check("a wait for the device is detected"):
            try:
                with no_device_wait(stage):
                    int(torch.ones(1, device=stage.device).sum())
            except (RuntimeError, AssertionError):
                pass
            else:
                raise AssertionError("the host read a value of the device, and no error was raised")
        if stage.dry:
            with stage.check("a step on a simulated device") as facts:
                facts["rows"] = run_simulated_step(build_engine(EngineConfig.from_kwargs(settings | TORCH_BACKEND)))


TORCH_BACKEND = {"attention_backend": "torch", "capture": "off"}


def run_simulated_step(engine: Engine) -> int:
    """Run one step on a device whose tensors have no values, and return the number of rows of its output."""
    from tests.capture.sim import (  # registers a device, and from then on torch pins memory for it
        DEVICE_NAME,
        simulated,
    )

    chunk = PromptChunk(3, 0, 2, True, (5, 6))
    step_input = StepInput(decodes=(DecodeRequest(0, 7), DecodeRequest(1, 9)), chunks=(chunk,), lens=((0, 7), (1, 9)))
    with simulated(engine):
        programs = engine._parts.lockstep.programs
        key = ProgramKey(len(engine._parts.resolved.tiers) - 1, 0, int(step_input.mode), ())
        output = programs._run(programs.assembler.send(step_input, 0), key, engine._parts.resolved.shape)
        assert output.packed.device == torch.device(DEVICE_NAME, 0)
        return int(output.packed.shape[0])


if __name__ == "__main__":
    raise SystemExit(run("syncs", work))
