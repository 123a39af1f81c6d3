"""`TargetArch`: a target's layers and vocabulary, which a function per family reads from the checkpoint's config."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.arch.keys import ConfigKeys, dtype_of, read_json
from cluster.arch.layer import LayerGeometry, QueryScaling
from cluster.arch.rope import max_positions_of
from cluster.config import ConfigError


@dataclass(frozen=True, slots=True)
class TargetArch:
    """A target: its layers, its vocabulary, its end tokens, and the names of its tensors.

    - `tied`: the head is the embedding.
    - `max_position`: the maximum number of tokens of a text, by the config.
    - `embed_scale` multiplies the embedding's rows. `softcap` c maps logits x to c * tanh(x / c). None: not applied.
    - `tensor_name_rules`: (pattern, replacement) pairs, applied in order, that turn the name of a tensor in the model
      into its name in the checkpoint.
    - `ignored_patterns`: patterns of stored tensors that the target does not use (a vision tower, an MTP draft).
    - `layer_input_vocab`: the number of token ids that have inputs for each layer (`LayerGeometry.layer_input`); 0 if
      layers have none.
    - `query_scaling`: how queries are scaled with their position; None: they are not.
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
    tensor_name_rules: tuple[tuple[str, str], ...] = ()
    ignored_patterns: tuple[str, ...] = ()
    query_scaling: QueryScaling | None = None
    layer_input_vocab: int = 0

    @property
    def num_layers(self) -> int:
        """The number of decoder layers."""
        return len(self.layers)

    @property
    def layer(self) -> LayerGeometry:
        """The geometry of the first layer. All layers have the same width; other sizes may differ."""
        return self.layers[0]

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.layer.hidden

    def stored_name(self, name: str) -> str:
        """Return the checkpoint's name for the tensor `name`."""
        for pattern, replacement in self.tensor_name_rules:
            name = re.sub(pattern, replacement, name)
        return name


def target_of(keys: ConfigKeys, family: str, layers: tuple[LayerGeometry, ...], **family_fields: Any) -> TargetArch:
    """Return the target with these layers. Fields that every family reads in the same way are read here;
    `family_fields` adds fields of `TargetArch`, or replaces those that are read here.

    Raises:
        ConfigError: a config value has the wrong type.
    """
    fields: dict[str, Any] = {
        "family": family,
        "vocab_size": keys.integer("vocab_size"),
        "layers": layers,
        "tied": keys.flag("tie_word_embeddings"),
        "max_position": _max_text_length(keys, layers),
        "dtype": dtype_of(keys.data),
        "eos_token_ids": read_eos_token_ids(keys.folder, keys.data),
    }
    return TargetArch(**(fields | family_fields))


def read_eos_token_ids(folder: str, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return all end tokens that generation_config.json, config.json and the tokenizer's config name. Often one of the
    three files lacks the token that ends the model's turns; SGLang reads all three as well.
    """
    token_ids: dict[int, None] = {}
    for data in (_read_json_if_present(folder, "generation_config.json"), config):
        ids = data.get("eos_token_id")
        ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if any(type(i) is not int or i < 0 for i in ids):
            raise ConfigError(f"config of {folder!r}: eos_token_id must be token ids, got {ids!r}")
        token_ids |= dict.fromkeys(ids)
    return tuple(token_ids | dict.fromkeys(_tokenizer_eos_token_ids(folder)))


def _read_json_if_present(folder: str, name: str) -> dict[str, Any]:
    return read_json(folder, name) if (Path(folder) / name).is_file() else {}


def _tokenizer_eos_token_ids(folder: str) -> list[int]:
    """Return a list with the id of the `eos_token` that tokenizer_config.json names. The id is looked up in the added
    tokens of that file, then of tokenizer.json. The list is empty if there is no such id.
    """
    tokenizer_config = _read_json_if_present(folder, "tokenizer_config.json")
    eos_token = tokenizer_config.get("eos_token")
    eos_token = eos_token.get("content") if isinstance(eos_token, Mapping) else eos_token
    if not isinstance(eos_token, str):
        return []
    added_tokens = tokenizer_config.get("added_tokens_decoder")
    for token_id, token in added_tokens.items() if isinstance(added_tokens, Mapping) else ():
        if isinstance(token, Mapping) and token.get("content") == eos_token and str(token_id).isdecimal():
            return [int(token_id)]
    for token in _added_tokens(Path(folder) / "tokenizer.json"):
        if isinstance(token, Mapping) and token.get("content") == eos_token and type(token.get("id")) is int:
            return [token["id"]]
    return []


def _added_tokens(path: Path) -> list[Any]:
    """Return the `added_tokens` of a tokenizer.json without parsing the megabytes of vocabulary that follow them."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    start = text.find("[", text.find('"added_tokens"'))
    try:
        tokens = json.JSONDecoder().raw_decode(text, start)[0] if '"added_tokens"' in text else []
    except ValueError:
        return []
    return tokens if isinstance(tokens, list) else []


def _max_text_length(keys: ConfigKeys, layers: tuple[LayerGeometry, ...]) -> int:
    """Return the maximum text length: the config's length, as extended by rope scaling. A model with dual chunk
    attention (Qwen2.5-1M) is limited to a chunk minus its local part: up to that length, dual chunk attention equals
    plain attention.
    """
    positions = max(layer.rope.max_positions(max_positions_of(keys)) for layer in layers)
    chunk_attention = keys.section("dual_chunk_attention_config")
    if not chunk_attention.data:
        return positions
    return min(positions, max(1, chunk_attention.integer("chunk_size") - chunk_attention.integer("local_size")))
