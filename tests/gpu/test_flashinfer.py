"""FlashInfer on a CUDA device gives what the definition says, and an engine on it the tokens of one on Triton.

Nothing of it has run yet: see docs/performance.md. What these are to settle: fa3 over cells with strides, the bases of
logarithms, one workspace for all wrappers, plans copied behind a step under way, latents of 512 + 64.
"""

import importlib.util

import pytest
import torch
from torch import Tensor

from cluster.attention.flashinfer_backend import FlashInferAttention
from cluster.batch import HostBounds
from cluster.engine import build_engine
from cluster.kernels.flashinfer_library import FlashInfer, Share, find
from cluster.kv.page_table import PageTable
from cluster.kv.pool import KVPool
from tests.gpu.stages.flashinfer import KINDS, Wide
from tests.gpu.test_triton import CUDA, ERROR, LONG, there
from tests.parity.harness import GREEDY, config_of, prompts, request, run
from tests.tiny import draft_folder, target_folder
from tests.unit.attention.dense import Case
from tests.unit.attention.test_twins import SHAPES

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
    return FlashInferAttention(pool, table, one.heads, (None, one.window), 0.3, one.values, asked(one.dtype), shares)


def given(one: Case, attention: FlashInferAttention, unknown: int) -> Tensor:
    least = tuple(max(0, count - unknown) for count in one.committed)
    attention.prepare(HostBounds(max(one.committed, default=0), tuple(one.chunks), least=least))
    attention.bind(there(one.seen()))
    return attention(1, one.q.to(CUDA), one.kv.to(CUDA), there(one.sinks))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["all", "wide", "long"])
@pytest.mark.parametrize("unknown", [0, 3])
def test_attention(shape: str, kind: str, unknown: int, dtype: torch.dtype) -> None:
    base = {"heads": 4, "kv_heads": 2, "page_size": 16, "lies": "scattered", "dtype": dtype}
    one = Wide(**base | (LONG if shape == "long" else SHAPES[shape]) | KINDS[kind])
    out = given(one, attention_of(one), unknown)
    assert torch.allclose(out.cpu().double(), one.expected(), atol=2 * ERROR[dtype], rtol=0)


def test_nothing_waits_and_plans_under_way_are_whole() -> None:
    """Many steps begun before one is read, as far as two sets of wrappers allow: one ahead."""
    one = Wide(4, 2, (2500, 700), (-1, 0, 0, 1), ((100, 600),), 16, "scattered", dtype=torch.bfloat16, d=128)
    attention = attention_of(one)
    expected = given(one, attention, 0).clone()
    read: torch.cuda.Event | None = None
    for _ in range(20):
        torch.cuda._sleep(2_000_000)
        out = given(one, attention, 0)
        landed = torch.cuda.Event()
        landed.record()
        if read is not None:
            read.synchronize()
        read = landed
        assert torch.equal(out, expected)


@pytest.mark.parametrize("topk", [1, 4])
def test_an_engine_gives_the_tokens_of_triton(topk: int) -> None:
    """In bfloat16 near-ties may flip, so tokens are compared while the texts are alike, which most have to be."""
    target = target_folder(vocab_size=24, hidden=256, heads=4, kv_heads=2)
    draft = draft_folder(target)
    texts = []
    for backend in ("triton", "flashinfer"):
        settings = {"device": "cuda", "dtype": "bfloat16", "attention_backend": backend}
        engine = build_engine(config_of(target, draft, topk, 3, **settings))
        assert engine.info().attention_backend == backend
        texts.append(run(engine, [request(str(i), p, GREEDY, max_tokens=24) for i, p in enumerate(prompts(4))]).tokens)
    alike = [texts[0][name][:8] == texts[1][name][:8] for name in texts[0]]
    assert sum(alike) >= len(alike) - 1
