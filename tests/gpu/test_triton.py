"""Programs of Triton on a CUDA device give what their definitions say; the same cases as in its interpreter."""

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
from tests.unit.kernels.test_product import close, made
from tests.unit.sampling.test_c_sampler import logits_of
from tests.unit.sampling.test_sampler import mixed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
ERROR = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
LONG: dict[str, Any] = {"committed": (2500, 700), "parents": TREE, "chunks": ((100, 600),)}


def there(given: Any) -> Any:
    """`given` with all its tensors on the device."""
    if isinstance(given, Tensor):
        return given.to(CUDA)
    if not hasattr(given, "__dataclass_fields__"):
        return given
    return replace(given, **{own.name: there(getattr(given, own.name)) for own in fields(given)})


def on_the_device(case: Case) -> Tensor:
    table = PageTable(case.table.idle_row, case.table.length, case.page_size, CUDA)
    table.device_pages.copy_(case.table.device_pages)
    filled = case.filled()
    pool = KVPool(2, filled.slots, filled.cell, case.dtype, CUDA, filled.fp8_cell)
    pool.kv.copy_(filled.kv)
    attention = TritonAttention(pool, table, AttentionShape(case.heads, (None, case.window), 0.3, case.values))
    attention.bind(there(case.seen()))
    out = attention(1, case.q.to(CUDA), case.kv.to(CUDA), there(case.sinks)).cpu()
    assert out.isfinite().all()
    early = [row for row, text in enumerate(case.texts()) if len(text) - 1 < case.first]
    return out.index_fill(0, torch.tensor(early, dtype=torch.int64), 0)


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["all", "wide", "long"])
def test_triton_attention_on_cuda_matches_the_definition(shape: str, kind: str, dtype: torch.dtype) -> None:
    given = {"heads": 4, "kv_heads": 2} | (LONG if shape == "long" else SHAPES[shape]) | KINDS[kind]
    for d in (8, 128, 192):
        case = Case(**given, page_size=16, lies="scattered", dtype=dtype, d=d)
        away, largest = (on_the_device(case).double() - case.expected()).abs().max(), case.expected().abs().max()
        assert away <= ERROR[dtype] * max(1, largest), f"heads of {d}: {away} away, of at most {largest}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_triton_norm_rotation_and_activation_on_cuda_match_reference(dtype: torch.dtype) -> None:
    own, twin = TritonKernels(), TorchKernels()
    rows, more, scale = (
        made(*shape, dtype=dtype, seed=at) for at, shape in enumerate([(33, 2880), (33, 2880), (2880,)])
    )
    total, normed = own.add_norm(rows.to(CUDA), more.to(CUDA), scale.to(CUDA), 1e-5)
    assert torch.equal(total.cpu(), rows + more)
    close(normed.cpu(), twin.norm((rows + more).double(), scale.double(), 1e-5), dtype)
    heads, q, k = made(33, 7, 128, dtype=dtype), made(128, dtype=dtype), made(128, dtype=dtype, seed=1)
    angles = [made(33, 1, 64, dtype=dtype, seed=seed) for seed in (2, 3)]
    given, expected = heads.to(CUDA), heads.double()
    own.rotate(given, Angles(*(one.to(CUDA) for one in angles)), HeadNorms(5, q.to(CUDA), k.to(CUDA), 1e-6))
    twin.rotate(expected, Angles(*(one.double() for one in angles)), HeadNorms(5, q.double(), k.double(), 1e-6))
    close(given.cpu(), expected, dtype)
    both = made(33, 3000, dtype=dtype) * 4
    for kind in (Activation(), Activation("gelu_tanh"), Activation("clamped", 1.702, 7.0)):
        close(own.activate(both.to(CUDA), kind).cpu(), twin.activate(both.double(), kind), dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_triton_filter_thresholds_on_cuda_equal_torch(dtype: torch.dtype) -> None:
    """To the bit: masses are whole numbers of the same exponentials."""
    sampling, vocab = there(mixed(torch.promote_types(dtype, torch.float32))), 20000
    count = sampling.seeds.shape[0]
    logits = there(logits_of(4 * count, vocab, dtype))
    draw = SamplingInputs(4, sampling, None)
    wide = logits.to(sampling.inverse_temperature.dtype).view(count, 4, vocab)
    twin = filters.filter_thresholds(wide * sampling.inverse_temperature[:, None, None], sampling)
    assert torch.equal(row_thresholds(logits, draw), twin.view(-1, 1))


@pytest.mark.parametrize(("k", "steps", "nodes"), [(4, 3, 16), (8, 5, 32), (10, 8, 60)])
def test_triton_tree_kernels_on_cuda_match_reference(k: int, steps: int, nodes: int) -> None:
    check_trees(torch.device("cuda"), torch.Generator().manual_seed(k), k, steps, nodes)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_triton_expert_grouping_and_combine_on_cuda_match_reference(dtype: torch.dtype) -> None:
    own, twin = TritonKernels(), TorchKernels()
    for rows, active, experts, size in ((1, 8, 128, 2048), (70, 4, 32, 2880), (3000, 6, 64, 512)):
        chosen = torch.rand(rows, experts, generator=torch.Generator().manual_seed(rows)).topk(active, 1).indices
        groups = twin.group(chosen, experts)
        given = own.group(there(chosen), experts)
        for name, one, other in zip(groups._fields, given, groups, strict=True):
            assert torch.equal(one.cpu(), other), name
        results, weights = made(rows * active, size, dtype=dtype), made(rows, active, dtype=dtype, seed=1)
        out = own.combine(there(results), given, there(weights), None)
        close(out.cpu(), twin.combine(results.double(), groups, weights.double(), None), dtype)
        assert torch.equal(out, own.combine(there(results), given, there(weights), None)), "the same each time"


def test_triton_noise_keys_on_cuda_equal_the_reference() -> None:
    seeds, first = torch.tensor([0, 2**63 - 1, -1, 7]), torch.tensor([0, 1, 2**40, 9])
    own = TritonSampler().noise(there(seeds), there(first), 9, there(torch.zeros(3, dtype=torch.int32)), torch.float32)
    assert torch.equal(own.keys.cpu(), keys_along(seeds, first, 9))
