"""What all models of a rank share: dtype, device, kernels, the exchange with other ranks, and how they are sharded."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from cluster.arch import Moe
from cluster.distributed.mesh import Shard
from cluster.kernels.interface import Kernels
from cluster.kernels.torch_kernels import TorchKernels
from cluster.models.exchange import NoExchange, TokenExchange


class Sharding(NamedTuple):
    """The shards of a model that this rank holds: some of the attention heads (`attention`), some columns of each MLP
    (`mlp`), some token ids of embedding and head (`vocab`), and some experts of each layer (`experts`). Ranks that hold
    the same experts divide the columns of these experts among themselves.
    """

    attention: Shard = Shard()
    mlp: Shard = Shard()
    vocab: Shard = Shard()
    experts: Shard = Shard()

    @property
    def expert_parallel(self) -> bool:
        """Whether the model is expert-parallel: some experts are on other ranks only."""
        return self.experts.size > 1

    @property
    def expert_columns(self) -> Shard:
        """Return this rank's shard of the columns of the experts that it holds."""
        ranks_per_shard = self.mlp.size // self.experts.size
        return Shard(self.mlp.rank % ranks_per_shard, ranks_per_shard)

    @property
    def shared_expert(self) -> Shard:
        """Return the shard of the columns of a shared expert, an MLP that every token takes.

        If the model is expert-parallel, each row is sent to the ranks of its routed experts, but the shared expert runs
        in the row's own attention group.
        """
        return self.attention if self.expert_parallel else self.mlp


def expert_shard(ep_size: int, world: Shard) -> Shard:
    """Return the shard of experts that rank `world.rank` of `world.size` ranks holds. If there are more ranks than
    shards (`ep_size`), several neighbouring ranks hold the same shard.
    """
    return Shard(world.rank * ep_size // world.size, ep_size)


def describe_expert_placement(moe: Moe, ep_size: int, ranks: int) -> str:
    """Return a text that says which of `ranks` ranks hold which experts; it is the same on every rank."""
    if ep_size == 1:
        return f"{moe.experts} experts" + (f", each by columns over {ranks} ranks" if ranks > 1 else "")
    ranks_per_shard, placements = ranks // ep_size, []
    for shard_index in range(ep_size):
        start, stop = Shard(shard_index, ep_size).span(moe.experts)
        ids = f"{start} to {stop - 1}" if stop - start > 1 else f"{start}"
        last_rank = (shard_index + 1) * ranks_per_shard - 1
        placements.append(
            f"{ids} on "
            + (
                f"rank {last_rank}"
                if ranks_per_shard == 1
                else f"ranks {shard_index * ranks_per_shard} to {last_rank} by columns"
            )
        )
    return f"{moe.experts} experts, {', '.join(placements)}"


UNSHARDED = Sharding()


@dataclass(frozen=True, slots=True)
class ModelContext:
    """The compute `dtype`, the `device`, this rank's shards (`sharding`), and the `exchange` with the ranks that hold
    the other shards. `max_position` is the number of positions in rotary tables; `kernels` are the operators.
    """

    dtype: torch.dtype
    device: torch.device
    exchange: TokenExchange
    sharding: Sharding
    max_position: int
    kernels: Kernels = field(default_factory=TorchKernels)

    @classmethod
    def headers_only(cls, sharding: Sharding = UNSHARDED) -> "ModelContext":
        """Return the context of a model on torch's meta device, which needs only the headers of its checkpoint."""
        return cls(torch.float32, torch.device("meta"), NoExchange(), sharding, 1)
