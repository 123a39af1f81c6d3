"""Experts: grouped experts equal every expert on every row; expert choice by groups; the shared expert; dtypes."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cluster.arch import Moe
from cluster.kernels.grouped_mm import grouped_mm
from cluster.kernels.interface import Activation
from cluster.kernels.torch_kernels import TorchKernels, gelu_tanh
from cluster.models.exchange import NoExchange
from cluster.models.experts import Experts, Gate
from cluster.models.mlp import Mlp
from tests.support.families import family_checkpoint
from tests.support.loading import context, load_target

H, COLUMNS = 12, 10


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def make_experts(moe: Moe, biases: bool = False, shared: bool = False) -> Experts:
    kernels = TorchKernels()
    weight, stack = kernels.weight, kernels.stack
    gate = Gate(weight(random(H, moe.experts)), None, random(moe.experts) if moe.correction else None, moe)
    shared_expert = (
        Mlp(kernels, weight(random(H, 2 * COLUMNS)), weight(random(COLUMNS, H)), None, None) if shared else None
    )
    return Experts(
        kernels,
        gate,
        stack(random(moe.experts, H, 2 * COLUMNS)),
        stack(random(moe.experts, COLUMNS, H)),
        random(moe.experts, 2 * COLUMNS) if biases else None,
        random(moe.experts, H) if biases else None,
        shared_expert,
        Activation("gelu_tanh") if moe.clamp is None else Activation("clamped", *moe.clamp),
    )


def expert(experts: Experts, i: int, rows: Tensor) -> Tensor:
    """Return expert `i`'s output for `rows`, from the definition: gated by the activation, or clamped as in gpt-oss."""
    gate_up, down = rows @ experts.gate_up.dense()[i], experts.down.dense()[i]
    if experts.gate_up_bias is not None:
        gate_up = gate_up + experts.gate_up_bias[i]
    gate, up = gate_up[:, :COLUMNS], gate_up[:, COLUMNS:]
    if experts.gate.moe.clamp is None:
        inner = gelu_tanh(gate.clone()) * up
    else:
        alpha, limit = experts.gate.moe.clamp
        gate = gate.clamp(max=limit)
        inner = gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + 1)
    return inner @ down + (0 if experts.down_bias is None else experts.down_bias[i])


def dense_experts(experts: Experts, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Run every expert on every row; the weight of an expert is 0 on rows that did not choose it."""
    weight_of_expert = rows.new_zeros(rows.shape[0], experts.gate.moe.experts).scatter_(1, chosen, weights)
    expert_outputs = [expert(experts, i, rows) * weight_of_expert[:, i, None] for i in range(weight_of_expert.shape[1])]
    return torch.stack(expert_outputs).sum(0)


@pytest.mark.parametrize("rows", [0, 1, 2, 9, 64])
@pytest.mark.parametrize(
    "moe",
    [
        Moe(4, 1, COLUMNS),
        Moe(4, 4, COLUMNS, renormalise=False),
        Moe(16, 3, COLUMNS, clamp=(1.7, 0.5)),
        Moe(12, 4, COLUMNS, scoring="sigmoid", groups=4, top_groups=2, correction=True, scale=2.5),
    ],
)
def test_grouped_experts_equal_dense_experts(moe: Moe, rows: int) -> None:
    torch.manual_seed(rows)
    experts = make_experts(moe, biases=moe.clamp is not None)
    hidden = random(rows, H)
    weights, chosen = experts.gate(hidden)
    assert weights.shape == chosen.shape == (rows, moe.active)
    grouped, dense = experts.run(hidden, weights, chosen), dense_experts(experts, hidden, weights, chosen)
    assert torch.allclose(grouped, dense, rtol=1e-12, atol=1e-12)
    single_row_outputs = [experts.run(hidden[i : i + 1], weights[i : i + 1], chosen[i : i + 1]) for i in range(rows)]
    assert not single_row_outputs or torch.allclose(torch.cat(single_row_outputs), grouped, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_mm_equals_torch_grouped_mm(dtype: torch.dtype) -> None:
    """Some experts have no rows: the first, the last or one in the middle. torch has no grouped_mm for float64."""
    torch.manual_seed(1)
    rows, matrices = torch.randn(10, 16).to(dtype), torch.randn(6, 16, 24).to(dtype)
    for counts in ([3, 0, 4, 0, 3, 0], [0, 0, 10, 0, 0, 0], [0, 1, 2, 3, 4, 0]):
        ends = torch.tensor(counts).cumsum(0).to(torch.int32)
        assert torch.equal(grouped_mm(rows, matrices, ends), F.grouped_mm(rows, matrices, offs=ends))


def test_experts_run_without_reading_row_counts_on_the_host() -> None:
    """Fake tensors have shapes and no values, so code that reads a value raises an error."""
    moe = Moe(16, 3, COLUMNS, clamp=(1.7, 0.5))
    with FakeTensorMode():
        experts = make_experts(moe, biases=True)
        hidden = random(7, H)
        assert experts.run(hidden, *experts.gate(hidden)).shape == (7, H)


def test_shared_expert_is_added_once() -> None:
    torch.manual_seed(0)
    moe = Moe(4, 2, COLUMNS, shared=COLUMNS)
    experts = make_experts(moe, shared=True)
    assert experts.shared is not None
    hidden = random(5, H)
    routed = dense_experts(experts, hidden, *experts.gate(hidden))
    assert torch.allclose(experts(hidden, NoExchange()), routed + experts.shared(hidden, NoExchange()), atol=1e-12)


def test_gate_selects_experts_only_from_the_best_groups() -> None:
    """A group's score is the sum of its two best experts. The correction changes the choice but not the weights."""
    moe = Moe(6, 2, COLUMNS, scoring="sigmoid", groups=3, top_groups=1, correction=True, renormalise=False)
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.55, 0.2, 0.3]], dtype=torch.float64)
    matrix = torch.linalg.lstsq(torch.ones(1, 1, dtype=torch.float64), scores.logit()).solution
    weight = TorchKernels().weight(matrix)
    uncorrected_gate = Gate(weight, None, torch.zeros(6, dtype=torch.float64), moe)
    rows = torch.ones(1, 1, dtype=torch.float64)
    weights, chosen = uncorrected_gate(rows)
    assert chosen.tolist() == [[2, 3]], "0.6 + 0.55 beats 0.9 + 0.1"
    corrected_gate = Gate(weight, None, torch.tensor([0, 0, 0, 0, 0.6, 0.6], dtype=torch.float64), moe)
    weights, chosen = corrected_gate(rows)
    assert chosen.tolist() == [[5, 4]]
    assert torch.allclose(weights, torch.tensor([[0.3, 0.2]], dtype=torch.float64))


@pytest.mark.parametrize(("family", "case"), [("gemma3", "own layer types"), ("gpt_oss", "yarn")])
def test_bfloat16_target_logits_are_close_to_float64(family: str, case: str) -> None:
    """All weights and tables of a layer are loaded in dtypes that the layer can multiply."""
    folder, ids = family_checkpoint(family, case).folder, torch.arange(2, 9)

    def attend(layer: int, q: Tensor, kv: Tensor, sinks: Tensor | None = None) -> Tensor:
        return q.flatten(1)

    logits = []
    for dtype in (torch.float64, torch.bfloat16):
        target = load_target(folder, context(dtype, max_position=16))
        hidden, aux = target.forward(ids, ids, attend, (0, 4))
        assert {t.dtype for t in (hidden, *aux)} == {dtype}
        logits.append(target.logits(hidden).values.double())
    assert float((logits[0] - logits[1]).abs().max() / logits[0].abs().max()) < 0.1
