"""The one frozen `DraftSpec` of a draft: every width and layer number that speculation needs, resolved once, from the
config and the tensors' shapes together; nobody else reads those keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.arch.keys import Keys, Shapes, dtype_of, family_of, read_json
from cluster.arch.layer import LayerGeometry, geometry_of
from cluster.arch.rope import Rope, rope_of
from cluster.arch.target import TargetArch
from cluster.config import ConfigError

DRAFT_FAMILIES = ("LlamaForCausalLMEagle3",)


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """An EAGLE-3 draft, resolved.

    `aux_boundaries[j]` is the residual stream *entering* target layer j (so `num_layers` means before the final norm);
    `fc_in` is the width of the target hidden that the draft takes at extend, `hidden` its own recurrent width.
    """

    family: str
    num_layers: int
    layer: LayerGeometry
    rope: Rope
    target_hidden: int
    aux_boundaries: tuple[int, ...]
    use_aux_hidden_state: bool
    draft_vocab_size: int
    vocab_size: int
    norm_output: bool
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    own_embed: bool
    own_head: bool
    dtype: str

    @property
    def num_aux(self) -> int:
        """How many aux hidden states are concatenated, low to high."""
        return len(self.aux_boundaries)

    @property
    def hidden(self) -> int:
        """The draft's recurrent width H."""
        return self.layer.hidden

    @property
    def fc_in(self) -> int:
        """A: width of the target's hidden at extend, `num_aux * target_hidden` when aux hidden states are used."""
        return self.num_aux * self.target_hidden if self.use_aux_hidden_state else self.target_hidden


def aux_boundaries(keys: Mapping[str, Any], target_layers: int, where: str) -> tuple[int, ...]:
    """Which residual-stream boundaries the draft reads (draft-checkpoints appendix A3).

    The count: `num_aux_hidden_states`, then the length of `eagle_config.eagle_aux_hidden_state_layer_ids`, then of the
    top-level list, then 3. Ids in `eagle_config` number the layer whose *output* is read, so boundary id + 1; a
    top-level list (speculators) numbers boundaries. Without ids and with 3: (2, L // 2, L - 3), EAGLE-3's own choice.
    """
    top_level = Keys(keys, where)
    outputs = top_level.section("eagle_config").numbers("eagle_aux_hidden_state_layer_ids")
    top = top_level.numbers("eagle_aux_hidden_state_layer_ids")
    if outputs is not None:
        ids = [i + 1 for i in outputs]
    elif top is not None:
        ids = top
    else:
        ids = [2, target_layers // 2, target_layers - 3]
    count = keys.get("num_aux_hidden_states")
    if count is not None and count != len(ids):
        raise ConfigError(
            f"config.json of {where!r}: num_aux_hidden_states is {count} but {len(ids)} aux layers are named; "
            "list them in eagle_config.eagle_aux_hidden_state_layer_ids"
        )
    if not ids or sorted(set(ids)) != ids or ids[0] < 0 or ids[-1] > target_layers:
        raise ConfigError(
            f"config.json of {where!r}: eagle_aux_hidden_state_layer_ids give boundaries {ids}, which must ascend "
            f"within the target's 0 to {target_layers}"
        )
    return tuple(ids)


def read_draft(folder: str, shapes: Shapes, target: TargetArch) -> DraftSpec:
    """The EAGLE-3 draft in `folder`, from config.json and its tensors' shapes, checked against each other and `target`.

    `shapes` carries normalised names (`layers.0.*`, `fc_norm.i`, no `model.` prefix).

    Raises:
        ConfigError: config and tensors disagree, or the draft does not fit the target; the message gives both numbers.
    """
    keys = Keys(read_json(folder, "config.json"), folder)
    family = family_of(keys, DRAFT_FAMILIES, "draft")
    geometry = geometry_of(keys)
    use_aux = keys.section("eagle_config").flag("use_aux_hidden_state", True)
    target_hidden = keys.integer("target_hidden_size", target.hidden)
    if target_hidden != target.hidden:
        raise ConfigError(
            f"draft {folder!r} does not fit the target: target_hidden_size {target_hidden} against {target.hidden}"
        )
    if keys.integer("vocab_size") != target.vocab_size:
        raise ConfigError(
            f"draft {folder!r} does not fit the target: vocab_size {keys.data['vocab_size']} against "
            f"{target.vocab_size}"
        )
    boundaries = aux_boundaries(keys.data, target.num_layers, folder) if use_aux else (target.num_layers,)
    spec = DraftSpec(
        family=family,
        num_layers=keys.integer("num_hidden_layers", 1),
        layer=geometry,
        rope=rope_of(keys),
        target_hidden=target_hidden,
        aux_boundaries=boundaries,
        use_aux_hidden_state=use_aux,
        draft_vocab_size=keys.integer("draft_vocab_size", target.vocab_size),
        vocab_size=target.vocab_size,
        norm_output=keys.flag("norm_output"),
        norm_before_residual=keys.flag("norm_before_residual"),
        norm_before_fc="input_norm.weight" in shapes,
        fc_norm="fc_norm.0.weight" in shapes,
        own_embed="embed_tokens.weight" in shapes,
        own_head="lm_head.weight" in shapes,
        dtype=dtype_of(keys.data),
    )
    if use_aux and "fc.weight" in shapes and shapes["fc.weight"] != (spec.hidden, spec.fc_in):
        raise ConfigError(
            f"draft {folder!r}: fc.weight is {list(shapes['fc.weight'])} but {spec.num_aux} aux hidden states of "
            f"{target_hidden} make it [{spec.hidden}, {spec.fc_in}]; correct num_aux_hidden_states or the layer ids"
        )
    if not use_aux and spec.hidden != target.hidden:
        raise ConfigError(
            f"draft {folder!r}: use_aux_hidden_state is false, so it takes the target's hidden of {target.hidden} as "
            f"it is, but its hidden_size is {spec.hidden}"
        )
    if not spec.own_embed and spec.hidden != target.hidden:
        raise ConfigError(
            f"draft {folder!r}: hidden_size {spec.hidden} differs from the target's {target.hidden}, so it cannot "
            "share the target's embedding; the draft's checkpoint must hold embed_tokens.weight"
        )
    if not spec.own_head and (spec.draft_vocab_size != target.vocab_size or spec.hidden != target.hidden):
        raise ConfigError(
            f"draft {folder!r}: without lm_head.weight it shares the target's head, which needs draft_vocab_size "
            f"{target.vocab_size} and hidden_size {target.hidden}"
        )
    return spec
