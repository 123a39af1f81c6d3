"""EAGLE-3 drafts (arXiv 2503.01840; upstream's layer lists and aux norms: SGLang #24663).

Layer 0 reads `[input_norm(embedding) | hidden_norm(hidden)]`, 2 H wide; later layers are ordinary. The recurrent state
is the un-normed output unless `norm_output` (EAGLE-3.1) says post-norm. Two entrances, never guessed from a width:
`fuse_aux` turns the target's aux hidden into the draft's hidden, `forward` runs the layers on a hidden.
"""

import torch
from torch import Tensor

from cluster.arch import DraftSpec
from cluster.config import ConfigError
from cluster.models.checkpoint import Checkpoint, placed
from cluster.models.layer import LAYER_OPS, Attend, RotaryTable, TokenExchange, norm, project
from cluster.models.load import Loader, Sharding
from cluster.models.vocab import Embedding, Head, load_embedding, load_head


class Eagle3Draft:
    """An EAGLE-3 draft on one rank, sharing the target's embedding (and head) where its checkpoint has none."""

    def __init__(
        self,
        spec: DraftSpec,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        exchange: TokenExchange,
        sharding: Sharding,
        max_position: int,
    ) -> None:
        """Load this rank's part of every tensor, strictly; `max_position` comes from the target, not from the config.

        Raises:
            ConfigError: a tensor is missing, unknown or of the wrong shape, or the vocabulary map is not one.
        """
        load, g = Loader(checkpoint, dtype, device, sharding), spec.layer
        self.spec, self._exchange = spec, exchange
        self._embed: Embedding | None = None
        self._head: Head | None = None
        if spec.own_embed:
            self._embed = load_embedding(load, "embed_tokens.weight", spec.vocab_size, g.hidden)
        if spec.own_head:
            self._head = load_head(load, "lm_head.weight", spec.draft_vocab_size, g.hidden)
        self._fc = load.projection("fc.weight", g.hidden, spec.fc_in) if spec.use_aux_hidden_state else None
        self._concat_norm = load.take("input_norm.weight", spec.fc_in) if spec.norm_before_fc else None
        aux_norms = range(spec.num_aux) if spec.fc_norm else range(0)
        self._aux_norms = [load.take(f"fc_norm.{i}.weight", spec.target_hidden) for i in aux_norms]
        self._embed_norm = load.take("layers.0.input_layernorm.weight", g.hidden)
        self._hidden_norm = load.take("layers.0.hidden_norm.weight", g.hidden) if spec.use_aux_hidden_state else None
        self._attention = load.attention("layers.0.self_attn", g, 2 * g.hidden)
        self._post_norm = load.take("layers.0.post_attention_layernorm.weight", g.hidden)
        self._mlp = load.mlp("layers.0.mlp", g)
        self._later = [load.layer(f"layers.{i}", g) for i in range(1, spec.num_layers)]
        self._norm = load.take("norm.weight", g.hidden)
        self.target_ids = _vocabulary_map(spec, checkpoint, device)
        checkpoint.finish()
        self._rotary = RotaryTable(spec.rope, g.head_dim, max_position, dtype, device)

    @property
    def ops(self) -> tuple[tuple[str, ...], tuple[str, ...], int, int]:
        """What a forward and a head call of the exchange, in order; the width of rows, and of this shard's logits."""
        assert self._head is not None
        ops = ("embed", *LAYER_OPS * self.spec.num_layers)
        return ops, ("head",), self.spec.layer.hidden, self._head.columns

    def set_embed_and_head(self, embed: Embedding, head: Head) -> None:
        """Share the target's embedding and head where the checkpoint brought none."""
        self._embed = embed if self._embed is None else self._embed
        self._head = head if self._head is None else self._head

    def fuse_aux(self, aux_hidden: Tensor) -> Tensor:
        """The target's aux hidden `[T, A]` -> the draft's hidden `[T, H]`."""
        eps = self.spec.layer.eps
        if self._concat_norm is not None:
            aux_hidden = norm(aux_hidden, self._concat_norm, eps)
        if self._aux_norms:
            parts = torch.split(aux_hidden, self.spec.target_hidden, -1)
            aux_hidden = torch.cat([norm(p, w, eps) for p, w in zip(parts, self._aux_norms, strict=True)], -1)
        return aux_hidden if self._fc is None else project(aux_hidden, self._fc)

    def forward(self, token_ids: Tensor, positions: Tensor, hidden: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Rows of (token after the cell, its position `[T]`, hidden `[T, H]`) -> (normed, recurrent) `[T, H]`."""
        assert self._embed is not None
        eps, angles = self.spec.layer.eps, self._rotary.at(positions)
        embedding = norm(self._embed(token_ids, self._exchange), self._embed_norm, eps)
        normed = hidden if self._hidden_norm is None else norm(hidden, self._hidden_norm, eps)
        residual = normed if self.spec.norm_before_residual else hidden
        rows = torch.cat([embedding, normed], -1)
        hidden = residual + self._attention(rows, self._rotary, angles, attend, 0, self._exchange)
        hidden = hidden + self._mlp(norm(hidden, self._post_norm, eps), self._exchange)
        for index, layer in enumerate(self._later, start=1):
            hidden = layer(hidden, self._rotary, angles, attend, index, self._exchange)
        normed = norm(hidden, self._norm, eps)
        return normed, normed if self.spec.norm_output else hidden

    def logits(self, normed: Tensor) -> Tensor:
        """Normed output `[T, H]` -> logits over the draft vocabulary `[T, Vd]`."""
        assert self._head is not None
        return self._head(normed, self._exchange)


def _vocabulary_map(spec: DraftSpec, checkpoint: Checkpoint, device: torch.device) -> Tensor:
    """Draft id -> target id, `[Vd]` int64. On disk `d2t` holds offsets: target id = draft id + d2t[draft id]."""
    identity = torch.arange(spec.draft_vocab_size)
    if "d2t" not in checkpoint.shapes:
        if spec.draft_vocab_size != spec.vocab_size:
            raise ConfigError(
                f"tensor 'd2t' is missing in {checkpoint.folder!r}: draft_vocab_size {spec.draft_vocab_size} needs it"
            )
        checkpoint.drop("t2d")
        return identity.to(device)
    ids = identity + checkpoint.take("d2t", (spec.draft_vocab_size,)).long()
    increasing = bool((ids[1:] > ids[:-1]).all()) and int(ids[0]) >= 0 and int(ids[-1]) < spec.vocab_size
    if "t2d" in checkpoint.shapes:
        mask = checkpoint.take("t2d", (spec.vocab_size,)).bool()
        increasing = (
            increasing
            and int(mask.sum()) == spec.draft_vocab_size
            and bool(mask[ids.clamp(0, spec.vocab_size - 1)].all())
        )
    if not increasing:
        raise ConfigError(
            f"tensor 'd2t' in {checkpoint.folder!r} is no map into the target's {spec.vocab_size} ids; it must hold "
            "offsets (target id minus draft id) that ascend and agree with 't2d'"
        )
    return placed(ids, torch.int64, device)
