"""What a target is: layers that may differ, over a vocabulary; read from a checkpoint's config by its family."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.arch.keys import Keys, dtype_of, read_json
from cluster.arch.layer import LayerGeometry
from cluster.config import ConfigError


@dataclass(frozen=True, slots=True)
class TargetArch:
    """A target: its layers over a vocabulary, how it ends a text, and what its tensors are called.

    `embed_scale` multiplies the embedding's rows, `softcap` bends logits to c * tanh(x / c). `names` turn the names
    that layers ask for into the checkpoint's, in order, as (pattern, replacement); `ignored` are patterns of stored
    tensors that the target does not use (a vision tower, an MTP draft).
    """

    family: str
    vocab_size: int
    layers: tuple[LayerGeometry, ...]
    tied: bool
    max_position: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    embed_scale: float | None = None
    softcap: float | None = None
    names: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        """How many decoder layers there are."""
        return len(self.layers)

    @property
    def layer(self) -> LayerGeometry:
        """The first layer; all have its width, its heads and its cell in the pool."""
        return self.layers[0]

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.layer.hidden

    def stored_name(self, name: str) -> str:
        """What the checkpoint calls `name`."""
        for pattern, replacement in self.names:
            name = re.sub(pattern, replacement, name)
        return name


def target_of(keys: Keys, family: str, layers: tuple[LayerGeometry, ...], **own: Any) -> TargetArch:
    """The target of these layers: keys that all configs share are read here, `own` are the family's own values.

    Raises:
        ConfigError: layers that cannot share a KV pool, or a config value of the wrong kind.
    """
    if len({(layer.hidden, layer.heads, layer.cell) for layer in layers}) != 1:
        raise ConfigError(f"{keys.file} of {keys.where!r}: layers that differ in heads or widths are not served")
    given: dict[str, Any] = {
        "family": family,
        "vocab_size": keys.integer("vocab_size"),
        "layers": layers,
        "tied": keys.flag("tie_word_embeddings"),
        "max_position": keys.integer("max_position_embeddings", 2048),
        "dtype": dtype_of(keys.data),
        "eos_token_ids": end_tokens(keys.where, keys.data),
    }
    return TargetArch(**(given | own))


def end_tokens(folder: str, config: Mapping[str, Any]) -> tuple[int, ...]:
    """End tokens: generation_config.json's where it names some, else config.json's."""
    found: tuple[int, ...] = ()
    generation = (
        read_json(folder, "generation_config.json") if (Path(folder) / "generation_config.json").is_file() else {}
    )
    for data in (config, generation):
        ids = data.get("eos_token_id")
        if ids is None:
            continue
        ids = ids if isinstance(ids, list) else [ids]
        if any(type(i) is not int or i < 0 for i in ids):
            raise ConfigError(f"config of {folder!r}: eos_token_id must be token ids, got {ids!r}")
        found = tuple(ids)
    return found
