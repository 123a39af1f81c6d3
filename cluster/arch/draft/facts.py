"""Facts: conventions of a draft that its tensors cannot show, such as how ids of aux layers are counted.

Each fact comes from an override, the config, or the convention of the checkpoint's format (speculators, SpecForge,
ModelOpt, SGLang or vLLM). In one case, reading aux layers with an offset of one lowered the acceptance of the first
draft token from 45% to 10% (vLLM #43671).
"""

from collections.abc import Mapping
from typing import Any

from cluster.arch.draft.spec import ResolvedFact
from cluster.arch.keys import ConfigKeys

AUX_IDS_KEY = "eagle_aux_hidden_state_layer_ids"
OVERRIDES_SETTING = "speculative_draft_overrides"


class FactResolver:
    """Resolves facts and records the source of each value."""

    def __init__(self, overrides: Mapping[str, Any]) -> None:
        self._overrides = overrides
        self.choices: list[ResolvedFact] = []
        self.doubts: list[str] = []
        """Sentences that say what is odd in the draft. None of them names its folder. Such a draft is served."""

    def choose(self, fact: str, value: Any, source: str) -> Any:
        """Return the override of `fact` or, without an override, `value`, which comes from `source`. Record the
        choice.
        """
        if fact in self._overrides:
            value, source = self._overrides[fact], OVERRIDES_SETTING
        self.choices.append(ResolvedFact(fact, value, source))
        return value

    @property
    def unused_overrides(self) -> list[str]:
        """The overridden facts that nothing has asked for."""
        return sorted(self._overrides.keys() - {choice.fact for choice in self.choices})

    def flag(self, fact: str, keys: ConfigKeys, default: bool, convention: str) -> bool:
        """Return a Boolean fact: its override or, without one, the config's key of the same name or, if that key is
        missing, `default` with the source `convention`.
        """
        is_configured = keys.data.get(fact) is not None
        return bool(self.choose(fact, keys.flag(fact, default), "config" if is_configured else convention))


def aux_boundaries(
    data: Mapping[str, Any],
    target_layers: int,
    folder: str,
    facts: FactResolver | None = None,
    is_speculators: bool = False,
) -> tuple[int, ...]:
    """Return the boundaries that the draft reads; boundary j is the residual stream that enters target layer j.

    Ids come from the first of these that exists; `num_aux_hidden_states` must be the number of ids:

    1. `eagle_config.eagle_aux_hidden_state_layer_ids`.
    2. The top-level list `eagle_aux_hidden_state_layer_ids`.
    3. DeepSpec's `target_layer_ids`.
    4. EAGLE-3's default boundaries (2, L // 2, L - 3), for a target of L layers.

    An id is either a boundary, or the number of a layer whose *output* is read; this output is boundary id + 1. Ids of
    a top-level list and of speculators are boundaries. Ids of `eagle_config` and `target_layer_ids` are layer numbers,
    with two exceptions that are boundaries: a list that contains L, which is no layer's number (gpt-oss v3: SGLang
    #32334), and EAGLE-3's default boundaries (Kimi: SGLang #25454). A list of the default boundaries minus one has
    layer numbers in every format, because conversions to speculators copy it from SpecForge's `eagle_config`. The
    override `aux_numbering` replaces the result of these rules.

    Raises:
        ConfigError: `num_aux_hidden_states` is not the number of ids, or the boundaries do not ascend within 0 to L.
    """
    keys, facts = ConfigKeys(data, folder), facts or FactResolver({})
    nested_ids = keys.section("eagle_config").integers(AUX_IDS_KEY)
    top_level_ids, deepspec_ids = keys.integers(AUX_IDS_KEY), keys.integers("target_layer_ids")
    default = [2, target_layers // 2, target_layers - 3]
    if nested_ids is not None:
        ids, numbering, source = nested_ids, "outputs", f"convention of eagle_config.{AUX_IDS_KEY}"
    elif top_level_ids is not None:
        ids, numbering, source = top_level_ids, "boundaries", f"convention of a top-level {AUX_IDS_KEY}"
    elif deepspec_ids is not None:
        ids, numbering, source = deepspec_ids, "outputs", "convention of target_layer_ids"
    else:
        ids, numbering, source = default, "boundaries", "EAGLE-3's default layers"
    if is_speculators:
        numbering, source = "boundaries", "format speculators"
    elif numbering == "outputs" and target_layers in ids:
        numbering, source = "boundaries", f"no layer has the number {target_layers}"
    elif numbering == "outputs" and ids == default:
        numbering, source = "boundaries", "the ids are EAGLE-3's default boundaries"
    if numbering == "boundaries" and ids == [i - 1 for i in default]:
        numbering, source = "outputs", "the ids are EAGLE-3's default boundaries less one"
    if facts.choose("aux_numbering", numbering, source) == "outputs":
        ids = [i + 1 for i in ids]
    configured_count = data.get("num_aux_hidden_states")
    if configured_count is not None and configured_count != len(ids):
        if nested_ids is top_level_ids is deepspec_ids is None:
            raise keys.error(
                f"num_aux_hidden_states is {configured_count} and no aux layers are named; only for 3 is there a "
                "convention which layers these are (2, L // 2 and L - 3 of L layers, in SGLang and vLLM): list them in "
                f"eagle_config.{AUX_IDS_KEY}"
            )
        raise keys.error(
            f"num_aux_hidden_states is {configured_count} but {len(ids)} aux layers are named; list them in "
            f"eagle_config.{AUX_IDS_KEY}"
        )
    if not ids or sorted(set(ids)) != ids or ids[0] < 0 or ids[-1] > target_layers:
        raise keys.error(
            f"{AUX_IDS_KEY} give boundaries {ids}, which must ascend within the target's 0 to "
            f"{target_layers}; set {OVERRIDES_SETTING}: {{aux_numbering: outputs or boundaries}} to say how ids are "
            "numbered"
        )
    return tuple(ids)
