"""Expert parallelism. Rows that are sent to the ranks of their experts by counts give the same bits as rows that are
gathered on all ranks, and the same numbers as one rank that holds all experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from cluster.arch import Moe
from cluster.distributed.mesh import Mesh, OutOfStepError, Shard
from cluster.dp_attention.all2all import first_invalid_rank, pack_rows, unpack_rows
from cluster.dp_attention.exchange import Exchange
from cluster.dp_attention.plan import ExpertParallel
from cluster.engine.backends import select_kernels
from cluster.kernels.interface import Activation, Kernels
from cluster.kernels.torch_kernels import TorchKernels
from cluster.models.context import Sharding, expert_shard
from cluster.models.exchange import NoExchange
from cluster.models.experts import Experts, Gate, LocalExperts
from cluster.models.mlp import Mlp
from tests.unit.dp_attention.threads import ThreadAxis, run_on_ranks

H, COLUMNS = 12, 10
CPU = torch.device("cpu")
MESHES = ((2, 2, 2), (4, 2, 4), (4, 4, 4), (4, 4, 2), (4, 2, 2), (6, 3, 3))
"""(ranks, attention groups, parts): the experts are split into `parts` parts (`ep_size`)."""


@dataclass(frozen=True)
class Weights:
    """The unsharded weights of all experts."""

    moe: Moe
    gate: Tensor
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    shared_up: Tensor
    shared_down: Tensor
    shared_gate: Tensor

    @classmethod
    def random(cls, moe: Moe, dtype: torch.dtype, biases: bool) -> "Weights":
        def random_tensor(*shape: int) -> Tensor:
            return (torch.randn(*shape, dtype=torch.float64) * 0.5).to(dtype)

        num_experts = moe.experts
        bias_pair = (random_tensor(num_experts, 2 * COLUMNS), random_tensor(num_experts, H)) if biases else (None, None)
        matrices = (
            random_tensor(H, num_experts),
            random_tensor(num_experts, H, 2 * COLUMNS),
            random_tensor(num_experts, COLUMNS, H),
        )
        return cls(
            moe, *matrices, *bias_pair, random_tensor(H, 2 * COLUMNS), random_tensor(COLUMNS, H), random_tensor(H, 1)
        )

    def experts_of_rank(self, kernels: Kernels, sharding: Sharding) -> Experts:
        """Return the module of one rank, with the rank's shard of the weights."""
        moe, own_experts = self.moe, slice(*sharding.experts.span(self.moe.experts))
        columns = slice(*sharding.expert_columns.span(COLUMNS))
        gate_up_columns = [*range(columns.start, columns.stop), *range(COLUMNS + columns.start, COLUMNS + columns.stop)]
        start, stop = sharding.shared_expert.span(COLUMNS)
        shared_columns = [*range(start, stop), *range(COLUMNS + start, COLUMNS + stop)]
        adds_down_bias = sharding.expert_columns.rank == 0
        size = sharding.experts.size
        part_of_expert = [part for part in range(size) for _ in range(*Shard(part, size).span(moe.experts))]
        return Experts(
            kernels,
            Gate(kernels.weight(self.gate), None, None, moe),
            kernels.stack(self.gate_up[own_experts][:, :, gate_up_columns].contiguous()),
            kernels.stack(self.down[own_experts][:, columns].contiguous()),
            None if self.gate_up_bias is None else self.gate_up_bias[own_experts][:, gate_up_columns],
            self.down_bias[own_experts] if self.down_bias is not None and adds_down_bias else None,
            Mlp(
                kernels,
                kernels.weight(self.shared_up[:, shared_columns].contiguous()),
                kernels.weight(self.shared_down[start:stop].contiguous()),
                None,
                None,
            )
            if moe.shared
            else None,
            Activation(),
            kernels.weight(self.shared_gate) if moe.shared_gate else None,
            LocalExperts(own_experts.start, own_experts.stop - own_experts.start, torch.tensor(part_of_expert))
            if size > 1
            else None,
        )


def run_experts(
    weights: Weights, kernels: Kernels, rows: list[Tensor], parts: int, counted: bool, mesh: Mesh
) -> Tensor:
    """Run this rank's experts. `rows[g]` are the rows of group g; return the output for the rows of this rank's group.
    `counted`: rows are sent by counts, not gathered.
    """
    dtype, counts = rows[0].dtype, tuple(group_rows.shape[0] for group_rows in rows)
    sharding = Sharding(mesh.attn.shard, mesh.world.shard, Shard(), expert_shard(parts, mesh.world.shard))
    exchange = Exchange(mesh, dtype, ep_size=parts)
    exchange.begin(1, ExpertParallel(parts, weights.moe.active).calls("target", counts, H, counted), counted)
    output = weights.experts_of_rank(kernels, sharding)(rows[mesh.dp_rank], exchange)
    exchange.end()
    return output


MOES = {
    "five": Moe(5, 3, COLUMNS, renormalise=False),
    "one each": Moe(6, 1, COLUMNS),
    "shared": Moe(7, 2, COLUMNS, shared=COLUMNS),
    "shared, gated": Moe(6, 6, COLUMNS, shared=COLUMNS, shared_gate=True),
}


@pytest.mark.parametrize(("world", "groups", "parts"), MESHES)
@pytest.mark.parametrize("moe", MOES.values(), ids=MOES)
def test_counted_expert_dispatch_equals_gathered_dispatch(moe: Moe, world: int, groups: int, parts: int) -> None:
    """Groups have different numbers of rows, some have none, and parts have different numbers of experts."""
    torch.manual_seed(world + groups + parts)
    dtype = torch.float32 if select_kernels("auto", CPU, torch.float32).library is not None else torch.float64
    kernels = select_kernels("auto", CPU, dtype)
    exact = kernels.library is not None
    weights = Weights.random(moe, dtype, biases=not moe.shared)
    for counts in ((5, 0, 3, 1), (1, 7, 0, 2), (0, 0, 0, 1), (6, 6, 6, 6)):
        rows = [torch.randn(count, H, dtype=torch.float64).to(dtype) for count in counts[:groups]]
        reference = weights.experts_of_rank(kernels, Sharding())
        expected = [reference(group_rows, NoExchange()) for group_rows in rows]
        run_with = partial(run_experts, weights, kernels, rows, parts)
        counted_outputs, gathered_outputs = (
            run_on_ranks(world, groups, partial(run_with, counted)) for counted in (True, False)
        )
        for rank in range(world):
            group = rank * groups // world
            assert torch.allclose(counted_outputs[rank], expected[group], rtol=1e-4, atol=1e-4 if exact else 1e-12)
            assert torch.equal(counted_outputs[rank], counted_outputs[group * world // groups]), (
                "ranks of a group differ"
            )
            if exact:
                assert torch.equal(counted_outputs[rank], gathered_outputs[rank])
            else:
                assert torch.allclose(counted_outputs[rank], gathered_outputs[rank], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("world", "groups", "parts"), [(2, 1, 2), (4, 1, 2), (4, 2, 2)])
def test_gathered_expert_dispatch_equals_a_single_rank(world: int, groups: int, parts: int) -> None:
    """One group is tested too: its ranks have all rows from the start."""
    torch.manual_seed(3)
    weights = Weights.random(MOES["shared, gated"], torch.float64, biases=True)
    rows = [torch.randn(4 + group, H, dtype=torch.float64) for group in range(groups)]
    reference = weights.experts_of_rank(TorchKernels(), Sharding())
    outputs = run_on_ranks(world, groups, partial(run_experts, weights, TorchKernels(), rows, parts, False))
    for rank, output in enumerate(outputs):
        expected = reference(rows[rank * groups // world], NoExchange())
        assert torch.allclose(output, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_pack_and_unpack_rows_preserve_expert_ids_in_every_dtype(dtype: torch.dtype) -> None:
    """Expert ids must survive even if the dtype cannot represent them as numbers."""
    ids = torch.tensor([[0, 511], [257, 32_767]])
    rows, weights = torch.randn(2, 6).to(dtype), torch.rand(2, 2).to(dtype)
    unpacked = unpack_rows(pack_rows(rows, weights, ids)[torch.tensor([1, 0, 1])], 2)
    for result, original in zip(unpacked, (rows, weights, ids), strict=True):
        assert torch.equal(result, original[[1, 0, 1]])


@pytest.mark.parametrize(
    ("table", "expected_rank"),
    [
        (((2, 1), (0, 0), (1, 3)), None),
        (((2, 1), (0, 1), (1, 3)), 1),
        (((2, 0), (0, 0), (1, 3)), None),
        (((1, 0), (0, 0), (1, 3)), 0),
        (((2, 1), (0, 0), (1, 4)), 2),
        (((3, -1), (0, 0), (1, 3)), 0),
    ],
)
def test_first_invalid_rank_finds_impossible_row_counts(
    table: tuple[tuple[int, ...], ...], expected_rank: int | None
) -> None:
    """Three ranks have 2, 0 and 3 rows. Each row goes to one or both of two parts."""
    assert first_invalid_rank(table, [2, 0, 3], experts_per_row=4) == expected_rank


def test_first_invalid_rank_allows_one_part_per_row_with_one_active_expert() -> None:
    assert (
        first_invalid_rank(((2, 2),), [3], experts_per_row=1) == 0
        and first_invalid_rank(((2, 1),), [3], experts_per_row=1) is None
    )


class OverreportingAxis(ThreadAxis):
    """An axis whose `gather` reports 4 more rows than there are."""

    def gather(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        return super().gather(rows + 4, counts)


def test_every_rank_names_the_rank_that_reports_impossible_counts() -> None:
    """The error comes before any row is sent: with the wrong counts, ranks would receive other sizes than are sent."""
    torch.manual_seed(0)
    weights = Weights.random(MOES["five"], torch.float64, biases=False)
    rows = [torch.randn(3, H, dtype=torch.float64) for _ in range(2)]

    def run(mesh: Mesh) -> str:
        if mesh.rank == 1:
            mesh.facts = OverreportingAxis(1, 2, mesh.world.board, mesh.world.clock)  # type: ignore[attr-defined]
        with pytest.raises(OutOfStepError) as raised:
            run_experts(weights, TorchKernels(), rows, 2, True, mesh)
        assert raised.value.rank == 1 and mesh.world.clock.collectives_returned == 1
        return str(raised.value)

    messages = run_on_ranks(2, 2, run)
    assert messages[0] == messages[1] and messages[0].startswith("rank 1 tells counts [")
