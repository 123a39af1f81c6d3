"""Compares the time of steps with the least possible time on the device, for the shapes of real models.

It runs `aerie bench roofline` with weights and contexts that are made on the device, and with drafts whose accept
length is set. The models have fewer layers than the real ones, so that 64 requests of 8,192 tokens fit into memory;
each layer has its real size. The environment variables `LAYERS` and `ACCEPT` set another number of layers and another
accept length.
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
FIGURE_FIELDS = (
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

    def write_figure(row: dict[str, Any]) -> None:
        figure = {name: row[name] for name in FIGURE_FIELDS}
        stage.write_line(figure=figure)
        print(figure)

    with stage.check(f"roofline of {shape}") as facts:
        result = measure(
            ModelPair(num_threads=stage.dry_or_gpu(1, None)), stage.dry_or_gpu(dry, large), on_figure=write_figure
        )
        facts |= {name: result[name] for name in ("dtype", "kernels", "layers", "gigabytes_s", "gigaflops")}
        chosen_size = stage.dry_or_gpu(dry, large)
        loads = len(chosen_size.trees) * len(chosen_size.batches) * len(chosen_size.contexts)
        facts["loads"] = [loads, sum(entry["phase"] == "step" and not entry["captured"] for entry in result["figures"])]
        wrong_accept_lengths = [
            entry
            for entry in result["figures"]
            if entry["phase"] == "step"
            and entry["setting"] != "plain"
            and abs(entry["accept_length"] - chosen_size.accept_length) > 0.25
        ]
        facts["accept_lengths_off"] = len(wrong_accept_lengths)
        uncapturable = [
            (tree, batch)
            for tree in chosen_size.trees
            for batch in chosen_size.batches
            if tree.nodes * batch > MAX_CAPTURED_ROWS
        ]
        facts["too_large_to_capture"] = [f"{tree}, batch {batch}, captured" for tree, batch in uncapturable]
        skipped = {
            name: reason for name, reason in result["skipped"].items() if name not in facts["too_large_to_capture"]
        }
        assert not skipped, skipped
        assert facts["loads"][0] == facts["loads"][1]


def main(name: str, shape: str) -> int:
    return run(name, lambda stage: work(stage, shape))
