"""The demand of a step: the operations of the matrix products that it makes, and the bytes of weights that it reads."""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from cluster.arch import LayerGeometry, Moe
from cluster.arch.resolve import resolve_models
from cluster.bench.ceilings import Ceilings, measure_ceilings
from cluster.bench.demand import Demand, ForwardRows, layer_demand, least_seconds, matrix_sizes, step_demand
from cluster.config import EngineConfig
from cluster.engine import build_engine
from cluster.kernels.torch_kernels import Dense
from cluster.request import Request
from tests.parity.harness import GREEDY, VOCAB, config_of, make_request, tiny_pair
from tests.unit.models import draft_folders as write

SHAPES = {"plain": (0, 1), "chain": (3, 1), "tree": (3, 3)}


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int, int]]]:
    """The list of (rows, inputs, outputs) of every matrix product since the list was last cleared."""
    recorded_products: list[tuple[int, int, int]] = []
    original_call = Dense.__call__

    def recording_call(self: Dense, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        recorded_products.append((rows.shape[0], *self.shape))
        return original_call(self, rows, bias)

    monkeypatch.setattr(Dense, "__call__", recording_call)
    yield recorded_products


def requests() -> list[Request]:
    return [make_request(str(number), [3, 5, 2, 7], GREEDY, max_tokens=40, seed=number) for number in range(2)]


def steady_products(config: EngineConfig, recorded_products: list[tuple[int, int, int]]) -> Counter[str]:
    """Count the multiplications and additions of one step in which both requests decode, by phase."""
    engine, operations_by_phase = build_engine(config), Counter[str]()
    step = engine._parts.lockstep.step
    phase = ""

    def enter(name: str) -> None:
        nonlocal phase
        operations_by_phase[phase] += sum(2 * rows * inputs * outputs for rows, inputs, outputs in recorded_products)
        recorded_products.clear()
        phase = name

    step.enter_phase = enter
    for new_request in requests():
        engine.submit(new_request)
    for _ in range(2):
        engine.step()
    enter("")
    operations_by_phase.clear()
    engine.step()
    enter("")
    return operations_by_phase


@pytest.mark.parametrize("name", SHAPES)
def test_step_demand_counts_the_operations_of_the_actual_matrix_products(
    name: str, products: list[tuple[int, int, int]]
) -> None:
    steps, topk = SHAPES[name]
    draft = (None,) if name == "plain" else (tiny_pair()[1], topk, steps)
    config = config_of(tiny_pair()[0], *draft, attention_backend="torch")
    counted_operations = steady_products(config, products)
    models = resolve_models(config)
    demand = step_demand(models, 2, -1.0, 8)  # context -1: rows attend to 0 cells, no attention
    assert {phase: sum(forward.operations for forward in forwards) for phase, forwards in demand.items()} == {
        phase: counted_operations[phase] for phase in ("draft", "target", "extend")
    }


def test_demand_of_mtp_draft_recomputes_earlier_levels_in_each_layer() -> None:
    draft = write.mtp("mimo", 3, vocab=VOCAB)
    models = resolve_models(config_of(tiny_pair()[0], draft, 2, 3, speculative_algorithm="NEXTN"))
    demand = step_demand(models, 1, 10.0, 8)
    assert len(demand["draft"]) == 2 and len(demand["extend"]) == 3
    assert demand["draft"][1].operations > 1.4 * demand["draft"][0].operations


def test_layer_demand_counts_bytes_and_operations_of_weights_and_attention() -> None:
    geometry = LayerGeometry(hidden=8, heads=4, kv_heads=2, head_dim=4, intermediate=16, eps=1e-5)
    weights = 8 * (16 + 8 + 8) + 16 * 8 + 3 * 8 * 16
    assert matrix_sizes(geometry).shared == weights
    assert matrix_sizes(geometry, concatenated_input=True).shared == weights + 8 * (16 + 8 + 8)
    demand = layer_demand(geometry, ForwardRows(3, 2, 100.0), 2)
    assert demand.bytes_read == 2 * (weights + 3 * 102 * 16)
    assert demand.operations == 2 * 6 * weights + 2 * 6 * 101 * 4 * 8


def test_expected_experts_matches_random_expert_choices() -> None:
    geometry = LayerGeometry(8, 4, 2, 4, 16, 1e-5, moe=Moe(experts=8, active=2, intermediate=4))
    sizes, generator = matrix_sizes(geometry), torch.Generator().manual_seed(0)
    assert (sizes.per_expert, sizes.experts) == (3 * 8 * 4, 8)
    expert_choices = torch.rand(20000, 3, 8, generator=generator).topk(2, -1).indices
    mean_experts = torch.nn.functional.one_hot(expert_choices, 8).sum((1, 2)).clamp(max=1).sum(1).double().mean()
    assert sizes.expected_experts(3) == pytest.approx(float(mean_experts), rel=0.01)
    assert sizes.expected_experts(1) == pytest.approx(2.0)


def test_sliding_window_bounds_the_prefix_bytes_in_layer_demand() -> None:
    geometry = LayerGeometry(8, 4, 2, 4, 16, 1e-5, sliding_window=10)
    assert layer_demand(geometry, ForwardRows(1, 1, 1000.0), 2) == layer_demand(geometry, ForwardRows(1, 1, 10.0), 2)


def test_least_seconds_sums_forwards_and_ceilings_take_the_highest() -> None:
    """Reads bound the first forward and operations bound the second; the least time is the sum of the two bounds."""
    ceilings = Ceilings(bytes_per_s=100.0, flops_per_s=10.0)
    assert least_seconds([Demand(200.0, 0.0), Demand(0.0, 30.0)], ceilings) == pytest.approx(5.0)
    assert ceilings.highest(Ceilings(50.0, 20.0)) == Ceilings(100.0, 20.0)


def test_measured_cpu_ceilings_are_plausible() -> None:
    ceilings = measure_ceilings(1, dtype=torch.bfloat16)
    assert ceilings.bytes_per_s > 1e8 and ceilings.flops_per_s > 1e8
