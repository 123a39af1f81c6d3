"""Experts that are apart: rows sent to them by counts get the bits that they get by going everywhere, and the numbers
of one rank that holds all experts.
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
from tests.unit.dp_attention.threads import Meeting, on_ranks

H, COLUMNS = 12, 10
CPU = torch.device("cpu")
MESHES = ((2, 2, 2), (4, 2, 4), (4, 4, 4), (4, 4, 2), (4, 2, 2), (6, 3, 3))
"""Ranks, attention groups, parts."""


@dataclass(frozen=True)
class Weights:
    """The experts' matrices, whole."""

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
        def numbers(*shape: int) -> Tensor:
            return (torch.randn(*shape, dtype=torch.float64) * 0.5).to(dtype)

        e = moe.experts
        sum_in_order = (numbers(e, 2 * COLUMNS), numbers(e, H)) if biases else (None, None)
        made = numbers(H, e), numbers(e, H, 2 * COLUMNS), numbers(e, COLUMNS, H)
        return cls(moe, *made, *sum_in_order, numbers(H, 2 * COLUMNS), numbers(COLUMNS, H), numbers(H, 1))

    def held(self, kernels: Kernels, sharding: Sharding) -> Experts:
        """What one rank holds of them."""
        moe, own = self.moe, slice(*sharding.experts.span(self.moe.experts))
        columns = slice(*sharding.expert_columns.span(COLUMNS))
        both = [*range(columns.start, columns.stop), *range(COLUMNS + columns.start, COLUMNS + columns.stop)]
        start, stop = sharding.shared_expert.span(COLUMNS)
        common = [*range(start, stop), *range(COLUMNS + start, COLUMNS + stop)]
        first = sharding.expert_columns.rank == 0
        size = sharding.experts.size
        parts = [p for p in range(size) for _ in range(*Shard(p, size).span(moe.experts))]
        return Experts(
            kernels,
            Gate(kernels.weight(self.gate), None, None, moe),
            kernels.stack(self.gate_up[own][:, :, both].contiguous()),
            kernels.stack(self.down[own][:, columns].contiguous()),
            None if self.gate_up_bias is None else self.gate_up_bias[own][:, both],
            self.down_bias[own] if self.down_bias is not None and first else None,
            Mlp(
                kernels,
                kernels.weight(self.shared_up[:, common].contiguous()),
                kernels.weight(self.shared_down[start:stop].contiguous()),
                None,
                None,
            )
            if moe.shared
            else None,
            Activation(),
            kernels.weight(self.shared_gate) if moe.shared_gate else None,
            LocalExperts(own.start, own.stop - own.start, torch.tensor(parts)) if size > 1 else None,
        )


def exchanged(weights: Weights, kernels: Kernels, rows: list[Tensor], parts: int, counted: bool, mesh: Mesh) -> Tensor:
    """This rank's output for the rows of its group, of those of all groups."""
    dtype, counts = rows[0].dtype, tuple(each.shape[0] for each in rows)
    sharding = Sharding(mesh.attn.shard, mesh.world.shard, Shard(), expert_shard(parts, mesh.world.shard))
    exchange = Exchange(mesh, dtype, ep_size=parts)
    exchange.begin(1, ExpertParallel(parts, weights.moe.active).calls("target", counts, H, counted), counted)
    out = weights.held(kernels, sharding)(rows[mesh.dp_rank], exchange)
    exchange.end()
    return out


MOES = {
    "five": Moe(5, 3, COLUMNS, renormalise=False),
    "one each": Moe(6, 1, COLUMNS),
    "shared": Moe(7, 2, COLUMNS, shared=COLUMNS),
    "shared, gated": Moe(6, 6, COLUMNS, shared=COLUMNS, shared_gate=True),
}


@pytest.mark.parametrize(("world", "groups", "parts"), MESHES)
@pytest.mark.parametrize("moe", MOES.values(), ids=MOES)
def test_counted_expert_dispatch_equals_gathered_dispatch(moe: Moe, world: int, groups: int, parts: int) -> None:
    """Uneven rows and uneven parts; ranks without rows, and whole groups without."""
    torch.manual_seed(world + groups + parts)
    dtype = torch.float32 if select_kernels("auto", CPU, torch.float32).library is not None else torch.float64
    kernels = select_kernels("auto", CPU, dtype)
    exact = kernels.library is not None
    weights = Weights.random(moe, dtype, biases=not moe.shared)
    for counts in ((5, 0, 3, 1), (1, 7, 0, 2), (0, 0, 0, 1), (6, 6, 6, 6)):
        rows = [torch.randn(count, H, dtype=torch.float64).to(dtype) for count in counts[:groups]]
        whole = weights.held(kernels, Sharding())
        wanted = [whole(each, NoExchange()) for each in rows]
        run = partial(exchanged, weights, kernels, rows, parts)
        sent, everywhere = (on_ranks(world, groups, partial(run, counted)) for counted in (True, False))
        for rank in range(world):
            group = rank * groups // world
            assert torch.allclose(sent[rank], wanted[group], rtol=1e-4, atol=1e-4 if exact else 1e-12)
            assert torch.equal(sent[rank], sent[group * world // groups]), "a group's ranks have the same bits"
            if exact:
                assert torch.equal(sent[rank], everywhere[rank])
            else:
                assert torch.allclose(sent[rank], everywhere[rank], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("world", "groups", "parts"), [(2, 1, 2), (4, 1, 2), (4, 2, 2)])
def test_gathered_expert_dispatch_equals_a_single_rank(world: int, groups: int, parts: int) -> None:
    """Also with one group, whose ranks have all rows from the start."""
    torch.manual_seed(3)
    weights = Weights.random(MOES["shared, gated"], torch.float64, biases=True)
    rows = [torch.randn(4 + group, H, dtype=torch.float64) for group in range(groups)]
    whole = weights.held(TorchKernels(), Sharding())
    found = on_ranks(world, groups, partial(exchanged, weights, TorchKernels(), rows, parts, False))
    for rank, out in enumerate(found):
        wanted = whole(rows[rank * groups // world], NoExchange())
        assert torch.allclose(out, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_pack_and_unpack_rows_preserve_expert_ids_in_every_dtype(dtype: torch.dtype) -> None:
    """Also those that are no number of the dtype."""
    ids = torch.tensor([[0, 511], [257, 32_767]])
    rows, weights = torch.randn(2, 6).to(dtype), torch.rand(2, 2).to(dtype)
    came = unpack_rows(pack_rows(rows, weights, ids)[torch.tensor([1, 0, 1])], 2)
    for got, given in zip(came, (rows, weights, ids), strict=True):
        assert torch.equal(got, given[[1, 0, 1]])


@pytest.mark.parametrize(
    ("table", "odd"),
    [
        (((2, 1), (0, 0), (1, 3)), None),
        (((2, 1), (0, 1), (1, 3)), 1),
        (((2, 0), (0, 0), (1, 3)), None),
        (((1, 0), (0, 0), (1, 3)), 0),
        (((2, 1), (0, 0), (1, 4)), 2),
        (((3, -1), (0, 0), (1, 3)), 0),
    ],
)
def test_first_invalid_rank_finds_impossible_row_counts(table: tuple[tuple[int, ...], ...], odd: int | None) -> None:
    """Of ranks that carry 2, no and 3 rows, each of which goes to one part or both."""
    assert first_invalid_rank(table, [2, 0, 3], experts_per_row=4) == odd


def test_first_invalid_rank_allows_one_part_per_row_with_one_active_expert() -> None:
    assert (
        first_invalid_rank(((2, 2),), [3], experts_per_row=1) == 0
        and first_invalid_rank(((2, 1),), [3], experts_per_row=1) is None
    )


class Liar(Meeting):
    """Tells of more rows than there are."""

    def gather(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        return super().gather(rows + 4, counts)


def test_every_rank_names_the_rank_that_reports_impossible_counts() -> None:
    """Before a row moves: what it told would have made every rank take other sizes than it sends."""
    torch.manual_seed(0)
    weights = Weights.random(MOES["five"], torch.float64, biases=False)
    rows = [torch.randn(3, H, dtype=torch.float64) for _ in range(2)]

    def run(mesh: Mesh) -> str:
        if mesh.rank == 1:
            mesh.facts = Liar(1, 2, mesh.world.board, mesh.world.clock)  # type: ignore[attr-defined]
        with pytest.raises(OutOfStepError) as caught:
            exchanged(weights, TorchKernels(), rows, 2, True, mesh)
        assert caught.value.rank == 1 and mesh.world.clock.collectives_returned == 1
        return str(caught.value)

    said = on_ranks(2, 2, run)
    assert said[0] == said[1] and said[0].startswith("rank 1 tells counts [")
