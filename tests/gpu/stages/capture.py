"""Measures the captures of an engine at its start: their number, their seconds and their memory.

Before that, the stage checks that a captured program replays correctly on new inputs, that its outputs keep their
addresses, and that the reserved memory stays the same over the replays.
"""

import os
from typing import Any

import torch

from cluster.bench.cases.roofline import Size, engine_config, subject_of
from cluster.bench.loaded import LoadedModels
from cluster.bench.pair import ModelPair, TreeChoice
from tests.gpu.stages.stage import Stage, run


def program(x: torch.Tensor, memory: torch.Tensor) -> list[torch.Tensor]:
    rows = (x @ x.t()).sin()  # no equal values: topk orders those differently on each device
    memory.index_copy_(0, torch.arange(2, device=x.device), rows[:2])
    values, ids = rows.topk(2)
    return [values, ids, rows.softmax(-1), memory.sum(0)]


def replays(stage: Stage) -> None:
    x, memory = torch.randn(4, 4, dtype=torch.float64), torch.zeros(6, 4, dtype=torch.float64)
    device_tensors = [tensor.to(stage.device, copy=True) for tensor in (x, memory)]
    program(*device_tensors)
    stage.wait()
    captured = stage.capture(lambda: program(*device_tensors))
    program(x, memory)
    addresses = [tensor.data_ptr() for tensor in captured.output]
    reserved_bytes = set[int]()
    for _ in range(20):
        x = torch.randn(4, 4, dtype=torch.float64)
        device_tensors[0].copy_(x)
        captured.replay()
        reserved_bytes.add(reserved(stage))
        for tensor, expected in zip(captured.output, program(x, memory), strict=True):
            assert torch.allclose(tensor.cpu().double(), expected.double())
    assert addresses == [tensor.data_ptr() for tensor in captured.output]
    assert len(reserved_bytes) == 1, f"the reserved memory changed over the replays: {sorted(reserved_bytes)}"


def reserved(stage: Stage) -> int:
    """Return the bytes that torch has reserved on the GPU; 0 in a dry run."""
    return 0 if stage.dry else torch.cuda.memory_reserved()


def work(stage: Stage) -> None:
    with stage.check("a program replays on new inputs"):
        replays(stage)
    layers = int(os.environ.get("LAYERS", 12))
    tree = TreeChoice(*stage.dry_or_gpu((2, 2, 4), (3, 4, 16)))
    sizes: dict[str, Any] = {"batches": (stage.dry_or_gpu(4, 64),), "contexts": (stage.dry_or_gpu(32, 2048),)}
    size = Size((tree,), **sizes, shape=stage.dry_or_gpu("tiny", "llama-8b"), layers=stage.dry_or_gpu(None, layers))
    with subject_of(ModelPair(num_threads=stage.dry_or_gpu(1, None)), size, print) as subject:
        config = engine_config(subject.pair, tree, size)
        loaded = LoadedModels(config)
        for label, batch_sizes in stage.dry_or_gpu(
            (("sizes 1, 2, 4", (1, 2, 4)),), (("sizes 1, 16, 64", (1, 16, 64)), ("the sizes of a GPU", None))
        ):
            with stage.check(f"capture, {label}") as facts:
                before = reserved(stage)
                engine, _ = loaded.engine(config.model_copy(update={"capture": "on", "capture_sizes": batch_sizes}))
                captured = engine.info().captured
                assert captured is not None and captured.programs, "nothing was captured at start"
                facts |= {"programs": captured.programs, "seconds": captured.seconds, "mb": captured.mb}
                facts |= {"sizes": captured.sizes, "reserved_mb": (reserved(stage) - before) / 1e6}
                stage.write_line(figure={"capture": label, **facts})
                del engine


if __name__ == "__main__":
    raise SystemExit(run("capture", work))
