"""The base class of draft models: an embedding, layers that may also read the embedding, a head, and the map from draft
ids to target ids.

A draft has two entry points: `fuse_aux` turns the target's hidden states into the draft's hidden, and `forward` runs
the layers on the draft's hidden. The caller knows which one it needs; no model guesses it from the width of a tensor.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.arch import DraftLayer, DraftSpec
from cluster.config import ConfigError
from cluster.kernels.interface import Angles, Kernels
from cluster.models.attention import Attend, LatentAttention, ScaledQueries, SelfAttention
from cluster.models.checkpoint import Checkpoint, to_device
from cluster.models.context import ModelContext
from cluster.models.exchange import TokenExchange
from cluster.models.experts import Experts
from cluster.models.load import Loader
from cluster.models.mlp import Mlp
from cluster.models.rotary import RotaryTables
from cluster.models.vocab import Embedding, Head, ShardedLogits, load_embedding, load_head, tied_head


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """One draft layer. If `embed_norm` is set, attention reads `[embedding | hidden]`, 2 H wide, with the embedding
    normed by `embed_norm`. Otherwise it reads only the hidden. If `hidden_norm` is set, it norms the hidden that
    attention reads. If `residual_normed`, the residual is the normed hidden.
    """

    kernels: Kernels
    embed_norm: Tensor | None
    hidden_norm: Tensor | None
    attention: SelfAttention | LatentAttention
    post_norm: Tensor
    mlp: Mlp | Experts
    eps: float
    residual_normed: bool

    @property
    def exchange_calls(self) -> tuple[str, ...]:
        """Return the names of the `TokenExchange` methods that a forward calls, in order."""
        return ("reduce", *self.mlp.exchange_calls)

    def __call__(
        self, embedding: Tensor, hidden: Tensor, angles: Angles, attend: Attend, layer: int, exchange: TokenExchange
    ) -> Tensor:
        """Embedding and residual stream `[T, H]` entering the layer -> the residual stream leaving it, `[T, H]`."""
        kernels = self.kernels
        rows = hidden if self.hidden_norm is None else kernels.norm(hidden, self.hidden_norm, self.eps)
        residual = rows if self.residual_normed else hidden
        if self.embed_norm is not None:
            rows = torch.cat([kernels.norm(embedding, self.embed_norm, self.eps), rows], -1)
        out = self.attention(rows, angles, attend, layer, exchange)
        hidden, normed = kernels.add_norm(residual, out, self.post_norm, self.eps)
        return hidden + self.mlp(normed, exchange)


def load_block(load: Loader, prefix: str, layer: DraftLayer, residual_normed: bool) -> DraftBlock:
    """Load this rank's shard of the layer under `prefix`."""
    g = layer.geometry

    def norm_weight(name: str) -> Tensor:
        return load.norm(f"{prefix}.{name}.weight", g.hidden, g.unit_offset)

    attention = load.attention if g.latent is None else load.latent
    return DraftBlock(
        kernels=load.kernels,
        embed_norm=norm_weight("input_layernorm") if layer.pair else None,
        hidden_norm=None if layer.hidden_norm == "none" else norm_weight(layer.hidden_norm),
        attention=attention(f"{prefix}.self_attn", g, 2 * g.hidden if layer.pair else g.hidden),
        post_norm=norm_weight("post_attention_layernorm"),
        mlp=load.mlp(f"{prefix}.mlp", g) if g.moe is None else load.experts(f"{prefix}.mlp", g, g.moe),
        eps=g.eps,
        residual_normed=residual_normed and layer.pair,
    )


class DraftModel(ABC):
    """One draft model on one rank; a multi-layer draft has several. Each family of drafts is a subclass."""

    def __init__(self, spec: DraftSpec, checkpoint: Checkpoint, context: ModelContext, runner: int = 0) -> None:
        """Load this rank's shard of every tensor; `runner` is the index of this model in a multi-layer draft, else 0.

        Rotary tables are as long as `context` says, whatever the draft's config says about its positions.

        Raises:
            ConfigError: a tensor is missing, unknown or of the wrong shape, or the vocabulary map is invalid.
        """
        load, g = Loader(checkpoint, context), spec.layer
        self.spec, self._exchange, self._kernels = spec, context.exchange, context.kernels
        self._first_position = runner
        self._embed: Embedding | None = None
        self._head: Head | None = None
        if spec.embed == "own":
            self._embed = load_embedding(load, "embed_tokens.weight", spec.vocab_size, g.hidden)
        if spec.head == "own":
            self._head = load_head(load, "lm_head.weight", spec.draft_vocab_size, g.hidden)
        elif spec.head == "tied" and self._embed is not None:
            self._head = tied_head(self._embed, spec.vocab_size, load.kernels)
        self._layers: list[DraftBlock] = []
        self._load_blocks(load)
        self._norm = load.norm("norm.weight", g.hidden, g.unit_offset) if spec.final_norm else None
        self.target_ids = vocabulary_map(spec, checkpoint, context.device)
        # One position more than the target has: rows of some drafts are rotated as if they were one position later.
        geometries, positions = [layer.geometry for layer in spec.layers], context.max_position + 1
        self._rotaries = RotaryTables(geometries, positions, context.dtype, context.device)
        self._load(load)
        self.quantised = checkpoint.finish()

    @abstractmethod
    def _load(self, load: Loader) -> None:
        """Load the tensors that only this family has, for its `fuse_aux` and `forward`."""

    def _load_blocks(self, load: Loader) -> None:
        """Load the layers."""
        spec = self.spec
        self._layers = [
            load_block(load, f"layers.{i}", layer, spec.norm_before_residual) for i, layer in enumerate(spec.layers)
        ]

    def prepare_positions(self, positions: int) -> None:
        """Prepare rotary tables for positions below `positions`. The host calls this before a step."""
        self._rotaries.prepare_positions(positions + 1)

    @abstractmethod
    def fuse_aux(self, aux_hidden: Tensor) -> Tensor:
        """The target's hidden states `[T, A]` -> the draft's hidden `[T, H]`."""

    @abstractmethod
    def forward(self, token_ids: Tensor, positions: Tensor, hidden: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Run T rows; return (input of the head, recurrent hidden), `[T, H]` each.

        `positions` `[T]` are the positions of the rows. `token_ids[i]` is the token that follows row i. `hidden`
        `[T, H]` is the hidden state that each row reads: the output of `fuse_aux`, or, at a later draft level, the
        recurrent hidden state of the level before.
        """

    @property
    def exchange_calls(self) -> tuple[tuple[str, ...], tuple[str, ...], int, int]:
        """Return four values: the names of the `TokenExchange` methods that a forward calls, in order; the names of
        those that the head calls; H; the number of columns of this shard's logits.
        """
        assert self._head is not None
        forward = ("embed", *(op for layer in self._layers for op in layer.exchange_calls))
        return forward, ("head",), self.spec.hidden, self._head.columns

    def set_embed_and_head(self, embed: Embedding, head: Head) -> None:
        """Use the target's embedding and head where the draft's checkpoint has none."""
        self._embed = embed if self._embed is None else self._embed
        self._head = head if self._head is None else self._head

    @property
    def shard_target_ids(self) -> Tensor:
        """Return the target ids of the columns of this shard of the head, `[v]`; padding columns have 0."""
        assert self._head is not None
        start, count = self._head.start, self._head.columns
        ids = self.target_ids[start : start + count]
        return torch.cat([ids, ids.new_zeros(count - ids.shape[0])])

    def logits(self, normed: Tensor) -> ShardedLogits:
        """Input of the head `[T, H]` -> logits over the draft vocabulary."""
        assert self._head is not None
        return self._head(normed, self._exchange)

    def _run(self, embedding: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Run the layers and the final norm; return (input of the head, recurrent hidden), `[T, H]` each.

        The recurrent hidden is what the next level of a draft tree reads. It is taken after the final norm if the
        spec's `recurrent` is "post", else before the norm.
        """
        angles = self._rotaries.angles_at(positions)
        if self.spec.query_scaling is not None:
            attend = ScaledQueries(attend, positions, self.spec.query_scaling)
        for index, layer in enumerate(self._layers):
            hidden = layer(embedding, hidden, angles[index], attend, index, self._exchange)
        normed = hidden if self._norm is None else self._kernels.norm(hidden, self._norm, self.spec.layer.eps)
        return normed, normed if self.spec.recurrent == "post" else hidden

    def _embedding(self, token_ids: Tensor) -> Tensor:
        assert self._embed is not None
        return self._embed(token_ids, self._exchange)


def vocabulary_map(spec: DraftSpec, checkpoint: Checkpoint, device: torch.device) -> Tensor:
    """Return the map draft id -> target id, int64 `[Vd]`: the spec's `token_map`, the checkpoint's `d2t`, or identity.

    On disk `d2t` holds offsets: target id = draft id + d2t[draft id]. `t2d`, if present, must agree with it.

    Raises:
        ConfigError: `d2t` is missing but needed, is not an ascending map into the target's ids, or disagrees with
        `t2d`.
    """
    if spec.token_map:
        checkpoint.mark_name_used("t2d")
        return torch.tensor(spec.token_map, device=device)
    identity = torch.arange(spec.draft_vocab_size).to(device)
    if not spec.vocab_map:
        if spec.draft_vocab_size != spec.vocab_size:
            raise ConfigError(
                f"tensor 'd2t' is missing in {checkpoint.folder!r}: draft_vocab_size {spec.draft_vocab_size} needs it"
            )
        checkpoint.mark_name_used("t2d")
        return identity
    offsets = checkpoint.tensor("d2t", (spec.draft_vocab_size,)).long()
    if offsets.is_meta:
        if "t2d" in checkpoint.shapes:
            checkpoint.tensor("t2d", (spec.vocab_size,))
        return identity
    ids = identity.cpu() + offsets
    is_valid = bool((ids[1:] > ids[:-1]).all()) and int(ids[0]) >= 0 and int(ids[-1]) < spec.vocab_size
    if "t2d" in checkpoint.shapes:
        mask = checkpoint.tensor("t2d", (spec.vocab_size,)).bool()
        is_valid = (
            is_valid
            and int(mask.sum()) == spec.draft_vocab_size
            and bool(mask[ids.clamp(0, spec.vocab_size - 1)].all())
        )
    if not is_valid:
        raise ConfigError(
            f"tensor 'd2t' in {checkpoint.folder!r} is not a map into the target's {spec.vocab_size} ids; it must hold "
            "offsets (target id minus draft id) that ascend and agree with 't2d'"
        )
    return to_device(ids, torch.int64, device)
