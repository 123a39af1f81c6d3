"""What the models of a rank have in common: how they compute, where, with whom, and which part of them is here."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from cluster.kernels.interface import Kernels
from cluster.kernels.torch_kernels import TorchKernels
from cluster.mesh import Part
from cluster.models.exchange import NoExchange, TokenExchange


class Sharding(NamedTuple):
    """Which part of a model this rank holds: of the attention heads, of the MLPs' columns, of the vocabulary, and of
    each layer's experts, whole or, where ranks share a part of them, some of their columns.
    """

    attention: Part = Part()
    mlp: Part = Part()
    vocab: Part = Part()
    experts: Part = Part()

    @property
    def apart(self) -> bool:
        """Whether some experts are on other ranks."""
        return self.experts.size > 1

    @property
    def columns(self) -> Part:
        """Of the columns of the experts held."""
        each = self.mlp.size // self.experts.size
        return Part(self.mlp.rank % each, each)

    @property
    def shared(self) -> Part:
        """Of the columns of an MLP that every token takes: where rows go to experts, it stays with its rows."""
        return self.attention if self.apart else self.mlp


def part_of_experts(ep_size: int, world: Part) -> Part:
    """The part of the experts that a rank of the world holds; ranks that follow each other share a part."""
    return Part(world.rank * ep_size // world.size, ep_size)


WHOLE = Sharding()


@dataclass(frozen=True, slots=True)
class ModelContext:
    """The compute `dtype`, the `device`, and the `exchange` with the ranks that share the model as `sharding` says.

    `max_position` is how many positions the rotary tables hold; `kernels` are the operators.
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
