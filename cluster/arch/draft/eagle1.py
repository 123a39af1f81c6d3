"""EAGLE-1 and EAGLE-2 (arXiv 2401.15077, 2406.16858). They have the same weights; only the tree differs.

A draft is: x = fc([embed | target's post-norm hidden]), then Llama layers (usually one; the first has no norm before
its attention), and no final norm. It uses the target's embedding and head unless it has its own. fc has a bias unless
the config says false in the key `eagle_fc_bias` or, if this key is missing, in the key `bias`. In a draft by FR-Spec,
`d2t` picks rows of the target's head.
"""

from cluster.arch.draft.facts import FactResolver
from cluster.arch.draft.spec import DraftLayer, DraftSpec
from cluster.arch.draft.widths import (
    check_same_target,
    check_same_width,
    count_layers,
    draft_geometry,
    read_vocabulary,
    record_window_doubt,
    with_rope_layout,
)
from cluster.arch.keys import ConfigKeys, Shapes, dtype_of
from cluster.arch.target import TargetArch
from cluster.config import ConfigError


def read_eagle1(folder: str, outer: ConfigKeys, shapes: Shapes, target: TargetArch, facts: FactResolver) -> DraftSpec:
    """Return the EAGLE-1/2 draft of this config and these shapes.

    Raises:
        ConfigError: config and shapes disagree, or the draft does not fit the target; the message says what disagrees.
    """
    keys = outer.section("model").with_defaults(outer.data)
    check_same_target(folder, keys, target)
    geometry = with_rope_layout(draft_geometry(folder, keys, shapes), facts, "neox", "Llama's half-split rope")
    check_same_width(folder, geometry.hidden, target)
    has_fc_bias = keys.flag("eagle_fc_bias", False) if "eagle_fc_bias" in keys.data else keys.flag("bias", True)
    if has_fc_bias != ("fc.bias" in shapes):
        presence = "is there" if "fc.bias" in shapes else "is missing"
        raise ConfigError(
            f"draft {folder!r}: config.json {'asks for' if has_fc_bias else 'denies'} a bias of fc (without the key "
            f"bias, fc has one) but tensor 'fc.bias' {presence}; correct bias in config.json"
        )
    if keys.data.get("sliding_window") is not None:
        remedy = "a draft that was trained with a window accepts less beyond it"
        record_window_doubt(facts, keys, None, "it is served with full attention, as EAGLE-1 and 2 have it", remedy)
    vocabulary = read_vocabulary(folder, keys, shapes, target, geometry.hidden, allow_d2t=True)
    num_layers = count_layers(folder, keys, shapes)
    return DraftSpec(
        kind="eagle1",
        dialect="eagle-1/2",
        layers=tuple(
            DraftLayer(geometry, pair=False, hidden_norm="none" if i == 0 else "input_layernorm")
            for i in range(num_layers)
        ),
        target_hidden=target.hidden,
        vocab_size=target.vocab_size,
        draft_vocab_size=vocabulary.size,
        dtype=dtype_of(keys.data),
        input_source="final_postnorm",
        fc_bias=has_fc_bias,
        final_norm=False,
        recurrent=facts.choose("recurrent", "pre", "EAGLE-1: the raw output"),
        embed=vocabulary.embed,
        head=vocabulary.head,
        vocab_map=vocabulary.has_d2t,
    )
