"""EAGLE-3 drafts (arXiv 2503.01840; for layer lists and aux norms see SGLang #24663).

In the extend phase, where the draft reads accepted tokens, `fc` joins the target's aux hidden states. EAGLE-3.1 and
gpt-oss drafts norm these states first. Layer 0 reads `[input_layernorm(embedding) | hidden_norm(hidden)]`, 2 H wide;
`DraftSpec.layers` describes later layers.
"""

import torch
from torch import Tensor

from cluster.models.attention import Attend
from cluster.models.draft import DraftModel
from cluster.models.load import Loader


class Eagle3Draft(DraftModel):
    """An EAGLE-3 draft. It shares the target's embedding or head if its own checkpoint has none."""

    def _load(self, load: Loader) -> None:
        spec = self.spec
        self._fc = load.projection("fc.weight", spec.hidden, spec.fc_in) if spec.fc else None
        self._concat_norm = load.tensor("input_norm.weight", spec.fc_in) if spec.norm_before_fc else None
        aux_norms = range(spec.num_aux) if spec.fc_norm else range(0)
        self._aux_norms = [load.tensor(f"fc_norm.{i}.weight", spec.target_hidden) for i in aux_norms]

    def fuse_aux(self, aux_hidden: Tensor) -> Tensor:
        """The target's aux hidden states, concatenated to `[T, A]` -> the draft's hidden `[T, H]`."""
        eps = self.spec.layer.eps
        if self._concat_norm is not None:
            aux_hidden = self._kernels.norm(aux_hidden, self._concat_norm, eps)
        if self._aux_norms:
            aux_states = torch.split(aux_hidden, self.spec.target_hidden, -1)
            normed = [
                self._kernels.norm(state, weight, eps)
                for state, weight in zip(aux_states, self._aux_norms, strict=True)
            ]
            aux_hidden = torch.cat(normed, -1)
        return aux_hidden if self._fc is None else self._fc(aux_hidden)

    def forward(self, token_ids: Tensor, positions: Tensor, hidden: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Run the layers, which read the embedding themselves; see `DraftModel.forward`."""
        return self._run(self._embedding(token_ids), hidden, positions, attend)
