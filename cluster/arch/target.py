"""`TargetArch`: a target's layers and vocabulary, which a function per family reads from the checkpoint's config."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.arch.keys import ConfigKeys, dtype_of, read_json
from cluster.arch.layer import LayerGeometry
from cluster.arch.rope import longest_of
from cluster.config import ConfigError


@dataclass(frozen=True, slots=True)
class TargetArch:
    """A target: its layers, its vocabulary, its end tokens, and the names of its tensors.

    - `tied`: the head is the embedding.
    - `max_position`: the maximum number of tokens of a text, by the config.
    - `embed_scale` multiplies the embedding's rows. `softcap` c maps logits x to c * tanh(x / c).
    - `names`: (pattern, replacement) pairs that map our tensor names to the checkpoint's, applied in order.
    - `ignored`: patterns of stored tensors that the target does not use (a vision tower, an MTP draft).
    - `query_scaling` (length, beta): queries at position p are multiplied by 1 + beta log(1 + p // length).
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
    query_scaling: tuple[int, float] | None = None

    @property
    def num_layers(self) -> int:
        """The number of decoder layers."""
        return len(self.layers)

    @property
    def layer(self) -> LayerGeometry:
        """The first layer; all layers have its width, its heads and its cell in the KV pool."""
        return self.layers[0]

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.layer.hidden

    def stored_name(self, name: str) -> str:
        """Return the checkpoint's name for the tensor `name`."""
        for pattern, replacement in self.names:
            name = re.sub(pattern, replacement, name)
        return name


def target_of(keys: ConfigKeys, family: str, layers: tuple[LayerGeometry, ...], **own: Any) -> TargetArch:
    """Return the target with these layers. Keys common to all configs are read here; `own` has values of the family.

    Raises:
        ConfigError: the layers cannot share a KV pool, or a config value has the wrong type.
    """
    if len({(layer.hidden, layer.heads, layer.cell) for layer in layers}) != 1:
        raise keys.error("layers that differ in heads or widths are not served")
    given: dict[str, Any] = {
        "family": family,
        "vocab_size": keys.integer("vocab_size"),
        "layers": layers,
        "tied": keys.flag("tie_word_embeddings"),
        "max_position": _longest(keys, layers),
        "dtype": dtype_of(keys.data),
        "eos_token_ids": end_tokens(keys.where, keys.data),
    }
    return TargetArch(**(given | own))


def end_tokens(folder: str, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return all end tokens that generation_config.json, config.json and the tokenizer's config name. Often one of the
    three files lacks the token that ends the model's turns; SGLang reads all three as well.
    """
    found: dict[int, None] = {}
    for data in (_beside(folder, "generation_config.json"), config):
        ids = data.get("eos_token_id")
        ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if any(type(i) is not int or i < 0 for i in ids):
            raise ConfigError(f"config of {folder!r}: eos_token_id must be token ids, got {ids!r}")
        found |= dict.fromkeys(ids)
    return tuple(found | dict.fromkeys(_end_of_tokenizer(folder)))


def _beside(folder: str, name: str) -> dict[str, Any]:
    return read_json(folder, name) if (Path(folder) / name).is_file() else {}


def _end_of_tokenizer(folder: str) -> list[int]:
    """Return the id of tokenizer_config.json's `eos_token`, from its own or tokenizer.json's added tokens."""
    given = _beside(folder, "tokenizer_config.json")
    end = given.get("eos_token")
    end = end.get("content") if isinstance(end, Mapping) else end
    if not isinstance(end, str):
        return []
    listed = given.get("added_tokens_decoder")
    for at, each in listed.items() if isinstance(listed, Mapping) else ():
        if isinstance(each, Mapping) and each.get("content") == end and str(at).isdecimal():
            return [int(at)]
    for each in _added_tokens(Path(folder) / "tokenizer.json"):
        if isinstance(each, Mapping) and each.get("content") == end and type(each.get("id")) is int:
            return [each["id"]]
    return []


def _added_tokens(path: Path) -> list[Any]:
    """Return the `added_tokens` of a tokenizer.json without parsing the megabytes of vocabulary that follow them."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    start = text.find("[", text.find('"added_tokens"'))
    try:
        found = json.JSONDecoder().raw_decode(text, start)[0] if '"added_tokens"' in text else []
    except ValueError:
        return []
    return found if isinstance(found, list) else []


def _longest(keys: ConfigKeys, layers: tuple[LayerGeometry, ...]) -> int:
    """Return the maximum text length: the config's length, as extended by rope scaling. A model with dual chunk
    attention (Qwen2.5-1M) is limited to a chunk minus its local part: up to that length, dual chunk attention equals
    plain attention.
    """
    longest = max(layer.rope.longest(longest_of(keys)) for layer in layers)
    chunks = keys.section("dual_chunk_attention_config")
    if not chunks.data:
        return longest
    return min(longest, max(1, chunks.integer("chunk_size") - chunks.integer("local_size")))
