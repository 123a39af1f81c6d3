"""What models ask of the kernels on a GPU: attention and rows of shapes that are served, as they would be started."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from cluster.arch.cell import CodedCell
from cluster.attention.ancestor_bits import chain_bits
from cluster.attention.flashinfer.plans import PAGES_PER_PROGRAM
from cluster.attention.shape import AttentionShape
from cluster.attention.triton_backend import LayerCall, PrefixAttention, TritonAttention
from cluster.batch import AttentionMetadata, PromptRows, SamplingBatch, TreeRows
from cluster.kernels.interface import Activation, Angles, HeadNorms
from cluster.kernels.join.gpu import ListPagesArguments, list_pages
from cluster.kernels.launch import launch
from cluster.kernels.triton_kernels import TritonKernels
from cluster.kv.page_table import PageTable
from cluster.kv.pool import KVPool
from cluster.kv.triton_pool import TritonPool
from cluster.sampling.noise import Noise
from cluster.sampling.sampling_inputs import SamplerInput, SamplingInputs
from cluster.sampling.triton_sampler import TritonSampler, row_thresholds
from cluster.spec.triton_tree import TritonGrowth, accept
from tests.triton.compiling import Started, watching

CPU = torch.device("cpu")


class Window(TritonAttention):
    """What is left of a tree where FlashInfer attends its committed tokens, and of a text's sinks."""

    def _attend_tree(self, call: LayerCall, tree: TreeRows, before: PrefixAttention | None = None) -> None:
        super()._attend_tree(call, tree, self._before(call, tree.lens.to(torch.int32)))

    def _attend_text(self, call: LayerCall, text: PromptRows, first_row: int) -> None:
        self._join(call, self._before(call, None))

    def _before(self, call: LayerCall, until: Tensor | None) -> PrefixAttention:
        lse = torch.zeros(call.q.shape[:2], dtype=torch.promote_types(call.q.dtype, torch.float32))
        return PrefixAttention(call.out.view(call.q.shape[0], self._heads, self._value_dim), lse, until)


class Shape(NamedTuple):
    """Layers of one rank. `value` None: k and v of `size`; else latents, the first `value` numbers of which are values.

    `turned` numbers of a head are rotated; `normed`: heads are normed before. `fp8`: the KV cache is so.
    """

    hidden: int
    heads: int
    kv_heads: int
    size: int
    inner: int
    value: int | None = None
    sinks: bool = False
    window: int | None = None
    turned: int | None = None
    normed: bool = False
    fp8: bool = False
    activation: Activation = Activation()


SHAPES = {
    "Llama-3.1-8B": Shape(4096, 32, 8, 128, 14336),
    "Llama-3.1-8B, a quarter": Shape(4096, 8, 2, 128, 3584),
    "Qwen3-30B-A3B": Shape(2048, 32, 4, 128, 768, normed=True),
    "Gemma 3": Shape(2560, 8, 4, 256, 10240, window=1024, normed=True, activation=Activation("gelu_tanh")),
    "gpt-oss": Shape(2880, 64, 8, 64, 2880, sinks=True, window=128, activation=Activation("clamped", 1.702, 7.0)),
    "DeepSeek": Shape(7168, 128, 1, 576, 2048, value=512, turned=64),
    "DeepSeek, an eighth": Shape(7168, 16, 1, 576, 2048, value=512, turned=64),
    "Llama-3.1-8B, FP8 cache": Shape(4096, 32, 8, 128, 14336, fp8=True),
    "gpt-oss, FP8 cache": Shape(2880, 64, 8, 64, 2880, sinks=True, window=128, fp8=True),
    "small latents": Shape(2048, 16, 1, 320, 1408, value=256, turned=64),
    "DeepSeek, FP8 cache": Shape(7168, 128, 1, 576, 2048, value=512, turned=64, fp8=True),
    "GLM-4": Shape(4096, 32, 2, 128, 13696, turned=64),
}
# R, topk, depth and nodes; active experts, all, columns of their results, with biases or not.
GROWN = ((64, 1, 3, 4), (64, 4, 3, 16), (32, 8, 5, 32), (8, 10, 8, 60), (2, 16, 16, 256))
EXPERTS = ((8, 128, 2048, False), (4, 32, 2880, True), (6, 64, 2048, False), (8, 256, 7168, False))
TREES = {"alone": (1, 1), "plain": (64, 1), "chain": (16, 4), "tree": (4, 32), "wide tree": (1, 60)}
"""Requests, and rows of each."""


def started(shape: Shape, dtype: torch.dtype) -> Iterator[tuple[str, Started]]:
    """Every program that layers of `shape` start, once for each kind of rows."""
    with watching() as seen:
        _rows(shape, dtype)
    yield from ((one.program.__name__, one) for one in seen)
    for name, (requests, each) in TREES.items():
        width = each + 4
        rows = torch.arange(requests)
        tree = TreeRows(rows, torch.full((requests,), 9), chain_bits(each, width, CPU).expand(requests, -1, -1), width)
        with watching() as seen:
            _attend(shape, dtype, requests * each, tree, None)
            if shape.window is None and not shape.fp8:
                _attend(shape, dtype, requests * each, tree, None, Window)
        yield from (
            (f"{one.program.__name__}, {name}", one) for one in seen if not one.program.__name__.startswith("store")
        )
    text = PromptRows(torch.arange(2), torch.zeros(2, dtype=torch.int64), torch.tensor([0, 100, 512]))
    with watching() as seen:
        _attend(shape, dtype, 512, None, text)
        if not shape.fp8:
            _attend(shape, dtype, 512, None, text, Window)
        table = PageTable(2, 4096, 16, CPU)
        pages, listed = table.device_pages, torch.zeros(9, dtype=torch.int32)
        arguments = ListPagesArguments(pages, text.rows, text.rows.to(torch.int32), listed, pages.stride(0))
        launch(list_pages, (2, 1), arguments, BLOCK=PAGES_PER_PROGRAM)
    yield from ((f"{one.program.__name__}, prompts", one) for one in seen)


def chosen() -> Iterator[tuple[str, Started]]:
    """The programs that choose tokens of a vocabulary, their filters and noise, and that which compacts windows."""
    rows, vocab = 32, 128256
    noise = Noise(torch.zeros(rows, 1, dtype=torch.int64), torch.zeros(vocab, dtype=torch.int32), torch.bfloat16)
    numbers = [torch.ones(rows) for _ in range(2)]
    whole = torch.zeros(rows, dtype=torch.int64)
    sampling = SamplingBatch(*numbers, whole, *numbers, whole, any_random=True, any_filtered=False)
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16)
    for name, draw in (("greedy", SamplingInputs(1, sampling, None)), ("sampled", SamplingInputs(1, sampling, noise))):
        with watching() as seen:
            TritonSampler().best(SamplerInput(logits, [draw], torch.zeros(rows, 1) if draw.noise else None))
            TritonSampler().top_logprobs(SamplerInput(logits, [draw]), 8)
        yield from ((f"{one.program.__name__}, {name}", one) for one in seen)
    filtered = replace(sampling, any_filtered=True)
    for dtype in (torch.bfloat16, torch.float32):
        with watching() as seen:
            row_thresholds(logits.to(dtype), SamplingInputs(1, filtered, noise))
        yield from ((f"{one.program.__name__}, {dtype}", one) for one in seen)
    with watching() as seen:
        TritonSampler().noise(whole, whole, 7, noise.hashes, torch.bfloat16)
    yield from ((one.program.__name__, one) for one in seen)
    for name, coded in (("move", None), ("move, FP8", CodedCell((2, 8, 128)))):
        pool = TritonPool(2, 64, (2, 8, 128), torch.bfloat16, CPU, coded)
        with watching() as seen:
            pool.move_kv_cache(torch.zeros(8, 6, dtype=torch.int64), torch.zeros(8, 6, dtype=torch.int64))
        yield from ((name, one) for one in seen)


def trees() -> Iterator[tuple[str, Started]]:
    """The programs that grow trees and find their accepted paths."""
    for r, k, steps, nodes in GROWN:
        tokens, likely = torch.zeros(r, k, dtype=torch.int64), torch.zeros(r, k)
        with watching() as seen:
            grown = TritonGrowth(tokens, likely, steps)
            for _ in range(1, steps):
                grown.add(tokens[..., None].expand(r, k, k), likely[..., None].expand(r, k, k))
            tree = grown.tree(tokens[:, 0], nodes)
            accept(tree, tree.tokens, tokens[:, 0], steps)
        yield from ((f"{one.program.__name__}, {k} x {steps}, {nodes} nodes", one) for one in seen)


def expert_rows() -> Iterator[tuple[str, Started]]:
    """The programs that bring rows to their experts and back: active ones, all, and columns of the result."""
    kernels = TritonKernels()
    for active, experts, size, biased in EXPERTS:
        chosen = torch.zeros(512, active, dtype=torch.int64)
        weights = torch.zeros(512, active, dtype=torch.bfloat16)
        bias = torch.zeros(experts, size, dtype=torch.bfloat16) if biased else None
        with watching() as seen:
            groups = kernels.group(chosen, experts)
            kernels.combine(torch.zeros(512 * active, size, dtype=torch.bfloat16), groups, weights, bias)
        yield from ((f"{one.program.__name__}, {active} of {experts}", one) for one in seen)


def _attend(
    shape: Shape,
    dtype: torch.dtype,
    rows: int,
    tree: TreeRows | None,
    text: PromptRows | None,
    made: type[TritonAttention] = TritonAttention,
) -> None:
    table, cell = PageTable(64, 4096, 16, CPU), (2, shape.kv_heads, shape.size)
    cell = cell if shape.value is None else (1, 1, shape.size)
    pool = KVPool(1, 32, cell, dtype, CPU, CodedCell(cell, shape.value) if shape.fp8 else None)
    backend = made(pool, table, AttentionShape(shape.heads, (shape.window,), None, shape.value))
    backend._processors = 132
    backend.bind(AttentionMetadata(torch.zeros(rows, dtype=torch.int64), tree, text))
    kv = torch.zeros(rows, *cell, dtype=dtype)
    sinks = torch.zeros(shape.heads, dtype=dtype) if shape.sinks else None
    backend(0, torch.zeros(rows, shape.heads, shape.size, dtype=dtype), kv, sinks)


def _rows(shape: Shape, dtype: torch.dtype, count: int = 64) -> None:
    kernels, turned = TritonKernels(), shape.turned or shape.size

    def zeros(*sizes: int) -> Tensor:
        return torch.zeros(sizes, dtype=dtype)

    heads = zeros(count, shape.heads + shape.kv_heads, shape.size)
    scale = zeros(shape.size)
    angles = Angles(zeros(count, 1, turned), zeros(count, 1, turned))
    kernels.norm(zeros(count, shape.hidden), zeros(shape.hidden), 1e-5)
    kernels.add_norm(zeros(count, shape.hidden), zeros(count, shape.hidden), zeros(shape.hidden), 1e-5)
    kernels.rotate(heads, angles, HeadNorms(shape.heads, scale, scale, 1e-6) if shape.normed else None)
    kernels.activate(zeros(count, 2 * shape.inner), shape.activation)


OTHERS: dict[str, Callable[[], Iterator[tuple[str, Started]]]] = {
    "any vocabulary": chosen,
    "trees": trees,
    "experts": expert_rows,
}
"""Programs that no layer starts, by what they work on."""
