"""The launches of Triton programs that served models make on a GPU: of attention and of the other kernels, with the
shapes of these models.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from cluster.arch.cell import Cell
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
from cluster.kv.window_map import WindowMap
from cluster.sampling.noise import Noise
from cluster.sampling.sampling_inputs import SamplerInput, SamplingInputs
from cluster.sampling.triton_sampler import TritonSampler, row_thresholds
from cluster.spec.triton_tree import TritonGrowth, accept
from tests.triton.compiling import StartedProgram, record_launches

CPU = torch.device("cpu")


class TritonAfterFlashInfer(TritonAttention):
    """The part of attention that Triton does when FlashInfer attends to the committed tokens: the nodes of trees, and
    the attention sinks of prompts.
    """

    def _attend_tree(self, call: LayerCall, tree: TreeRows, before: PrefixAttention | None = None) -> None:
        super()._attend_tree(call, tree, self._before(call, tree.lens.to(torch.int32)))

    def _attend_text(self, call: LayerCall, text: PromptRows, first_row: int) -> None:
        self._join(call, self._before(call, None))

    def _before(self, call: LayerCall, until: Tensor | None) -> PrefixAttention:
        lse = torch.zeros(call.q.shape[:2], dtype=torch.promote_types(call.q.dtype, torch.float32))
        return PrefixAttention(call.out.view(call.q.shape[0], self._heads, self._value_dim), lse, until)


class Shape(NamedTuple):
    """The shape of a model's layers on one rank: hidden size, heads, KV heads, head size and MLP size.

    If `value` is None, the cache has keys and values of `size`; otherwise it has latents, of which the first `value`
    numbers are the values. `window` is as in `AttentionShape`. `rotated` is how many numbers of a head are rotated
    (None: all). `head_norms`: heads are normed before the rotation. `fp8`: the KV cache is in FP8.
    """

    hidden: int
    heads: int
    kv_heads: int
    size: int
    inner: int
    value: int | None = None
    latent: bool = False
    sinks: bool = False
    window: int | None = None
    rotated: int | None = None
    head_norms: bool = False
    fp8: bool = False
    activation: Activation = Activation()


SHAPES = {
    "Llama-3.1-8B": Shape(4096, 32, 8, 128, 14336),
    "Llama-3.1-8B, a quarter": Shape(4096, 8, 2, 128, 3584),
    "Qwen3-30B-A3B": Shape(2048, 32, 4, 128, 768, head_norms=True),
    "Gemma 3": Shape(2560, 8, 4, 256, 10240, window=1024, head_norms=True, activation=Activation("gelu_tanh")),
    "gpt-oss": Shape(2880, 64, 8, 64, 2880, sinks=True, window=128, activation=Activation("clamped", 1.702, 7.0)),
    "DeepSeek": Shape(7168, 128, 1, 576, 2048, value=512, latent=True, rotated=64),
    "DeepSeek, an eighth": Shape(7168, 16, 1, 576, 2048, value=512, latent=True, rotated=64),
    "Llama-3.1-8B, FP8 cache": Shape(4096, 32, 8, 128, 14336, fp8=True),
    "gpt-oss, FP8 cache": Shape(2880, 64, 8, 64, 2880, sinks=True, window=128, fp8=True),
    "small latents": Shape(2048, 16, 1, 320, 1408, value=256, latent=True, rotated=64),
    "DeepSeek, FP8 cache": Shape(7168, 128, 1, 576, 2048, value=512, latent=True, rotated=64, fp8=True),
    "Step-3.5": Shape(
        4096, 96, 8, 128, 1280, window=512, head_norms=True, activation=Activation("clamped_silu", limit=7.0)
    ),
    "MiMo-V2": Shape(4096, 64, 4, 192, 16384, value=128, rotated=64),
    "MiMo-V2, window": Shape(4096, 64, 8, 192, 2048, value=128, rotated=64, sinks=True, window=129),
    "MiMo-V2, FP8 cache": Shape(4096, 64, 4, 192, 16384, value=128, rotated=64, fp8=True),
    "Gemma-4-E2B": Shape(1536, 8, 1, 512, 6144, head_norms=True, activation=Activation("gelu_tanh")),
    "Gemma-4-E2B, window": Shape(
        1536, 8, 1, 256, 12288, window=512, head_norms=True, activation=Activation("gelu_tanh")
    ),
    "Llama-4": Shape(5120, 40, 8, 128, 8192, window=-8192, head_norms=True),
    "GLM-4": Shape(4096, 32, 2, 128, 13696, rotated=64),
}
# Of trees: requests, topk, depth, nodes. Of experts: active experts, all experts, columns of their results, biases.
TREE_SIZES = ((64, 1, 3, 4), (64, 4, 3, 16), (32, 8, 5, 32), (8, 10, 8, 60), (2, 16, 16, 256))
EXPERTS = ((8, 128, 2048, False), (4, 32, 2880, True), (6, 64, 2048, False), (8, 256, 7168, False))
TREE_ROWS = {"alone": (1, 1), "plain": (64, 1), "chain": (16, 4), "tree": (4, 32), "wide tree": (1, 60)}
"""By name: the number of requests, and the rows of each request."""


def layer_programs(shape: Shape, dtype: torch.dtype) -> Iterator[tuple[str, StartedProgram]]:
    """Every program that layers of `shape` launch, by name, once for each kind of rows."""
    with record_launches() as programs:
        _rows(shape, dtype)
    yield from ((program.program.__name__, program) for program in programs)
    for name, (requests, rows_per_request) in TREE_ROWS.items():
        width = rows_per_request + 4
        rows = torch.arange(requests)
        tree = TreeRows(
            rows, torch.full((requests,), 9), chain_bits(rows_per_request, width, CPU).expand(requests, -1, -1), width
        )
        with record_launches() as programs:
            _attend(shape, dtype, requests * rows_per_request, tree, None)
            if shape.window is None and not shape.fp8:
                _attend(shape, dtype, requests * rows_per_request, tree, None, TritonAfterFlashInfer)
        yield from (
            (f"{program.program.__name__}, {name}", program)
            for program in programs
            if not program.program.__name__.startswith("store")
        )
    prompt_rows = PromptRows(torch.arange(2), torch.zeros(2, dtype=torch.int64), torch.tensor([0, 100, 512]))
    with record_launches() as programs:
        _attend(shape, dtype, 512, None, prompt_rows)
        if not shape.fp8:
            _attend(shape, dtype, 512, None, prompt_rows, TritonAfterFlashInfer)
        table = PageTable(2, 4096, 16, CPU)
        pages, page_list = table.device_pages, torch.zeros(9, dtype=torch.int32)
        arguments = ListPagesArguments(
            pages, prompt_rows.rows, prompt_rows.rows.to(torch.int32), page_list, pages.stride(0)
        )
        launch(list_pages, (2, 1), arguments, BLOCK=PAGES_PER_PROGRAM)
    yield from ((f"{program.program.__name__}, prompts", program) for program in programs)


def sampler_programs() -> Iterator[tuple[str, StartedProgram]]:
    """The programs that choose tokens of a vocabulary, those of filters and noise, and the program that moves accepted
    cells of the KV cache.
    """
    rows, vocab = 32, 128256
    noise = Noise(torch.zeros(rows, 1, dtype=torch.int64), torch.zeros(vocab, dtype=torch.int32), torch.bfloat16)
    row_params = [torch.ones(rows) for _ in range(2)]
    row_integers = torch.zeros(rows, dtype=torch.int64)
    sampling = SamplingBatch(*row_params, row_integers, *row_params, row_integers, any_random=True, any_filtered=False)
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16)
    for name, sampling_inputs in (
        ("greedy", SamplingInputs(1, sampling, None)),
        ("sampled", SamplingInputs(1, sampling, noise)),
    ):
        with record_launches() as programs:
            TritonSampler().best(
                SamplerInput(logits, [sampling_inputs], torch.zeros(rows, 1) if sampling_inputs.noise else None)
            )
            TritonSampler().top_logprobs(SamplerInput(logits, [sampling_inputs]), 8)
        yield from ((f"{program.program.__name__}, {name}", program) for program in programs)
    filtered = replace(sampling, any_filtered=True)
    for dtype in (torch.bfloat16, torch.float32):
        with record_launches() as programs:
            row_thresholds(logits.to(dtype), SamplingInputs(1, filtered, noise))
        yield from ((f"{program.program.__name__}, {dtype}", program) for program in programs)
    with record_launches() as programs:
        TritonSampler().noise(row_integers, row_integers, 7, noise.hashes, torch.bfloat16)
    yield from ((program.program.__name__, program) for program in programs)
    moves: tuple[tuple[str, bool, WindowMap | None], ...] = (
        ("move", False, None),
        ("move, FP8", True, None),
        ("move, window pool", False, WindowMap(64, 16, CPU)),
    )
    for name, fp8, window_map in moves:
        pool = TritonPool(2, 64, Cell(8, 128, 128), torch.bfloat16, CPU, fp8, window_map)
        with record_launches() as programs:
            pool.move_kv_cache(torch.zeros(8, 6, dtype=torch.int64), torch.zeros(8, 6, dtype=torch.int64))
        yield from ((name, program) for program in programs)


def tree_programs() -> Iterator[tuple[str, StartedProgram]]:
    """The programs that grow trees and find their accepted paths."""
    for r, k, steps, nodes in TREE_SIZES:
        tokens, log_probabilities = torch.zeros(r, k, dtype=torch.int64), torch.zeros(r, k)
        with record_launches() as programs:
            growth = TritonGrowth(tokens, log_probabilities, steps)
            for _ in range(1, steps):
                growth.add(tokens[..., None].expand(r, k, k), log_probabilities[..., None].expand(r, k, k))
            tree = growth.tree(tokens[:, 0], nodes)
            accept(tree, tree.tokens, tokens[:, 0], steps)
        yield from ((f"{program.program.__name__}, {k} x {steps}, {nodes} nodes", program) for program in programs)


def expert_programs() -> Iterator[tuple[str, StartedProgram]]:
    """The programs that group rows by their experts, and those that combine the results of the experts."""
    kernels = TritonKernels()
    for active, experts, size, biased in EXPERTS:
        expert_ids = torch.zeros(512, active, dtype=torch.int64)
        weights = torch.zeros(512, active, dtype=torch.bfloat16)
        bias = torch.zeros(experts, size, dtype=torch.bfloat16) if biased else None
        with record_launches() as programs:
            groups = kernels.group(expert_ids, experts)
            kernels.combine(torch.zeros(512 * active, size, dtype=torch.bfloat16), groups, weights, bias)
        yield from ((f"{program.program.__name__}, {active} of {experts}", program) for program in programs)


def _attend(
    shape: Shape,
    dtype: torch.dtype,
    rows: int,
    tree: TreeRows | None,
    prompt_rows: PromptRows | None,
    backend_class: type[TritonAttention] = TritonAttention,
) -> None:
    table = PageTable(64, 4096, 16, CPU)
    cell = Cell(shape.kv_heads, shape.size, shape.value or shape.size, shape.latent)
    window_map = None if shape.window is None else WindowMap(64, 16, CPU)  # such layers are in window pools
    pool = KVPool(1, 32, cell, dtype, CPU, shape.fp8, window_map)
    backend = backend_class(pool, table, AttentionShape(shape.heads, (shape.window,)))
    backend._processors = 132
    backend.bind(AttentionMetadata(torch.zeros(rows, dtype=torch.int64), tree, prompt_rows))
    kv = torch.zeros(rows, *cell.shape, dtype=dtype)
    sinks = torch.zeros(shape.heads, dtype=dtype) if shape.sinks else None
    backend(0, torch.zeros(rows, shape.heads, shape.size, dtype=dtype), kv, sinks)


def _rows(shape: Shape, dtype: torch.dtype, count: int = 64) -> None:
    kernels, rotated_size = TritonKernels(), shape.rotated or shape.size

    def zeros(*sizes: int) -> Tensor:
        return torch.zeros(sizes, dtype=dtype)

    heads = zeros(count, shape.heads + shape.kv_heads, shape.size)
    scale = zeros(shape.size)
    angles = Angles(zeros(count, 1, rotated_size), zeros(count, 1, rotated_size))
    kernels.norm(zeros(count, shape.hidden), zeros(shape.hidden), 1e-5)
    kernels.add_norm(zeros(count, shape.hidden), zeros(count, shape.hidden), zeros(shape.hidden), 1e-5)
    kernels.rotate(heads, angles, HeadNorms(shape.heads, scale, scale, 1e-6) if shape.head_norms else None)
    kernels.activate(zeros(count, 2 * shape.inner), shape.activation)


OTHER_PROGRAMS: dict[str, Callable[[], Iterator[tuple[str, StartedProgram]]]] = {
    "any vocabulary": sampler_programs,
    "trees": tree_programs,
    "experts": expert_programs,
}
"""The programs that no layer launches, by what they work on."""
