"""The target model of all families: an embedding, decoder layers that may differ, a final norm, a head."""

from dataclasses import replace

from torch import Tensor

from cluster.arch import TargetArch
from cluster.models.attention import Attend, ScaledQueries
from cluster.models.checkpoint import Checkpoint
from cluster.models.context import UNSHARDED, ModelContext
from cluster.models.layer import run_layers
from cluster.models.layer_inputs import load_layer_inputs
from cluster.models.load import Loader
from cluster.models.rotary import RotaryTables
from cluster.models.vocab import Embedding, Head, ShardedLogits, load_embedding, load_head, scale_of, tied_head


class DecoderTarget:
    """The target on one rank."""

    def __init__(self, arch: TargetArch, checkpoint: Checkpoint, context: ModelContext) -> None:
        """Load this rank's shard of every tensor of the checkpoint.

        Raises:
            ConfigError: a tensor is missing, unknown or of the wrong shape.
        """
        load, first = Loader(checkpoint, context), arch.layer
        dtype, device = context.dtype, context.device
        self.arch, self.folder, self._exchange = arch, checkpoint.folder, context.exchange
        self._kernels = context.kernels
        self._embed = load_embedding(load, "embed_tokens.weight", arch.vocab_size, arch.hidden)
        self._layer_inputs = load_layer_inputs(load, arch) if arch.layer_input_vocab else None
        self._layers = [load.layer(f"layers.{i}", g) for i, g in enumerate(arch.layers)]
        self._norm = load.norm("norm.weight", arch.hidden, first.unit_offset)
        self._head = _head(load, arch, self._embed)
        self.quantised = checkpoint.finish()
        self._rotaries = RotaryTables(arch.layers, context.max_position, dtype, device)
        self._embed_scale = scale_of(arch.embed_scale, dtype, device)

    @property
    def exchange_calls(self) -> tuple[tuple[str, ...], tuple[str, ...], int, int]:
        """Return four values: the names of the `TokenExchange` methods that a forward calls, in order; the names of
        those that the head calls; H; the number of columns of this shard's logits.
        """
        forward = ("embed", *(op for layer in self._layers for op in layer.exchange_calls))
        return forward, ("head",), self.arch.hidden, self._head.columns

    def get_embed_and_head(self) -> tuple[Embedding, Head]:
        """Return the embedding (without `embed_scale`) and the head, for a draft to share."""
        return self._embed, self._head

    def prepare_positions(self, positions: int) -> None:
        """Prepare rotary tables for positions below `positions`. The host calls this before a step."""
        self._rotaries.prepare_positions(positions)

    def forward(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, boundaries: tuple[int, ...]
    ) -> tuple[Tensor, list[Tensor]]:
        """Token ids `[T]` -> post-norm hidden, and the residual stream (aux hidden) at each boundary, `[T, H]` each.

        Boundary i is the input of layer i; boundary `num_layers` is the output of the last layer.
        """
        hidden = self._embed(token_ids, self._exchange)
        if self._embed_scale is not None:
            hidden = hidden * self._embed_scale
        own_inputs = None if self._layer_inputs is None else self._layer_inputs(token_ids, hidden)
        angles = self._rotaries.angles_at(positions)
        if self.arch.query_scaling is not None:
            attend = ScaledQueries(attend, positions, self.arch.query_scaling)
        hidden, residual_update, aux = run_layers(
            self._layers, hidden, angles, attend, self._exchange, own_inputs, boundaries
        )
        hidden, normed = self._kernels.add_norm(hidden, residual_update, self._norm, self.arch.layer.eps)
        if self.arch.num_layers in boundaries:
            aux.append(hidden)
        return normed, aux

    @property
    def token_ids(self) -> range:
        """Return the token ids of this shard's columns; ids from `vocab_size` on are padding."""
        return range(self._head.start, self._head.start + self._head.columns)

    def logits(self, hidden: Tensor) -> ShardedLogits:
        """Post-norm hidden `[T, H]` -> logits over the vocabulary, or this rank's shard of them."""
        return self._head(hidden, self._exchange, self.arch.softcap)


def target_checkpoint(folder: str, arch: TargetArch, dry: bool = False) -> Checkpoint:
    """Open the checkpoint of the target in `folder`. `arch` translates the names that the model uses into the names in
    the checkpoint. If `dry`, only headers are read.
    """
    return Checkpoint(folder, arch.stored_name, arch.ignored_patterns, dry)


def read_embed_and_head(folder: str, arch: TargetArch, context: ModelContext) -> tuple[Embedding, Head]:
    """Read the whole embedding and head of the target in `folder`, whatever the sharding of `context`."""
    load = Loader(target_checkpoint(folder, arch), replace(context, sharding=UNSHARDED))
    embed = load_embedding(load, "embed_tokens.weight", arch.vocab_size, arch.hidden)
    return embed, _head(load, arch, embed)


def _head(load: Loader, arch: TargetArch, embed: Embedding) -> Head:
    """Return the head. It is tied to the embedding only if the config says so and the checkpoint has no `lm_head`."""
    if arch.tied and not load.checkpoint.contains("lm_head.weight"):
        return tied_head(embed, arch.vocab_size, load.kernels)
    return load_head(load, "lm_head.weight", arch.vocab_size, arch.hidden)
