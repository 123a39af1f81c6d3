"""EAGLE-3 in all its dialects: original and SpecForge (`midlayer`), ModelOpt, speculators, EAGLE-3.1, DeepSpec.

Sources: arXiv 2503.01840; SGLang #24663 (layer lists, per-aux norms, legacy `aux_norm_*`); speculators 0.9 (boundary
ids, nested geometry, `norm_before_residual`); ModelOpt's `eagle_config`; EAGLE-3.1 (`fc_norm`, `norm_output`).
"""

from cluster.arch.draft.facts import FactResolver, aux_boundaries
from cluster.arch.draft.spec import DraftLayer, DraftSpec, HiddenNorm
from cluster.arch.draft.widths import (
    confirmed,
    draft_geometry,
    layer_count,
    rope_layout,
    same_target,
    same_width,
    vocabulary_of,
    windows_of,
)
from cluster.arch.keys import ConfigKeys, Shapes, dtype_of
from cluster.arch.layer import LayerGeometry
from cluster.arch.target import TargetArch
from cluster.config import ConfigError


def read_eagle3(folder: str, outer: ConfigKeys, shapes: Shapes, target: TargetArch, facts: FactResolver) -> DraftSpec:
    """Return the EAGLE-3 draft of this config and these shapes.

    Raises:
        ConfigError: config and shapes disagree or do not fit the target; the message gives both numbers.
    """
    speculators = outer.data.get("speculators_model_type") is not None
    nested = outer.section("transformer_layer_config")
    keys = nested.over(outer.data) if speculators else outer
    eagle = outer.section("eagle_config")
    geometry = rope_layout(draft_geometry(folder, keys, shapes), facts, "neox", "Llama's half-split rope")
    use_aux = eagle.flag("use_aux_hidden_state", True)
    same_target(folder, keys, target)
    boundaries: tuple[int, ...] = ()
    if use_aux:
        boundaries = aux_boundaries(keys.data, target.num_layers, folder, facts, speculators)
    h = geometry.hidden
    _check_fc(folder, shapes, use_aux, h, boundaries, target)
    flag, both = "use_aux_norm" if keys.data.get("fc_norm") is None else "fc_norm", keys.over(eagle.data)
    concat = confirmed(folder, both, "norm_before_fc", "input_norm.weight", "input_norm.weight" in shapes)
    per_aux = any(name.startswith("fc_norm.") for name in shapes)
    confirmed(folder, both, flag, "fc_norm.0.weight", per_aux)
    vocabulary = vocabulary_of(folder, keys, shapes, target, h)
    convention = "speculators' class default (vLLM assumes true)" if speculators else "EAGLE-3's un-normed residual"
    before_residual = facts.flag("norm_before_residual", keys, False, convention)
    norm_output = keys.flag("norm_output")
    given = keys.data.get("norm_output") is not None
    recurrent = facts.choose("recurrent", "post" if norm_output else "pre", "config" if given else "EAGLE-3: pre-norm")
    final_norm = "norm.weight" in shapes or eagle.flag("use_last_layernorm", True)
    if "norm.weight" in shapes and not eagle.flag("use_last_layernorm", True):
        raise ConfigError(f"draft {folder!r}: eagle_config.use_last_layernorm is false but 'norm.weight' is there")
    count = layer_count(folder, keys, shapes)
    each = windows_of(keys, geometry, count, facts)
    # ModelOpt's drafts have this norm even without aux states
    normed = use_aux or "layers.0.hidden_norm.weight" in shapes
    layers = [DraftLayer(each[0], pair=True, hidden_norm="hidden_norm" if normed else "none")]
    layers += [later_layer(each[i], shapes, f"layers.{i}", h) for i in range(1, count)]
    unused = [rf"^layers\.{i}\.input_layernorm\.weight$" for i, layer in enumerate(layers) if _sglang(layer)]
    unused += [] if use_aux else [r"^fc\.weight$"]
    return DraftSpec(
        kind="eagle3",
        dialect=_dialect(outer, shapes, speculators, recurrent == "post" or per_aux),
        layers=tuple(layers),
        target_hidden=target.hidden,
        vocab_size=target.vocab_size,
        draft_vocab_size=vocabulary.size,
        dtype=dtype_of(keys.data),
        input_source="aux" if use_aux else "final_postnorm",
        aux_boundaries=boundaries if use_aux else (),
        norm_before_fc=concat,
        fc_norm=per_aux,
        fc=use_aux,
        norm_before_residual=before_residual,
        final_norm=final_norm,
        recurrent=recurrent,
        embed=vocabulary.embed,
        head=vocabulary.head,
        vocab_map=vocabulary.mapped,
        ignored_patterns=tuple(unused),
    )


def later_layer(geometry: LayerGeometry, shapes: Shapes, prefix: str, hidden: int) -> DraftLayer:
    """Return a layer after the first. Its kind follows from its tensors:

    - q_proj has 2 H inputs: the layer reads the embedding again (DeepSpec).
    - q_proj has H inputs, and there is a `hidden_norm`: `hidden_norm` is the norm before attention (SGLang).
    - neither: an ordinary layer (ModelOpt, speculators, vLLM).
    """
    name = "q_proj" if geometry.latent is None else "q_a_proj"
    query = shapes.get(f"{prefix}.self_attn.{name}.weight", ())
    if len(query) == 2 and query[1] == 2 * hidden and query[1] != hidden:
        return DraftLayer(geometry, pair=True, hidden_norm="hidden_norm")
    norm: HiddenNorm = "hidden_norm" if f"{prefix}.hidden_norm.weight" in shapes else "input_layernorm"
    return DraftLayer(geometry, pair=False, hidden_norm=norm)


def _sglang(layer: DraftLayer) -> bool:
    return not layer.pair and layer.hidden_norm == "hidden_norm"


def _check_fc(
    folder: str, shapes: Shapes, use_aux: bool, hidden: int, boundaries: tuple[int, ...], target: TargetArch
) -> None:
    if use_aux:
        made = (hidden, len(boundaries) * target.hidden)
        if "fc.weight" in shapes and shapes["fc.weight"] != made:
            raise ConfigError(
                f"draft {folder!r}: fc.weight is {list(shapes['fc.weight'])} but {len(boundaries)} aux hidden states "
                f"of {target.hidden} make it {list(made)}; correct num_aux_hidden_states or the layer ids"
            )
    else:
        same_width(folder, hidden, target)


def _dialect(outer: ConfigKeys, shapes: Shapes, speculators: bool, newer: bool) -> str:
    if speculators:
        return "speculators"
    if "target_layer_ids" in outer.data:
        return "deepspec"
    if newer:
        return "eagle-3.1"
    eagle = outer.section("eagle_config").data
    if {"use_last_layernorm", "use_input_layernorm_in_first_layer", "use_mtp_layernorm"} & set(eagle):
        return "modelopt"
    return "specforge" if eagle else "original"
