"""Compares FlashInfer's attention in bfloat16 with the definition in float64.

The attention runs eagerly, and as a graph that gets a new plan before each replay. The stage also compares the tokens
of an engine on FlashInfer with those of an engine on Triton, with eager and with captured steps. In a dry run, the
stand-in replaces FlashInfer and checks all calls against FlashInfer's signatures, and tapes replace graphs.
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
from tests.flashinfer.stand_in import install_stand_in
from tests.gpu.stages.attention import to_device
from tests.gpu.stages.stage import NotHereError, Stage, run
from tests.gpu.stages.tokens import requests
from tests.support.tiny_checkpoints import tiny_draft, tiny_target
from tests.unit.attention.dense import Case
from tests.unit.attention.test_gather_methods import SHAPES

KINDS: dict[str, dict[str, Any]] = {
    "grouped, 64": {"d": 64},
    "grouped, 128, sinks": {"d": 128, "sunk": True},
    "window, 128": {"d": 128, "window": 40},
    "latent": {"d": 576, "latent": True, "kv_heads": 1, "values": 512},
}


def attention_of(stage: Stage, case: Case) -> FlashInferAttention:
    """Return FlashInfer's attention over the KV cells of a case, on the device."""
    device = stage.device
    library = flashinfer_library.find(device, case.dtype)
    if isinstance(library, str):
        raise NotHereError(f"flashinfer {library}")
    table = PageTable(case.table.idle_row, case.table.length, case.page_size, device)
    table.device_pages.copy_(case.table.device_pages)
    pool = KVPool(2, case.pool.slots, case.cell, case.dtype, device)
    pool.kv.copy_(case.pool.kv.nan_to_num())
    shares = [Share(True, True), Share(case.window is None, True)]
    shape = AttentionShape(case.heads, (None, case.window), 0.3)
    return FlashInferAttention(pool, table, shape, library, shares)


def host_bounds_of(case: Case, unknown: int) -> HostBounds:
    """Return the bounds that the host knows for the lengths of a case.

    The host does not know whether the last `unknown` tokens of each request are committed.
    """
    min_lengths = tuple(max(0, count - unknown) for count in case.committed)
    return HostBounds(max(case.committed, default=0), tuple(case.chunks), min_seq_lens=min_lengths)


def attended(stage: Stage, case: Case, unknown: int) -> Tensor:
    """Return the attention output of a case, with a plan that is made from the host's bounds."""
    attention, device = attention_of(stage, case), stage.device
    attention.prepare(host_bounds_of(case, unknown))
    attention.bind(to_device(case.attention_metadata(), device))
    return attention(1, case.q.to(device), case.kv.to(device), to_device(case.sinks, device))


def replayed(stage: Stage, case: Case, unknown: tuple[int, ...]) -> dict[str, Tensor]:
    """Return the attention outputs of one graph that is replayed once for each value of `unknown`.

    Before each replay the host makes a new plan, as in an engine whose host is one step ahead.
    """
    attention, device, host_calls = attention_of(stage, case), stage.device, CallsBeforeReplay()
    seen, q, kv, sinks = (
        to_device(given, device) for given in (case.attention_metadata(), case.q, case.kv, case.sinks)
    )

    def program() -> Tensor:
        attention.bind(seen)
        return attention(1, q, kv, sinks)

    attention.prepare(host_bounds_of(case, 1))
    with replayable(host_calls):
        program()
    assert len(host_calls.calls) == 1, "the committed tokens of a tree must be one FlashInfer call"
    attention.prepare(host_bounds_of(case, 2))
    assert host_calls.ready()
    with replayable(host_calls):
        graph = Tape(program) if stage.dry else Graph(program, CudaSegments())
    given = {}
    for count in unknown:
        stage.wait()
        attention.prepare(host_bounds_of(case, count))
        assert host_calls.ready(), f"with {count} unknown tokens the new plan does not fit the captured launch"
        graph.replay()
        given[f"{count} unknown"] = graph.output.clone()
    return given


def work(stage: Stage) -> None:
    if stage.dry:
        install_stand_in(setattr)
    elif importlib.util.find_spec("flashinfer") is None:
        raise NotHereError("flashinfer is not installed here")
    with torch.inference_mode():
        for kind, kind_settings in KINDS.items():
            for unknown in stage.dry_or_gpu((3,), (0, 3)):
                with stage.check(f"attention, {kind}, {unknown} unknown") as facts:
                    case_settings = {
                        "heads": 4,
                        "kv_heads": 2,
                        "page_size": 16,
                        "lies": "scattered",
                        "seed": stage.seed,
                    }
                    case = Case(**case_settings | SHAPES["ragged"] | kind_settings, dtype=torch.bfloat16)
                    stage.check_close(facts, {"out": attended(stage, case, unknown)}, {"out": case.expected()})
            if "window" not in kind_settings:
                with stage.check(f"graph, {kind}") as facts:
                    case = Case(**case_settings | SHAPES["ragged"] | kind_settings, dtype=torch.bfloat16)
                    out = replayed(stage, case, (3, 0, 40, 9))
                    stage.check_close(facts, out, dict.fromkeys(out, case.expected()))
    with tempfile.TemporaryDirectory() as name:
        target = tiny_target(Path(name) / "target", vocab_size=24, hidden=stage.dry_or_gpu(32, 256))
        draft = tiny_draft(Path(name) / "draft", target)
        tokens(stage, target, draft)


def tokens(stage: Stage, target: str, draft: str) -> None:
    """Compare the tokens of an engine on FlashInfer with those of the reference backend.

    In bfloat16 two almost equal logits may change their order, so on a GPU only the first 8 tokens are compared, and
    one text may differ. In a dry run, in float64, all texts must be equal. No captured step may fall back to an eager
    launch because of its plan.
    """
    settings: dict[str, object] = {
        "model_path": target,
        "device": stage.device.type,
        "dtype": stage.dry_or_gpu("float64", "bfloat16"),
        "max_running_requests": stage.dry_or_gpu(1, 4),
        "max_total_tokens": 1024,
        "mixed_prefill_size": 64,
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": draft,
        "speculative_num_steps": stage.dry_or_gpu(1, 3),
        "speculative_eagle_topk": stage.dry_or_gpu(1, 4),
    }
    with stage.check("an engine's tokens") as facts:
        request_list = requests(0.0, *stage.dry_or_gpu((3, 1), (24, 4)))
        request_list = [
            replace(one, prompt_token_ids=one.prompt_token_ids * stage.dry_or_gpu(1, 15)) for one in request_list
        ]
        texts = {}
        for backend, capture in (
            (stage.dry_or_gpu("torch", "triton"), "off"),
            ("flashinfer", "off"),
            ("flashinfer", "on"),
        ):
            sizes = stage.dry_or_gpu((1,), (1, 2, 4)) if capture == "on" else None
            backend_settings = {"attention_backend": backend, "capture": capture, "capture_sizes": sizes}
            engine = build_engine(EngineConfig.from_kwargs(settings | backend_settings))
            assert engine.info().attention_backend == backend
            texts[backend, capture] = complete(engine, request_list)
            facts[f"eager fallbacks, {backend}, capture {capture}"] = engine._parts.lockstep.programs.eager_fallbacks
            assert not engine._parts.lockstep.programs.eager_fallbacks
        reference_texts, *other_texts = texts.values()
        for text in other_texts:
            alike = [one[:8] == other[:8] for one, other in zip(reference_texts, text, strict=True)]
            facts["alike"] = f"{sum(alike)} of {len(alike)}"
            assert sum(alike) >= len(alike) - stage.dry_or_gpu(0, 1)


if __name__ == "__main__":
    raise SystemExit(run("flashinfer", work))
