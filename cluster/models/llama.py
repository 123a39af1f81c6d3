"""Llama-architecture targets (Llama 2/3.x): decoder layers, a final norm, an own or tied head."""

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.arch import TargetArch
from cluster.models.checkpoint import Checkpoint
from cluster.models.layer import Attend, Loader, RotaryTable, TokenExchange, norm, project


class LlamaTarget:
    """A target on one rank. `forward` returns the post-norm hidden and the aux hidden states of chosen boundaries."""

    def __init__(
        self,
        arch: TargetArch,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        exchange: TokenExchange,
        max_position: int,
    ) -> None:
        """Load every tensor of the checkpoint, strictly.

        Raises:
            ConfigError: a tensor is missing, unknown or of the wrong shape.
        """
        load = Loader(checkpoint, dtype, device)
        self.arch, self._exchange = arch, exchange
        self._embed = load.take("embed_tokens.weight", arch.vocab_size, arch.hidden)
        self._layers = [load.layer(f"layers.{i}", arch.layer) for i in range(arch.num_layers)]
        self._norm = load.take("norm.weight", arch.hidden)
        if arch.tied:
            checkpoint.drop("lm_head.weight")
        head = self._embed if arch.tied else load.take("lm_head.weight", arch.vocab_size, arch.hidden)
        self._head = head.t().contiguous()
        checkpoint.finish()
        self._rotary = RotaryTable(arch.rope, arch.layer.head_dim, max_position, dtype, device)

    def get_embed_and_head(self) -> tuple[Tensor, Tensor]:
        """The embedding `[V, H]` and the head `[H, V]`, for a draft to share."""
        return self._embed, self._head

    def forward(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, boundaries: tuple[int, ...]
    ) -> tuple[Tensor, list[Tensor]]:
        """Rows `[T]` -> post-norm hidden `[T, H]` and the residual stream entering each boundary, `[T, H]` each."""
        hidden = F.embedding(token_ids, self._embed)
        angles = self._rotary.at(positions)
        aux: list[Tensor] = []
        for index, layer in enumerate(self._layers):
            if index in boundaries:
                aux.append(hidden)
            hidden = layer(hidden, self._rotary, angles, attend, index, self._exchange)
        if self.arch.num_layers in boundaries:
            aux.append(hidden)
        return norm(hidden, self._norm, self.arch.layer.eps), aux

    def logits(self, hidden: Tensor) -> Tensor:
        """Post-norm hidden `[T, H]` -> logits `[T, V]`."""
        return project(hidden, self._head)
