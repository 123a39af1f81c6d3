"""Llama-architecture targets (Llama 2/3.x): decoder layers, a final norm, an own or tied head."""

import torch
from torch import Tensor

from cluster.arch import TargetArch
from cluster.models.checkpoint import Checkpoint
from cluster.models.layer import LAYER_OPS, WHOLE, Attend, Loader, RotaryTable, Sharding, TokenExchange, norm
from cluster.models.vocab import Embedding, Head, load_embedding, load_head, tied_head


class LlamaTarget:
    """A target on one rank. `forward` returns the post-norm hidden and the aux hidden states of chosen boundaries."""

    def __init__(
        self,
        arch: TargetArch,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        exchange: TokenExchange,
        sharding: Sharding,
        max_position: int,
    ) -> None:
        """Load this rank's part of every tensor of the checkpoint, strictly.

        Raises:
            ConfigError: a tensor is missing, unknown or of the wrong shape.
        """
        load = Loader(checkpoint, dtype, device, sharding)
        self.arch, self.folder, self._exchange = arch, checkpoint.folder, exchange
        self._embed = load_embedding(load, "embed_tokens.weight", arch.vocab_size, arch.hidden)
        self._layers = [load.layer(f"layers.{i}", arch.layer) for i in range(arch.num_layers)]
        self._norm = load.take("norm.weight", arch.hidden)
        if arch.tied:
            checkpoint.drop("lm_head.weight")
            self._head = tied_head(self._embed, arch.vocab_size)
        else:
            self._head = load_head(load, "lm_head.weight", arch.vocab_size, arch.hidden)
        checkpoint.finish()
        self._rotary = RotaryTable(arch.rope, arch.layer.head_dim, max_position, dtype, device)

    @property
    def ops(self) -> tuple[tuple[str, ...], tuple[str, ...], int, int]:
        """What a forward and a head call of the exchange, in order; the width of rows, and of this shard's logits."""
        return ("embed", *LAYER_OPS * self.arch.num_layers), ("head",), self.arch.hidden, self._head.columns

    def get_embed_and_head(self) -> tuple[Embedding, Head]:
        """The embedding and the head, for a draft to share."""
        return self._embed, self._head

    def forward(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, boundaries: tuple[int, ...]
    ) -> tuple[Tensor, list[Tensor]]:
        """Rows `[T]` -> post-norm hidden `[T, H]` and the residual stream entering each boundary, `[T, H]` each."""
        hidden = self._embed(token_ids, self._exchange)
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
        return self._head(hidden, self._exchange)


def read_embed_and_head(
    folder: str, arch: TargetArch, dtype: torch.dtype, device: torch.device
) -> tuple[Embedding, Head]:
    """The whole embedding and head of the target in `folder`."""
    load = Loader(Checkpoint(folder), dtype, device, WHOLE)
    embed = load_embedding(load, "embed_tokens.weight", arch.vocab_size, arch.hidden)
    if arch.tied:
        return embed, tied_head(embed, arch.vocab_size)
    return embed, load_head(load, "lm_head.weight", arch.vocab_size, arch.hidden)
