"""FlashInfer's attention in bfloat16 against the definition in float64, as it is and as a graph that is planned anew
for each replay; an engine's tokens on it against Triton's, and captured. Dry, its stand-in takes its place, which holds
calls to FlashInfer's signatures, and tapes that of graphs.
"""

import importlib.util
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster.attention.flashinfer.backend import FlashInferAttention
from cluster.attention.shape import AttentionShape
from cluster.batch import HostBounds
from cluster.capture.cuda_graph import CudaSegments, Graph
from cluster.capture.recorder import CallsBeforeReplay, replayable
from cluster.capture.tape import Tape
from cluster.config import EngineConfig
from cluster.engine import build_engine
from cluster.kernels.flashinfer import library as flashinfer_library
from cluster.kernels.flashinfer.library import Share
from cluster.kv.page_table import PageTable
from cluster.kv.pool import KVPool
from cluster.offline.stepping import complete
from tests.flashinfer.stand_in import stand_in_serves
from tests.gpu.stages.attention import there
from tests.gpu.stages.stage import NotHereError, Stage, run
from tests.gpu.stages.tokens import requests
from tests.tiny import tiny_draft, tiny_target
from tests.unit.attention.dense import Case
from tests.unit.attention.test_gather_methods import SHAPES

KINDS: dict[str, dict[str, Any]] = {
    "grouped, 64": {"d": 64},
    "grouped, 128, sinks": {"d": 128, "sunk": True},
    "window, 128": {"d": 128, "window": 40},
    "latent": {"d": 576, "latent": True, "kv_heads": 1},
}


class Wide(Case):
    """A case whose latents are as wide as FlashInfer's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.values = 512 if self.latent else self.d


def attention_of(stage: Stage, one: Case) -> FlashInferAttention:
    """Attention over the case's cells, on the device."""
    device = stage.device
    found = flashinfer_library.find(device, one.dtype)
    if isinstance(found, str):
        raise NotHereError(f"flashinfer {found}")
    table = PageTable(one.table.idle_row, one.table.length, one.page_size, device)
    table.device_pages.copy_(one.table.device_pages)
    pool = KVPool(2, one.pool.kv.shape[1], tuple(one.pool.kv.shape[2:]), one.dtype, device)
    pool.kv.copy_(one.pool.kv.nan_to_num())
    shares = [Share(True, True), Share(one.window is None, True)]
    shape = AttentionShape(one.heads, (None, one.window), 0.3, one.values)
    return FlashInferAttention(pool, table, shape, found, shares)


def known(one: Case, unknown: int) -> HostBounds:
    """What is known of the case's lengths if the last `unknown` committed tokens are not certain."""
    least = tuple(max(0, count - unknown) for count in one.committed)
    return HostBounds(max(one.committed, default=0), tuple(one.chunks), min_seq_lens=least)


def attended(stage: Stage, one: Case, unknown: int) -> Tensor:
    """All that the case's rows see, planned with what is known."""
    attention, device = attention_of(stage, one), stage.device
    attention.prepare(known(one, unknown))
    attention.bind(there(one.seen(), device))
    return attention(1, one.q.to(device), one.kv.to(device), there(one.sinks, device))


def replayed(stage: Stage, one: Case, unknown: tuple[int, ...]) -> dict[str, Tensor]:
    """The same by one graph, planned for each of `unknown` before it is replayed, as the host is one step ahead."""
    attention, device, ahead = attention_of(stage, one), stage.device, CallsBeforeReplay()
    seen, q, kv, sinks = (there(given, device) for given in (one.seen(), one.q, one.kv, one.sinks))

    def program() -> Tensor:
        attention.bind(seen)
        return attention(1, q, kv, sinks)

    attention.prepare(known(one, 1))
    with replayable(ahead):
        program()
    assert len(ahead.calls) == 1, "a tree's committed tokens are FlashInfer's"
    attention.prepare(known(one, 2))
    assert ahead.ready()
    with replayable(ahead):
        graph = Tape(program) if stage.dry else Graph(program, CudaSegments())
    given = {}
    for count in unknown:
        stage.wait()
        attention.prepare(known(one, count))
        assert ahead.ready(), f"with {count} unknown the plan launches with other numbers"
        graph.replay()
        given[f"{count} unknown"] = graph.output.clone()
    return given


def work(stage: Stage) -> None:
    if stage.dry:
        stand_in_serves(setattr)
    elif importlib.util.find_spec("flashinfer") is None:
        raise NotHereError("flashinfer is not installed here")
    with torch.inference_mode():
        for kind, of_kind in KINDS.items():
            for unknown in stage.either((3,), (0, 3)):
                with stage.check(f"attention, {kind}, {unknown} unknown") as facts:
                    given = {"heads": 4, "kv_heads": 2, "page_size": 16, "lies": "scattered", "seed": stage.seed}
                    one = Wide(**given | SHAPES["ragged"] | of_kind, dtype=torch.bfloat16)
                    stage.near(facts, {"out": attended(stage, one, unknown)}, {"out": one.expected()})
            if "window" not in of_kind:
                with stage.check(f"graph, {kind}") as facts:
                    one = Wide(**given | SHAPES["ragged"] | of_kind, dtype=torch.bfloat16)
                    out = replayed(stage, one, (3, 0, 40, 9))
                    stage.near(facts, out, dict.fromkeys(out, one.expected()))
    with tempfile.TemporaryDirectory() as name:
        target = tiny_target(Path(name) / "target", vocab_size=24, hidden=stage.either(32, 256))
        draft = tiny_draft(Path(name) / "draft", target)
        tokens(stage, target, draft)


def tokens(stage: Stage, target: str, draft: str) -> None:
    """In bfloat16 near-ties may flip, so on a GPU most texts have to begin alike; dry, in float64, all are the same.
    Captured, no step may be launched anew because of its plan.
    """
    settings: dict[str, object] = {
        "model_path": target,
        "device": stage.device.type,
        "dtype": stage.either("float64", "bfloat16"),
        "max_running_requests": stage.either(1, 4),
        "max_total_tokens": 1024,
        "mixed_prefill_size": 64,
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": draft,
        "speculative_num_steps": stage.either(1, 3),
        "speculative_eagle_topk": stage.either(1, 4),
    }
    with stage.check("an engine's tokens") as facts:
        asked = requests(0.0, *stage.either((3, 1), (24, 4)))
        asked = [replace(one, prompt_token_ids=one.prompt_token_ids * stage.either(1, 15)) for one in asked]
        texts = {}
        for backend, capture in ((stage.either("torch", "triton"), "off"), ("flashinfer", "off"), ("flashinfer", "on")):
            sizes = stage.either((1,), (1, 2, 4)) if capture == "on" else None
            given = {"attention_backend": backend, "capture": capture, "capture_sizes": sizes}
            engine = build_engine(EngineConfig.from_kwargs(settings | given))
            assert engine.info().attention_backend == backend
            texts[backend, capture] = complete(engine, asked)
            facts[f"launched anew, {backend}, capture {capture}"] = engine._parts.lockstep.programs.eager_fallbacks
            assert not engine._parts.lockstep.programs.eager_fallbacks
        first, *others = texts.values()
        for text in others:
            alike = [one[:8] == other[:8] for one, other in zip(first, text, strict=True)]
            facts["alike"] = f"{sum(alike)} of {len(alike)}"
            assert sum(alike) >= len(alike) - stage.either(0, 1)


if __name__ == "__main__":
    raise SystemExit(run("flashinfer", work))
