"""Steps of real models' shapes against the least that the device could take: `aerie bench roofline` with weights and
contexts made on the device, and drafts that are right as often as is asked.

Layers are fewer than the models have where 64 requests of 8,192 tokens are to fit beside them: per layer all is as it
is. `LAYERS` in the environment takes another number, `ACCEPT` another accept length.
"""

import os
from typing import Any

from cluster.bench.cases.roofline import Size, measure
from cluster.bench.pair import PLAIN, ModelPair, TreeChoice
from cluster.dp_attention.sizes import MAX_CAPTURED_ROWS
from tests.gpu.stages.stage import Stage, run

TREES = (PLAIN, TreeChoice(3, 1, 4), TreeChoice(5, 8, 32))
SMALL = Size((PLAIN, TreeChoice(1)), (1, 2), (40,), 2)
LAYERS = {"llama-8b": 12, "qwen3-30b-a3b": 12, "mla": 12}
TINY = {"llama-8b": "tiny", "qwen3-30b-a3b": "tiny-moe", "mla": "tiny-mla"}
KEPT = (
    "setting",
    "batch",
    "context",
    "captured",
    "accept_length",
    "phase",
    "ms",
    "possible_ms",
    "share",
    "gigabytes_s",
)


def work(stage: Stage, shape: str) -> None:
    accept, layers = float(os.environ.get("ACCEPT", 2.5)), int(os.environ.get("LAYERS", LAYERS[shape]))
    sizes: dict[str, Any] = {"trees": TREES, "batches": (1, 16, 64), "contexts": (2048, 8192), "steps": 20}
    large = Size(**sizes, accept_length=accept, shape=shape, layers=layers, random_contexts=True, padded=True)
    dry = Size(
        SMALL.trees, SMALL.batches, SMALL.contexts, SMALL.steps, 1.5, TINY[shape], random_contexts=True, padded=True
    )

    def note(row: dict[str, Any]) -> None:
        figure = {name: row[name] for name in KEPT}
        stage.say(figure=figure)
        print(figure)

    with stage.check(f"roofline of {shape}") as facts:
        result = measure(ModelPair(num_threads=stage.either(1, None)), stage.either(dry, large), on_figure=note)
        facts |= {name: result[name] for name in ("dtype", "kernels", "layers", "gigabytes_s", "gigaflops")}
        asked = stage.either(dry, large)
        loads = len(asked.trees) * len(asked.batches) * len(asked.contexts)
        facts["loads"] = [loads, sum(one["phase"] == "step" and not one["captured"] for one in result["figures"])]
        off = [
            one
            for one in result["figures"]
            if one["phase"] == "step"
            and one["setting"] != "plain"
            and abs(one["accept_length"] - asked.accept_length) > 0.25
        ]
        facts["accept_lengths_off"] = len(off)
        large_ones = [
            (tree, batch) for tree in asked.trees for batch in asked.batches if tree.nodes * batch > MAX_CAPTURED_ROWS
        ]
        facts["too_large_to_capture"] = [f"{tree}, batch {batch}, captured" for tree, batch in large_ones]
        skipped = {name: why for name, why in result["skipped"].items() if name not in facts["too_large_to_capture"]}
        assert not skipped, skipped
        assert facts["loads"][0] == facts["loads"][1]


def main(name: str, shape: str) -> int:
    return run(name, lambda stage: work(stage, shape))
