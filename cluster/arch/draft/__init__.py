"""Reads a draft from a checkpoint's shapes and config into one frozen `DraftSpec`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from cluster.arch.draft.eagle1 import read_eagle1
from cluster.arch.draft.eagle3 import read_eagle3
from cluster.arch.draft.facts import OVERRIDES_SETTING, FactResolver, aux_boundaries
from cluster.arch.draft.gemma4 import read_gemma4_assistant
from cluster.arch.draft.mistral import read_mistral
from cluster.arch.draft.mtp import read_mtp
from cluster.arch.draft.recognise import has_mistral_names, recognise_kind
from cluster.arch.draft.spec import DraftLayer, DraftSpec, Kind, ResolvedFact
from cluster.arch.draft.token_map import SETTING, read_token_map, vocabulary_map_doubts
from cluster.arch.families.wrapped import text_keys
from cluster.arch.keys import ConfigKeys, Shapes, read_json
from cluster.arch.target import TargetArch
from cluster.config import ConfigError

__all__ = ["DraftLayer", "DraftSpec", "Kind", "ResolvedFact", "aux_boundaries", "read_draft"]

READERS: dict[Kind, Callable[[str, ConfigKeys, Shapes, TargetArch, FactResolver], DraftSpec]] = {
    "eagle1": read_eagle1,
    "eagle3": read_eagle3,
    "mistral": read_mistral,
    "mtp": read_mtp,
    "frozen_kv": read_gemma4_assistant,
}


def read_draft(
    folder: str,
    shapes: Shapes,
    target: TargetArch,
    overrides: Mapping[str, Any] | None = None,
    token_map: str | None = None,
) -> DraftSpec:
    """Return the draft in `folder` for `target`. Tensor names and shapes decide first, the config second; both must
    agree.

    `shapes` has normalised names (`layers.0.*`, `fc_norm.i`, no `model.` prefix). `overrides` is the setting
    `speculative_draft_overrides`, which decides conventions that tensors cannot show. `token_map` is the file of the
    setting `speculative_token_map`, or None.

    Raises:
        ConfigError: config and tensors disagree, the draft does not fit the target, the draft's format is not served,
            an override is of no fact that the draft leaves open, or `token_map` cannot be used. The message gives both
            numbers that differ, or names the format.
    """
    file = "params.json" if has_mistral_names(shapes) else "config.json"
    keys = text_keys(ConfigKeys(read_json(folder, file), folder, file))
    facts = FactResolver(overrides or {})
    spec = READERS[recognise_kind(folder, keys.data, shapes)](folder, keys, shapes, target, facts)
    if facts.unused_overrides:
        open_facts = [choice.fact for choice in facts.choices]
        raise ConfigError(
            f"{OVERRIDES_SETTING} has {facts.unused_overrides}, but the only facts that draft {folder!r} "
            f"({spec.dialect}) leaves open are {open_facts}; leave out the others"
        )
    if spec.vocab_map:
        facts.doubts += vocabulary_map_doubts(folder, shapes, spec.draft_vocab_size, target.vocab_size)
    spec = replace(spec, choices=tuple(facts.choices), doubts=tuple(facts.doubts))
    if token_map is None:
        return spec
    if spec.head != "target" or spec.vocab_map:
        own_part = "a vocabulary map, d2t," if spec.vocab_map else "a head"
        raise ConfigError(
            f"{SETTING} picks rows of the target's head, but draft {folder!r} has {own_part} of its own; leave it out"
        )
    ids = read_token_map(token_map, target.vocab_size)
    return replace(spec, token_map=ids, draft_vocab_size=len(ids))
