"""What capturing takes: the programs of an engine that are made at start, their seconds and their memory.

And what a captured program is worth: it is replayed without a word to the device, on inputs that are new each time, and
the memory of its pool does not grow.
"""

import os
from typing import Any

import torch

from cluster.bench.cases.roofline import Size, engine_config, subject_of
from cluster.bench.loaded import LoadedModels
from cluster.bench.pair import ModelPair, TreeChoice
from tests.gpu.stages.stage import Stage, run


def program(x: torch.Tensor, memory: torch.Tensor) -> list[torch.Tensor]:
    rows = (x @ x.t()).sin()  # no two alike, as devices order those as they like
    memory.index_copy_(0, torch.arange(2, device=x.device), rows[:2])
    values, ids = rows.topk(2)
    return [values, ids, rows.softmax(-1), memory.sum(0)]


def replays(stage: Stage) -> None:
    x, memory = torch.randn(4, 4, dtype=torch.float64), torch.zeros(6, 4, dtype=torch.float64)
    here = [one.to(stage.device, copy=True) for one in (x, memory)]
    program(*here)
    stage.wait()
    captured = stage.maker(lambda: program(*here))
    program(x, memory)
    places = [one.data_ptr() for one in captured.output]
    for _ in range(20):
        x = torch.randn(4, 4, dtype=torch.float64)
        here[0].copy_(x)
        captured.replay()
        for one, other in zip(captured.output, program(x, memory), strict=True):
            assert torch.allclose(one.cpu().double(), other.double())
    assert places == [one.data_ptr() for one in captured.output]


def reserved(stage: Stage) -> int:
    return 0 if stage.dry else torch.cuda.memory_reserved()


def work(stage: Stage) -> None:
    with stage.check("a program replays on new inputs"):
        replays(stage)
    layers = int(os.environ.get("LAYERS", 12))
    tree = TreeChoice(*stage.either((2, 2, 4), (3, 4, 16)))
    sizes: dict[str, Any] = {"batches": (stage.either(4, 64),), "contexts": (stage.either(32, 2048),)}
    size = Size((tree,), **sizes, shape=stage.either("tiny", "llama-8b"), layers=stage.either(None, layers))
    with subject_of(ModelPair(num_threads=stage.either(1, None)), size, print) as subject:
        config = engine_config(subject.pair, tree, size)
        loaded = LoadedModels(config)
        for what, of in stage.either(
            (("sizes 1, 2, 4", (1, 2, 4)),), (("sizes 1, 16, 64", (1, 16, 64)), ("the sizes of a GPU", None))
        ):
            with stage.check(f"capture, {what}") as facts:
                before = reserved(stage)
                engine, _ = loaded.engine(config.model_copy(update={"capture": "on", "capture_sizes": of}))
                captured = engine.info().captured
                assert captured is not None and captured.programs, "nothing was captured at start"
                facts |= {"programs": captured.programs, "seconds": captured.seconds, "mb": captured.mb}
                facts |= {"sizes": captured.sizes, "reserved_mb": (reserved(stage) - before) / 1e6}
                stage.say(figure={"capture": what, **facts})
                del engine


if __name__ == "__main__":
    raise SystemExit(run("capture", work))
