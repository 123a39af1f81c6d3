"""A draft that keeps no KV: its layers read the keys and values of the target (Gemma-4's assistant)."""

import torch
from torch import Tensor

from cluster.models.attention import Attend
from cluster.models.draft import DraftModel
from cluster.models.layer import run_layers
from cluster.models.load import Loader
from cluster.models.vocab import scale_of


class FrozenKvDraft(DraftModel):
    """The rows of all levels of a tree see the committed tokens, and are at the position of the root. A row at position
    p reads the token at p + 1, as in other drafts, and is rotated by p + 1.
    """

    def _load(self, load: Loader) -> None:
        width, target_width = self.spec.layer.hidden, self.spec.target_hidden
        self._pre = load.projection("pre_projection.weight", width, 2 * target_width)
        self._post = load.projection("post_projection.weight", target_width, width)
        self._embed_scale = scale_of(self.spec.embed_scale, load.dtype, load.device)

    def _load_blocks(self, load: Loader) -> None:
        """Load the layers: they are decoder layers like a target's."""
        self._decoder_layers = [
            load.layer(f"layers.{index}", layer.geometry) for index, layer in enumerate(self.spec.layers)
        ]

    @property
    def exchange_calls(self) -> tuple[tuple[str, ...], tuple[str, ...], int, int]:
        """See `DraftModel.exchange_calls`. The rows between layers have the draft's own width."""
        assert self._head is not None
        forward = ("embed", *(op for layer in self._decoder_layers for op in layer.exchange_calls))
        return forward, ("head",), self.spec.layer.hidden, self._head.columns

    def fuse_aux(self, aux_hidden: Tensor) -> Tensor:
        """Return `aux_hidden` unchanged: it is the target's post-norm hidden `[T, H]`."""
        return aux_hidden

    def forward(self, token_ids: Tensor, positions: Tensor, hidden: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Join embedding and hidden, then run the layers; see `DraftModel.forward`. The input of the head has the
        draft's width; the recurrent hidden has the target's.
        """
        embedding = self._embedding(token_ids)
        if self._embed_scale is not None:
            embedding = embedding * self._embed_scale
        rows = self._pre(torch.cat([embedding, hidden], 1))
        angles = self._rotaries.angles_at(positions + 1)
        rows, residual_update, _ = run_layers(self._decoder_layers, rows, angles, attend, self._exchange)
        assert self._norm is not None
        _, normed = self._kernels.add_norm(rows, residual_update, self._norm, self.spec.layer.eps)
        return normed, self._post(normed)
