"""What the models of a rank have in common: how they compute, where, with whom, and which part of them is here."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from cluster.arch import Moe
from cluster.distributed.mesh import Shard
from cluster.kernels.interface import Kernels
from cluster.kernels.torch_kernels import TorchKernels
from cluster.models.exchange import NoExchange, TokenExchange


class Sharding(NamedTuple):
    """Which part of a model this rank holds: of the attention heads, of the MLPs' columns, of the vocabulary, and of
    each layer's experts, whole or, where ranks share a part of them, some of their columns.
    """

    attention: Shard = Shard()
    mlp: Shard = Shard()
    vocab: Shard = Shard()
    experts: Shard = Shard()

    @property
    def apart(self) -> bool:
        """Whether some experts are on other ranks."""
        return self.experts.size > 1

    @property
    def columns(self) -> Shard:
        """Of the columns of the experts held."""
        each = self.mlp.size // self.experts.size
        return Shard(self.mlp.rank % each, each)

    @property
    def shared(self) -> Shard:
        """Of the columns of an MLP that every token takes: where rows go to experts, it stays with its rows."""
        return self.attention if self.apart else self.mlp


def part_of_experts(ep_size: int, world: Shard) -> Shard:
    """The part of the experts that a rank of the world holds; ranks that follow each other share a part."""
    return Shard(world.rank * ep_size // world.size, ep_size)


def where_experts_are(moe: Moe, ep_size: int, ranks: int) -> str:
    """In words, the same on every rank of so many."""
    if ep_size == 1:
        return f"{moe.experts} experts" + (f", each by columns over {ranks} ranks" if ranks > 1 else "")
    each, held = ranks // ep_size, []
    for part in range(ep_size):
        start, stop = Shard(part, ep_size).span(moe.experts)
        ids = f"{start} to {stop - 1}" if stop - start > 1 else f"{start}"
        last = (part + 1) * each - 1
        held.append(f"{ids} on " + (f"rank {last}" if each == 1 else f"ranks {part * each} to {last} by columns"))
    return f"{moe.experts} experts, {', '.join(held)}"


WHOLE = Sharding()


@dataclass(frozen=True, slots=True)
class ModelContext:
    """The compute `dtype`, the `device`, and the `exchange` with the ranks that share the model as `sharding` says.

    `max_position` is how many positions the rotary tables have room for; `kernels` are the operators.
    """

    dtype: torch.dtype
    device: torch.device
    exchange: TokenExchange
    sharding: Sharding
    max_position: int
    kernels: Kernels = field(default_factory=TorchKernels)

    @classmethod
    def dry(cls, sharding: Sharding = WHOLE) -> "ModelContext":
        """For a model on torch's meta device, which needs only the headers of its checkpoint."""
        return cls(torch.float32, torch.device("meta"), NoExchange(), sharding, 1)
