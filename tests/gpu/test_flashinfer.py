"""FlashInfer on a CUDA device gives what the definition says, and an engine on it the tokens of one on Triton.

The checks of attention ran on an H200 (docs/gpu.md), those of an engine have not. What they are to settle: fa3 over
cells with strides, the bases of logarithms, one workspace for all wrappers, plans copied behind a step under way,
latents of 512 + 64.
"""

import importlib.util

import pytest
import torch
from torch import Tensor

from cluster.attention.flashinfer.backend import FlashInferAttention
from cluster.attention.shape import AttentionShape
from cluster.capture.cuda_graph import CudaSegments, Graph
from cluster.capture.recorder import CallsBeforeReplay, replayable
from cluster.engine import build_engine
from cluster.kernels.flashinfer.library import FlashInfer, Share, find
from cluster.kv.page_table import PageTable
from cluster.kv.pool import KVPool
from tests.gpu.stages.flashinfer import KINDS, Wide, known
from tests.gpu.test_triton import CUDA, ERROR, LONG, there
from tests.parity.harness import GREEDY, config_of, prompts, request, run
from tests.tiny import draft_folder, target_folder
from tests.unit.attention.dense import Case
from tests.unit.attention.test_gather_methods import SHAPES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed here"),
]


def asked(dtype: torch.dtype) -> FlashInfer:
    found = find(CUDA, dtype)
    assert not isinstance(found, str), found
    return found


def attention_of(one: Case) -> FlashInferAttention:
    table = PageTable(one.table.idle_row, one.table.length, one.page_size, CUDA)
    table.device_pages.copy_(one.table.device_pages)
    pool = KVPool(2, one.pool.kv.shape[1], tuple(one.pool.kv.shape[2:]), one.dtype, CUDA)
    pool.kv.copy_(one.pool.kv.nan_to_num())
    shares = [Share(True, True), Share(one.window is None, True)]
    shape = AttentionShape(one.heads, (None, one.window), 0.3, one.values)
    return FlashInferAttention(pool, table, shape, asked(one.dtype), shares)


def given(one: Case, attention: FlashInferAttention, unknown: int, turn: int = 0) -> Tensor:
    attention.prepare(known(one, unknown)._replace(buffer_set=turn))
    attention.bind(there(one.seen()))
    return attention(1, one.q.to(CUDA), one.kv.to(CUDA), there(one.sinks))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["all", "wide", "long"])
@pytest.mark.parametrize("unknown", [0, 3])
def test_flashinfer_attention_on_cuda_matches_the_definition(
    shape: str, kind: str, unknown: int, dtype: torch.dtype
) -> None:
    base = {"heads": 4, "kv_heads": 2, "page_size": 16, "lies": "scattered", "dtype": dtype}
    one = Wide(**base | (LONG if shape == "long" else SHAPES[shape]) | KINDS[kind])
    out = given(one, attention_of(one), unknown)
    assert torch.allclose(out.cpu().double(), one.expected(), atol=2 * ERROR[dtype], rtol=0)


def test_overlapped_steps_with_two_wrapper_sets_give_equal_outputs() -> None:
    """Many steps begun before one is read, as far as two sets of wrappers allow: one ahead."""
    one = Wide(4, 2, (2500, 700), (-1, 0, 0, 1), ((100, 600),), 16, "scattered", dtype=torch.bfloat16, d=128)
    attention = attention_of(one)
    expected = given(one, attention, 0).clone()
    read: torch.cuda.Event | None = None
    for at in range(20):
        torch.cuda._sleep(2_000_000)
        out = given(one, attention, 0, at % 2)
        landed = torch.cuda.Event()
        landed.record()
        if read is not None:
            read.synchronize()
        read = landed
        assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [kind for kind, of_kind in KINDS.items() if "window" not in of_kind])
def test_graphs_of_both_buffer_sets_match_eager_attention(kind: str, dtype: torch.dtype) -> None:
    """Each is planned anew before its replay, while the replay of the other may be under way."""
    base = {"heads": 4, "kv_heads": 2, "page_size": 16, "lies": "scattered", "dtype": dtype}
    one = Wide(**base | SHAPES["ragged"] | KINDS[kind])
    attention, aheads, graphs = attention_of(one), [CallsBeforeReplay(), CallsBeforeReplay()], []
    seen, q, kv, sinks, segments = there(one.seen()), one.q.to(CUDA), one.kv.to(CUDA), there(one.sinks), CudaSegments()

    def program() -> Tensor:
        attention.bind(seen)
        return attention(1, q, kv, sinks)

    with torch.inference_mode():
        for turn, ahead in enumerate(aheads):
            attention.prepare(known(one, 1)._replace(buffer_set=turn))
            with replayable(ahead):
                program()
            torch.cuda.synchronize()
            attention.prepare(known(one, 2)._replace(buffer_set=turn))
            assert ahead.ready() and len(ahead.calls) == 1
            with replayable(ahead):
                graphs.append(Graph(program, segments))
            torch.cuda.synchronize()
        expected = {}
        for unknown in (0, 3, 40, 9):
            expected[unknown] = given(one, attention, unknown).clone()
            torch.cuda.synchronize()
        read: list[torch.cuda.Event] = []
        for at in range(40):
            unknown, turn = (0, 3, 40, 9)[at // 2 % 4], at % 2
            torch.cuda._sleep(1_000_000)
            attention.prepare(known(one, unknown)._replace(buffer_set=turn))
            assert aheads[turn].ready(), "its plan launches with other numbers"
            graphs[turn].replay()
            out = graphs[turn].output.clone()
            read.append(torch.cuda.Event())
            read[-1].record()
            read[max(0, len(read) - 2)].synchronize()
            assert torch.allclose(out.double(), expected[unknown].double(), atol=2 * ERROR[dtype], rtol=0)


@pytest.mark.parametrize("topk", [1, 4])
def test_flashinfer_engine_gives_mostly_the_tokens_of_triton(topk: int) -> None:
    """In bfloat16 near-ties may flip, so tokens are compared while the texts are alike, which most have to be. No step
    that was captured is launched anew.
    """
    target = target_folder(vocab_size=24, hidden=256, heads=4, kv_heads=2)
    draft = draft_folder(target)
    texts = []
    for backend, capture in (("triton", "off"), ("flashinfer", "off"), ("flashinfer", "on")):
        settings = {"device": "cuda", "dtype": "bfloat16", "attention_backend": backend, "capture": capture}
        engine = build_engine(config_of(target, draft, topk, 3, **settings))
        assert engine.info().attention_backend == backend
        texts.append(run(engine, [request(str(i), p, GREEDY, max_tokens=24) for i, p in enumerate(prompts(4))]).tokens)
        assert not engine._parts.lockstep.programs.eager_fallbacks
        alike = [texts[0][name][:8] == texts[-1][name][:8] for name in texts[0]]
        assert sum(alike) >= len(alike) - 1
