"""Tests of the Triton kernels on a CUDA device against their reference implementations.

The cases are those of the tests in Triton's interpreter.
"""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.attention.shape import AttentionShape
from cluster.attention.triton_backend import TritonAttention
from cluster.kernels.interface import Activation, Angles, HeadNorms
from cluster.kernels.torch_kernels import TorchKernels
from cluster.kernels.triton_kernels import TritonKernels
from cluster.kv.page_table import PageTable
from cluster.kv.pool import KVPool
from cluster.sampling import filters
from cluster.sampling.noise import keys_along
from cluster.sampling.sampling_inputs import SamplingInputs
from cluster.sampling.triton_sampler import TritonSampler, row_thresholds
from tests.gpu.trees import check_trees
from tests.unit.attention.dense import Case
from tests.unit.attention.test_gather_methods import KINDS, SHAPES, TREE
from tests.unit.kernels.test_product import assert_close, random_tensor
from tests.unit.sampling.test_c_sampler import random_logits
from tests.unit.sampling.test_sampler import mixed_sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
ERROR = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
LONG: dict[str, Any] = {"committed": (2500, 700), "parents": TREE, "chunks": ((100, 600),)}


def to_device(value: Any) -> Any:
    """Return a tensor or a dataclass with all its tensors on the CUDA device."""
    if isinstance(value, Tensor):
        return value.to(CUDA)
    if not hasattr(value, "__dataclass_fields__"):
        return value
    return replace(value, **{field.name: to_device(getattr(value, field.name)) for field in fields(value)})


def attention_on_device(case: Case) -> Tensor:
    """Return the attention of a case, computed by Triton on the CUDA device."""
    table = PageTable(case.table.idle_row, case.table.length, case.page_size, CUDA)
    table.device_pages.copy_(case.table.device_pages)
    filled = case.filled_pool()
    pool = KVPool(2, filled.slots, filled.cell, case.dtype, CUDA, filled.fp8)
    pool.kv.copy_(filled.kv)
    attention = TritonAttention(pool, table, AttentionShape(case.heads, (None, case.visible_span), 0.3))
    attention.bind(to_device(case.attention_metadata()))
    out = attention(1, case.q.to(CUDA), case.kv.to(CUDA), to_device(case.sinks)).cpu()
    assert out.isfinite().all()
    rows_before_first = [row for row, text in enumerate(case.visible_cells()) if len(text) - 1 < case.first]
    return out.index_fill(0, torch.tensor(rows_before_first, dtype=torch.int64), 0)


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["all", "wide", "long"])
def test_triton_attention_on_cuda_matches_the_definition(shape: str, kind: str, dtype: torch.dtype) -> None:
    if dtype == torch.float64 and KINDS[kind].get("fp8"):
        pytest.skip("Triton does not compile FP8 caches with float64 for GPUs, and engines refuse the pair")
    case_sizes = {"heads": 4, "kv_heads": 2} | (LONG if shape == "long" else SHAPES[shape]) | KINDS[kind]
    for d in (8, 128, 192):
        case = Case(**case_sizes, page_size=16, lies="scattered", dtype=dtype, d=d)
        distance, largest = (
            (attention_on_device(case).double() - case.expected()).abs().max(),
            case.expected().abs().max(),
        )
        assert distance <= ERROR[dtype] * max(1, largest), f"head size {d}: error {distance}, largest value {largest}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_triton_norm_rotation_and_activation_on_cuda_match_reference(dtype: torch.dtype) -> None:
    kernels, reference = TritonKernels(), TorchKernels()
    rows, residual, scale = (
        random_tensor(*shape, dtype=dtype, seed=at) for at, shape in enumerate([(33, 2880), (33, 2880), (2880,)])
    )
    total, normed = kernels.add_norm(rows.to(CUDA), residual.to(CUDA), scale.to(CUDA), 1e-5)
    assert torch.equal(total.cpu(), rows + residual)
    assert_close(normed.cpu(), reference.norm((rows + residual).double(), scale.double(), 1e-5), dtype)
    heads, q, k = (
        random_tensor(33, 7, 128, dtype=dtype),
        random_tensor(128, dtype=dtype),
        random_tensor(128, dtype=dtype, seed=1),
    )
    angles = [random_tensor(33, 1, 64, dtype=dtype, seed=seed) for seed in (2, 3)]
    rotated, expected = heads.to(CUDA), heads.double()
    kernels.rotate(rotated, Angles(*(angle.to(CUDA) for angle in angles)), HeadNorms(5, q.to(CUDA), k.to(CUDA), 1e-6))
    reference.rotate(
        expected, Angles(*(angle.double() for angle in angles)), HeadNorms(5, q.double(), k.double(), 1e-6)
    )
    assert_close(rotated.cpu(), expected, dtype)
    gate_up = random_tensor(33, 3000, dtype=dtype) * 4
    for kind in (Activation(), Activation("gelu_tanh"), Activation("clamped", 1.702, 7.0)):
        assert_close(kernels.activate(gate_up.to(CUDA), kind).cpu(), reference.activate(gate_up.double(), kind), dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_triton_filter_thresholds_on_cuda_equal_torch(dtype: torch.dtype) -> None:
    """The thresholds are bitwise equal, because probability masses are integers of the same exponentials."""
    sampling, vocab = to_device(mixed_sampling(torch.promote_types(dtype, torch.float32))), 20000
    count = sampling.seeds.shape[0]
    logits = to_device(random_logits(4 * count, vocab, dtype))
    draw = SamplingInputs(4, sampling, None)
    wide_logits = logits.to(sampling.inverse_temperature.dtype).view(count, 4, vocab)
    expected = filters.filter_thresholds(wide_logits * sampling.inverse_temperature[:, None, None], sampling)
    assert torch.equal(row_thresholds(logits, draw), expected.view(-1, 1))


@pytest.mark.parametrize(("k", "steps", "nodes"), [(4, 3, 16), (8, 5, 32), (10, 8, 60)])
def test_triton_tree_kernels_on_cuda_match_reference(k: int, steps: int, nodes: int) -> None:
    check_trees(torch.device("cuda"), torch.Generator().manual_seed(k), k, steps, nodes)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_triton_expert_grouping_and_combine_on_cuda_match_reference(dtype: torch.dtype) -> None:
    kernels, reference = TritonKernels(), TorchKernels()
    for rows, active, experts, size in ((1, 8, 128, 2048), (70, 4, 32, 2880), (3000, 6, 64, 512)):
        chosen = torch.rand(rows, experts, generator=torch.Generator().manual_seed(rows)).topk(active, 1).indices
        expected_groups = reference.group(chosen, experts)
        device_groups = kernels.group(to_device(chosen), experts)
        for name, actual, expected in zip(expected_groups._fields, device_groups, expected_groups, strict=True):
            assert torch.equal(actual.cpu(), expected), name
        results, weights = (
            random_tensor(rows * active, size, dtype=dtype),
            random_tensor(rows, active, dtype=dtype, seed=1),
        )
        out = kernels.combine(to_device(results), device_groups, to_device(weights), None)
        assert_close(out.cpu(), reference.combine(results.double(), expected_groups, weights.double(), None), dtype)
        assert torch.equal(out, kernels.combine(to_device(results), device_groups, to_device(weights), None)), (
            "not deterministic"
        )


def test_triton_noise_keys_on_cuda_equal_the_reference() -> None:
    seeds, first = torch.tensor([0, 2**63 - 1, -1, 7]), torch.tensor([0, 1, 2**40, 9])
    noise = TritonSampler().noise(
        to_device(seeds), to_device(first), 9, to_device(torch.zeros(3, dtype=torch.int32)), torch.float32
    )
    assert torch.equal(noise.keys.cpu(), keys_along(seeds, first, 9))
