"""What the models of a rank have in common: how they compute, where, with whom, and which part of them is here."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from cluster.kernels.interface import Kernels
from cluster.kernels.torch_kernels import TorchKernels
from cluster.mesh import Part
from cluster.models.exchange import NoExchange, TokenExchange


class Sharding(NamedTuple):
    """Which part of a model this rank holds: of the attention heads, of the MLPs, of the vocabulary."""

    attention: Part = Part()
    mlp: Part = Part()
    vocab: Part = Part()


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
