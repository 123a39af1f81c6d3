"""Runs adaptive trees (`speculative_mode: adaptive`) on the device.

In float64, the tokens of the demo pair must equal those of plain decoding with torch on a CPU, with and without
looked-up tokens in the trees. Then the stage measures what each tree costs for the layers of Llama-3.1-8B. In bfloat16
it measures tokens per second of the demo pair beside plain decoding and beside fixed trees, for source code and for
text that is copied.
"""

import time
from collections import Counter
from functools import partial
from typing import Any

from cluster.bench.cases.adaptive import text_prompts
from cluster.bench.cases.roofline import Size, engine_config, subject_of
from cluster.bench.loaded import LoadedModels
from cluster.bench.pair import PLAIN, ModelPair, TreeChoice
from cluster.bench.steady_runs import run_steadily
from cluster.config import EngineConfig
from cluster.config.resolved import ResolvedSettings
from cluster.engine import Engine, build_engine
from cluster.offline.stepping import complete
from tests.gpu.stages.demo import build_requests, config
from tests.gpu.stages.stage import Stage, run
from tests.parity.trees import engine_with_trees

TREES = (TreeChoice(3), TreeChoice(4, 4, 16))
LOOKUPS = (0, 8)
ADAPTIVE = {"speculative_mode": "adaptive"}


def trees_of(engine: Engine) -> dict[str, int]:
    """Return how many steps of requests each tree has had, by levels, nodes and looked-up tokens."""
    counts = Counter[str]()
    for family in engine.metrics.registry.collect():
        for sample in family.samples:
            if sample.name == "aerie_tree_steps_total" and sample.value:
                counts["/".join(sample.labels[name] for name in ("levels", "nodes", "looked_up"))] += int(sample.value)
    return dict(counts)


def tokens(stage: Stage) -> None:
    """Compare the tokens. The steps take the trees of all tiers in turn, and rest and wake in between."""
    reference_settings = {"device": "cpu", "attention_backend": "torch", "capture": "off"}
    for temperature in stage.dry_or_gpu((0.8,), (0.0, 0.8)):
        requests = build_requests(*stage.dry_or_gpu((1, 20, 12), (4, 64, 48)), temperature)
        plain = build_engine(config(stage, PLAIN, len(requests), "float64", **reference_settings))
        expected = complete(plain, requests)
        for lookup_tokens in LOOKUPS:
            with stage.check(f"temperature {temperature}, {lookup_tokens} looked-up tokens") as facts:
                settings = ADAPTIVE | {"speculative_lookup_tokens": lookup_tokens}
                engine_settings = config(stage, TREES[1], len(requests), "float64", **settings)
                last_tier = ResolvedSettings.from_settings(engine_settings, share_rows=stage.dry).last_drafted_tier
                largest = last_tier + bool(lookup_tokens)
                # After steps of tier 0, the next step only wakes the draft.
                tiers = [last_tier, 0, 0, largest, largest, 0, *range(last_tier)] * 20
                engine = engine_with_trees(partial(build_engine, engine_settings), tiers)
                actual = [complete(engine, requests) for _ in range(stage.dry_or_gpu(1, 3))]
                facts["trees"] = trees = trees_of(engine)
                assert all(each == expected for each in actual), f"tokens {actual}, expected {expected}"
                assert trees.get("0/1/0", 0) > 2, "the draft never rested"
                assert any(name.endswith("/8") for name in trees) == bool(lookup_tokens), trees


def contenders(stage: Stage, tree: TreeChoice, requests: int) -> dict[str, EngineConfig]:
    dtype = stage.dry_or_gpu("float32", "bfloat16")
    adaptive = {f"adaptive, {n} looked-up tokens": ADAPTIVE | {"speculative_lookup_tokens": n} for n in LOOKUPS}
    return {"plain": config(stage, PLAIN, requests, dtype), "fixed": config(stage, tree, requests, dtype)} | {
        name: config(stage, tree, requests, dtype, **settings) for name, settings in adaptive.items()
    }


def speeds(stage: Stage) -> None:
    pair, largest = ModelPair(), stage.dry_or_gpu(2, 32)
    prompts = {kind: text_prompts(pair, kind, largest, stage.dry_or_gpu(12, 48)) for kind in ("code", "copy")}
    for tree in stage.dry_or_gpu(TREES[1:], TREES):
        with stage.check(f"speeds, {tree}") as facts:
            engines = {}
            for name, engine_settings in contenders(stage, tree, largest).items():
                started_at = time.perf_counter()
                sizes = {} if stage.dry else {"capture_sizes": (1, 8, 32)}
                engines[name] = build_engine(engine_settings.model_copy(update=sizes))
                facts[f"start of {name}, s"] = time.perf_counter() - started_at
            for kind in prompts:
                for batch in stage.dry_or_gpu((2,), (1, 8, 32)):
                    figures: dict[str, list[float]] = {name: [] for name in engines}
                    for _ in range(stage.dry_or_gpu(1, 3)):  # on a GPU the first round is a warm-up
                        for name, engine in engines.items():
                            result = run_steadily(engine, prompts[kind][:batch], 0.0, stage.dry_or_gpu(3, 128))
                            figures[name].append(result.tokens_per_second)
                    best = {name: max(speeds[-2:]) for name, speeds in figures.items()}
                    stage.write_line(figure={"tree": str(tree), "text": kind, "batch": batch, **best})
            facts["trees"] = {name: trees_of(engine) for name, engine in engines.items()}


def costs(stage: Stage) -> None:
    tree = stage.dry_or_gpu(TreeChoice(2, 2, 4), TREES[1])
    sizes: dict[str, Any] = {"batches": (stage.dry_or_gpu(2, 64),), "contexts": (stage.dry_or_gpu(32, 1024),)}
    size = Size((tree,), **sizes, shape=stage.dry_or_gpu("tiny", "llama-8b"), layers=stage.dry_or_gpu(None, 12))
    with subject_of(ModelPair(num_threads=stage.dry_or_gpu(1, None)), size, print) as subject:
        base = engine_config(subject.pair, tree, size, captured=True).model_copy(update=ADAPTIVE)
        for lookup_tokens in LOOKUPS:
            with stage.check(f"costs, {lookup_tokens} looked-up tokens") as facts:
                started_at = time.perf_counter()
                settings = {"speculative_lookup_tokens": lookup_tokens, "capture_sizes": size.batches}
                engine, _ = LoadedModels(base).engine(base.model_copy(update=settings))
                facts["seconds"] = time.perf_counter() - started_at
                measured = engine.info().tree_costs
                facts["ms"] = {
                    f"{cost.num_steps}/{cost.num_draft_tokens}/{cost.lookup_tokens}": cost.ms for cost in measured
                }
                assert len(measured) > 2


def work(stage: Stage) -> None:
    tokens(stage)
    costs(stage)
    speeds(stage)


if __name__ == "__main__":
    raise SystemExit(run("adaptive", work))
