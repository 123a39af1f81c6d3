"""EAGLE-3 in all its dialects: original and SpecForge (`midlayer`), ModelOpt, speculators, EAGLE-3.1, DeepSpec.

Sources: arXiv 2503.01840; SGLang #24663 (layer lists, per-aux norms, legacy `aux_norm_*`); speculators 0.9 (boundary
ids, nested geometry, `norm_before_residual`); ModelOpt's `eagle_config`; EAGLE-3.1 (`fc_norm`, `norm_output`).
"""

from cluster.arch.draft.facts import FactResolver, aux_boundaries
from cluster.arch.draft.spec import DraftLayer, DraftSpec, HiddenNorm
from cluster.arch.draft.widths import (
    check_same_target,
    check_same_width,
    confirm_flag,
    count_layers,
    draft_geometry,
    layers_with_windows,
    read_vocabulary,
    with_rope_layout,
)
from cluster.arch.keys import ConfigKeys, Shapes, dtype_of
from cluster.arch.layer import LayerGeometry
from cluster.arch.target import TargetArch
from cluster.config import ConfigError


def read_eagle3(folder: str, outer: ConfigKeys, shapes: Shapes, target: TargetArch, facts: FactResolver) -> DraftSpec:
    """Return the EAGLE-3 draft of this config and these shapes.

    Raises:
        ConfigError: config and shapes disagree, or do not fit the target; the message says what differs.
    """
    is_speculators = outer.data.get("speculators_model_type") is not None
    layer_config = outer.section("transformer_layer_config")
    keys = layer_config.with_defaults(outer.data) if is_speculators else outer
    eagle = outer.section("eagle_config")
    geometry = with_rope_layout(draft_geometry(folder, keys, shapes), facts, "neox", "Llama's half-split rope")
    use_aux = eagle.flag("use_aux_hidden_state", True)
    check_same_target(folder, keys, target)
    boundaries: tuple[int, ...] = ()
    if use_aux:
        boundaries = aux_boundaries(keys.data, target.num_layers, folder, facts, is_speculators)
    hidden = geometry.hidden
    _check_fc(folder, shapes, use_aux, hidden, boundaries, target)
    norm_key, merged = (
        "use_aux_norm" if keys.data.get("fc_norm") is None else "fc_norm",
        keys.with_defaults(eagle.data),
    )
    norm_before_fc = confirm_flag(folder, merged, "norm_before_fc", "input_norm.weight", "input_norm.weight" in shapes)
    has_fc_norm = any(name.startswith("fc_norm.") for name in shapes)
    confirm_flag(folder, merged, norm_key, "fc_norm.0.weight", has_fc_norm)
    vocabulary = read_vocabulary(folder, keys, shapes, target, hidden)
    convention = "speculators' class default (vLLM assumes true)" if is_speculators else "EAGLE-3's un-normed residual"
    norm_before_residual = facts.flag("norm_before_residual", keys, False, convention)
    norm_output = keys.flag("norm_output")
    is_set = keys.data.get("norm_output") is not None
    recurrent = facts.choose("recurrent", "post" if norm_output else "pre", "config" if is_set else "EAGLE-3: pre-norm")
    final_norm = "norm.weight" in shapes or eagle.flag("use_last_layernorm", True)
    if "norm.weight" in shapes and not eagle.flag("use_last_layernorm", True):
        raise ConfigError(f"draft {folder!r}: eagle_config.use_last_layernorm is false but 'norm.weight' is there")
    num_layers = count_layers(folder, keys, shapes)
    geometries = layers_with_windows(keys, geometry, num_layers, facts)
    # ModelOpt's drafts have this norm even if they read no aux hidden states.
    has_hidden_norm = use_aux or "layers.0.hidden_norm.weight" in shapes
    layers = [DraftLayer(geometries[0], pair=True, hidden_norm="hidden_norm" if has_hidden_norm else "none")]
    layers += [read_later_layer(geometries[i], shapes, f"layers.{i}", hidden) for i in range(1, num_layers)]
    unused = [rf"^layers\.{i}\.input_layernorm\.weight$" for i, layer in enumerate(layers) if _is_sglang_layer(layer)]
    unused += [] if use_aux else [r"^fc\.weight$"]
    return DraftSpec(
        kind="eagle3",
        dialect=_dialect(outer, shapes, is_speculators, recurrent == "post" or has_fc_norm),
        layers=tuple(layers),
        target_hidden=target.hidden,
        vocab_size=target.vocab_size,
        draft_vocab_size=vocabulary.size,
        dtype=dtype_of(keys.data),
        input_source="aux" if use_aux else "final_postnorm",
        aux_boundaries=boundaries if use_aux else (),
        norm_before_fc=norm_before_fc,
        fc_norm=has_fc_norm,
        fc=use_aux,
        norm_before_residual=norm_before_residual,
        final_norm=final_norm,
        recurrent=recurrent,
        embed=vocabulary.embed,
        head=vocabulary.head,
        vocab_map=vocabulary.has_d2t,
        ignored_patterns=tuple(unused),
    )


def read_later_layer(geometry: LayerGeometry, shapes: Shapes, prefix: str, hidden: int) -> DraftLayer:
    """Return a layer after the first. Its kind follows from its tensors (H is `hidden`):

    - If q_proj has 2 H inputs, the layer reads the embedding again (DeepSpec).
    - If q_proj has H inputs, and there is a `hidden_norm`, this is the norm before attention (SGLang).
    - Otherwise it is an ordinary layer (ModelOpt, speculators, vLLM).
    """
    name = "q_proj" if geometry.latent is None else "q_a_proj"
    query = shapes.get(f"{prefix}.self_attn.{name}.weight", ())
    if len(query) == 2 and query[1] == 2 * hidden and query[1] != hidden:
        return DraftLayer(geometry, pair=True, hidden_norm="hidden_norm")
    norm: HiddenNorm = "hidden_norm" if f"{prefix}.hidden_norm.weight" in shapes else "input_layernorm"
    return DraftLayer(geometry, pair=False, hidden_norm=norm)


def _is_sglang_layer(layer: DraftLayer) -> bool:
    return not layer.pair and layer.hidden_norm == "hidden_norm"


def _check_fc(
    folder: str, shapes: Shapes, use_aux: bool, hidden: int, boundaries: tuple[int, ...], target: TargetArch
) -> None:
    if use_aux:
        expected_shape = (hidden, len(boundaries) * target.hidden)
        if "fc.weight" in shapes and shapes["fc.weight"] != expected_shape:
            raise ConfigError(
                f"draft {folder!r}: fc.weight is {list(shapes['fc.weight'])} but {len(boundaries)} aux hidden states "
                f"of {target.hidden} make it {list(expected_shape)}; correct num_aux_hidden_states or the layer ids"
            )
    else:
        check_same_width(folder, hidden, target)


def _dialect(outer: ConfigKeys, shapes: Shapes, is_speculators: bool, is_eagle31: bool) -> str:
    if is_speculators:
        return "speculators"
    if "target_layer_ids" in outer.data:
        return "deepspec"
    if is_eagle31:
        return "eagle-3.1"
    eagle_keys = outer.section("eagle_config").data
    if {"use_last_layernorm", "use_input_layernorm_in_first_layer", "use_mtp_layernorm"} & set(eagle_keys):
        return "modelopt"
    return "specforge" if eagle_keys else "original"
