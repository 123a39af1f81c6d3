"""Tests of FlashInfer on a CUDA device.

Attention by FlashInfer equals the definition of attention, and an engine on FlashInfer gives the tokens of an engine on
Triton. The attention tests have run on an H200 (docs/gpu.md); the engine tests have not run on a GPU yet. The tests are
to verify: fa3 on strided cells, the bases of logarithms, one workspace for all wrappers, plans that are copied while a
step runs, and latents of 512 + 64.
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
from tests.gpu.stages.flashinfer import KINDS, host_bounds_of
from tests.gpu.test_triton import CUDA, ERROR, LONG, to_device
from tests.parity.harness import GREEDY, config_of, make_request, prompts, run
from tests.support.tiny_checkpoints import draft_folder, target_folder
from tests.unit.attention.dense import Case
from tests.unit.attention.test_gather_methods import SHAPES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed here"),
]


def library_for(dtype: torch.dtype) -> FlashInfer:
    found = find(CUDA, dtype)
    assert not isinstance(found, str), found
    return found


def attention_of(case: Case) -> FlashInferAttention:
    table = PageTable(case.table.idle_row, case.table.length, case.page_size, CUDA)
    table.device_pages.copy_(case.table.device_pages)
    pool = KVPool(2, case.pool.slots, case.cell, case.dtype, CUDA)
    pool.kv.copy_(case.pool.kv.nan_to_num())
    shares = [Share(True, True), Share(case.window is None, True)]
    shape = AttentionShape(case.heads, (None, case.window), 0.3)
    return FlashInferAttention(pool, table, shape, library_for(case.dtype), shares)


def attention_output(case: Case, attention: FlashInferAttention, unknown: int, set_index: int = 0) -> Tensor:
    attention.prepare(host_bounds_of(case, unknown)._replace(buffer_set=set_index))
    attention.bind(to_device(case.attention_metadata()))
    return attention(1, case.q.to(CUDA), case.kv.to(CUDA), to_device(case.sinks))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["all", "wide", "long"])
@pytest.mark.parametrize("unknown", [0, 3])
def test_flashinfer_attention_on_cuda_matches_the_definition(
    shape: str, kind: str, unknown: int, dtype: torch.dtype
) -> None:
    settings = {"heads": 4, "kv_heads": 2, "page_size": 16, "lies": "scattered", "dtype": dtype}
    case = Case(**settings | (LONG if shape == "long" else SHAPES[shape]) | KINDS[kind])
    out = attention_output(case, attention_of(case), unknown)
    assert torch.allclose(out.cpu().double(), case.expected(), atol=2 * ERROR[dtype], rtol=0)


def test_overlapped_steps_with_two_wrapper_sets_give_equal_outputs() -> None:
    """Each step is launched while the device may still run the previous one. Two sets of wrappers allow one step ahead.

    In the loop the host waits for the previous step only: the inputs are on the device already, and the outputs are
    compared after the loop.
    """
    case = Case(4, 2, (2500, 700), (-1, 0, 0, 1), ((100, 600),), 16, "scattered", dtype=torch.bfloat16, d=128)
    attention = attention_of(case)
    expected = attention_output(case, attention, 0).clone()
    seen, q, kv, sinks = (
        to_device(case.attention_metadata()),
        case.q.to(CUDA),
        case.kv.to(CUDA),
        to_device(case.sinks),
    )
    torch.cuda.synchronize()
    outputs, events, overlapped_steps = list[Tensor](), list[torch.cuda.Event](), 0
    for step in range(20):
        torch.cuda._sleep(20_000_000)
        attention.prepare(host_bounds_of(case, 0)._replace(buffer_set=step % 2))
        attention.bind(seen)
        outputs.append(attention(1, q, kv, sinks).clone())
        events.append(torch.cuda.Event())
        events[-1].record()
        if step:
            overlapped_steps += not events[-2].query()
            events[-2].synchronize()
    assert all(torch.equal(out, expected) for out in outputs)
    assert overlapped_steps > 0, "each step was launched after the end of the previous one"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [kind for kind, of_kind in KINDS.items() if "window" not in of_kind])
def test_graphs_of_both_buffer_sets_match_eager_attention(kind: str, dtype: torch.dtype) -> None:
    """Each graph gets a new plan before its replay, while the replay of the other graph may still run. So the outputs
    are compared after the loop.
    """
    settings = {"heads": 4, "kv_heads": 2, "page_size": 16, "lies": "scattered", "dtype": dtype}
    case = Case(**settings | SHAPES["ragged"] | KINDS[kind])
    attention, host_calls_by_set, graphs = attention_of(case), [CallsBeforeReplay(), CallsBeforeReplay()], []
    seen, q, kv, sinks, segments = (
        to_device(case.attention_metadata()),
        case.q.to(CUDA),
        case.kv.to(CUDA),
        to_device(case.sinks),
        CudaSegments(),
    )

    def program() -> Tensor:
        attention.bind(seen)
        return attention(1, q, kv, sinks)

    with torch.inference_mode():
        for set_index, host_calls in enumerate(host_calls_by_set):
            attention.prepare(host_bounds_of(case, 1)._replace(buffer_set=set_index))
            with replayable(host_calls):
                program()
            torch.cuda.synchronize()
            attention.prepare(host_bounds_of(case, 2)._replace(buffer_set=set_index))
            assert host_calls.ready() and len(host_calls.calls) == 1
            with replayable(host_calls):
                graphs.append(Graph(program, segments))
            torch.cuda.synchronize()
        expected = {}
        for unknown in (0, 3, 40, 9):
            expected[unknown] = attention_output(case, attention, unknown).clone()
            torch.cuda.synchronize()
        events, outputs, overlapped_replays = list[torch.cuda.Event](), list[tuple[int, Tensor]](), 0
        for replay_index in range(40):
            unknown, set_index = (0, 3, 40, 9)[replay_index // 2 % 4], replay_index % 2
            torch.cuda._sleep(10_000_000)
            attention.prepare(host_bounds_of(case, unknown)._replace(buffer_set=set_index))
            assert host_calls_by_set[set_index].ready(), "the new plan must fit the captured launch"
            graphs[set_index].replay()
            outputs.append((unknown, graphs[set_index].output.clone()))
            events.append(torch.cuda.Event())
            events[-1].record()
            if replay_index:
                overlapped_replays += not events[-2].query()
                events[-2].synchronize()
        for unknown, out in outputs:
            assert torch.allclose(out.double(), expected[unknown].double(), atol=2 * ERROR[dtype], rtol=0)
        assert overlapped_replays > 0, "each replay was launched after the end of the previous one"


@pytest.mark.parametrize("topk", [1, 4])
def test_flashinfer_engine_gives_mostly_the_tokens_of_triton(topk: int) -> None:
    """In bfloat16, two almost equal logits may change their order. So only the first 8 tokens are compared, and one
    text may differ. No captured step may fall back to an eager launch.
    """
    target = target_folder(vocab_size=24, hidden=256, heads=4, kv_heads=2)
    draft = draft_folder(target)
    texts = []
    for backend, capture in (("triton", "off"), ("flashinfer", "off"), ("flashinfer", "on")):
        settings = {"device": "cuda", "dtype": "bfloat16", "attention_backend": backend, "capture": capture}
        engine = build_engine(config_of(target, draft, topk, 3, **settings))
        assert engine.info().attention_backend == backend
        texts.append(
            run(engine, [make_request(str(i), p, GREEDY, max_tokens=24) for i, p in enumerate(prompts(4))]).tokens
        )
        assert not engine._parts.lockstep.programs.eager_fallbacks
        alike = [texts[0][name][:8] == texts[-1][name][:8] for name in texts[0]]
        assert sum(alike) >= len(alike) - 1
