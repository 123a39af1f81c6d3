"""Drafts whose layer `fc` joins embedding and hidden in every forward: EAGLE-1/2, Mistral EAGLE, MTP layers.

Sources: arXiv 2401.15077 and SGLang #4247 (EAGLE-1), SGLang #24058 (Mistral), DeepSeek-V3's report 2.2 (MTP).
"""

import torch
from torch import Tensor

from cluster.models.attention import Attend
from cluster.models.draft import DraftModel
from cluster.models.load import Loader


class Eagle1Draft(DraftModel):
    """A draft whose layers read `fc([embedding | hidden])`. In the extend phase, where the draft reads accepted tokens,
    hidden is the target's, after its final norm or, in some MTP formats, before it.
    """

    def _load(self, load: Loader) -> None:
        spec, h = self.spec, self.spec.hidden
        self._fc = load.projection("fc.weight", h, 2 * h)
        self._fc_bias = load.tensor("fc.bias", h) if spec.fc_bias else None
        self._input_norms: tuple[Tensor, ...] | None = None
        if spec.pair_norms:
            offset = spec.layer.unit_offset
            self._input_norms = tuple(
                load.norm(f"{input_name}_norm.weight", h, offset) for input_name in ("embed", "hidden")
            )

    def fuse_aux(self, aux_hidden: Tensor) -> Tensor:
        """Return `aux_hidden` unchanged: it is one hidden state of the target, `[T, H]`."""
        return aux_hidden

    def forward(self, token_ids: Tensor, positions: Tensor, hidden: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Join embedding and hidden, then run the layers; see `DraftModel.forward`."""
        embedding, eps = self._embedding(token_ids), self.spec.layer.eps
        if self.spec.zero_first:  # the first row of a sequence is at position i for runner i (see `MultiLayerDraft`)
            embedding = embedding.masked_fill((positions == self._first_position)[:, None], 0)
        if self._input_norms is not None:
            embedding = self._kernels.norm(embedding, self._input_norms[0], eps)
            hidden = self._kernels.norm(hidden, self._input_norms[1], eps)
        inputs = [embedding, hidden] if self.spec.concat_order == "embed_first" else [hidden, embedding]
        return self._run(embedding, self._fc(torch.cat(inputs, -1), self._fc_bias), positions, attend)
