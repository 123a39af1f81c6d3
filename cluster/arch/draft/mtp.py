"""MTP layers inside a target's checkpoint: DeepSeek and GLM NextN, Step-3.5, MiMo, MiMo-V2, Qwen3-Next.

A layer is: x = fc([norm(embed) | norm(hidden)]) (MiMo: hidden first), then one full decoder layer, a norm, and a head.
If a checkpoint has several MTP layers, each is a model of its own that drafts one level of the tree (SGLang #22954).
Sources: the DeepSeek-V3 report (arXiv 2412.19437, 2.2), vLLM's and SGLang's loaders.
"""

import re
from dataclasses import dataclass, replace
from typing import Literal

from cluster.arch.draft.facts import FactResolver
from cluster.arch.draft.spec import DraftLayer, DraftSpec
from cluster.arch.draft.widths import check_same_target, check_same_width, draft_geometry, is_latent, latent_geometry
from cluster.arch.families.deepseek import NAMES as DEEPSEEK_NAMES
from cluster.arch.families.glm import glm4_moe
from cluster.arch.families.mimo import SINK_NAMES, mimo_v2_layers
from cluster.arch.families.qwen import NEXT_DEFAULTS, NEXT_NAMES, read_qwen3_next_moe
from cluster.arch.families.step import NAMES as STEP_NAMES
from cluster.arch.families.step import step3p5_layer
from cluster.arch.families.wrapped import NON_TEXT_TENSORS
from cluster.arch.keys import ConfigKeys, Shapes, dtype_of
from cluster.arch.layer import LayerGeometry
from cluster.arch.target import TargetArch
from cluster.config import ConfigError


@dataclass(frozen=True, slots=True)
class MtpFormat:
    """A producer's names for the tensors of an MTP layer, and the producer's conventions, which `DraftSpec` explains.

    `layer_prefix` precedes the names of the tensors in the decoder layer, and `prefix` precedes all other names. Both
    may contain {index}, the layer's number. `head` is None if the format has no head of its own. `target_hidden`: the
    hidden state of the target that the layer reads, before or after the target's final norm (SGLang's classes of these
    targets return both). `tensor_name_rules` rename parts of the decoder layer.
    """

    dialect: str
    prefix: str
    layer_prefix: str
    fc: str
    embed_norm: str
    hidden_norm: str
    norm: str
    head: str | None
    concat_order: Literal["embed_first", "hidden_first"] = "embed_first"
    zero_first: bool = True
    unit_offset: bool = False
    chained: bool = False
    recurrent: Literal["pre", "post"] = "post"
    target_hidden: Literal["pre", "post"] = "post"
    tensor_name_rules: tuple[tuple[str, str], ...] = DEEPSEEK_NAMES


NEXTN = MtpFormat(
    "deepseek-nextn",
    "layers.{index}.",
    "layers.{index}.",
    "eh_proj.",
    "enorm.",
    "hnorm.",
    "shared_head.norm.",
    "shared_head.head.",
)
STEP = replace(
    NEXTN,
    dialect="step-3.5",
    layer_prefix="layers.{index}.transformer.",
    head="shared_head.output.",
    unit_offset=True,
    chained=True,
    recurrent="pre",
    target_hidden="pre",
    zero_first=False,
    tensor_name_rules=STEP_NAMES,
)
MIMO = MtpFormat(
    "mimo",
    "mtp_layers.{index}.",
    "mtp_layers.{index}.",
    "input_proj.",
    "token_layernorm.",
    "hidden_layernorm.",
    "final_layernorm.",
    None,
    concat_order="hidden_first",
)
MIMO_V2 = MtpFormat(
    "mimo-v2",
    "mtp.layers.{index}.",
    "mtp.layers.{index}.",
    "eh_proj.",
    "enorm.",
    "hnorm.",
    "final_layernorm.",
    None,
    target_hidden="pre",
    zero_first=False,
    tensor_name_rules=(*SINK_NAMES, (r"\.post_attention_layernorm\.", ".pre_mlp_layernorm.")),
)
QWEN = MtpFormat(
    "qwen3-next",
    "mtp.",
    "mtp.layers.{index}.",
    "fc.",
    "pre_fc_norm_embedding.",
    "pre_fc_norm_hidden.",
    "norm.",
    None,
    zero_first=False,
    unit_offset=True,
    tensor_name_rules=NEXT_NAMES,
)


def recognise_mtp_format(shapes: Shapes) -> tuple[MtpFormat, list[int]]:
    """Return the producer's format, and the numbers of the MTP layers."""
    mimo_layers = {int(match[1]) for n in shapes if (match := re.match(r"mtp_layers\.(\d+)\.", n))}
    if mimo_layers:
        return MIMO, sorted(mimo_layers)
    if any(name.startswith("mtp.") for name in shapes):
        is_mimo_v2 = any(re.match(r"mtp\.layers\.\d+\.eh_proj\.", name) for name in shapes)
        numbers = {int(match[1]) for n in shapes if (match := re.match(r"mtp\.layers\.(\d+)\.", n))}
        return MIMO_V2 if is_mimo_v2 else QWEN, sorted(numbers)
    layer_numbers = sorted(
        {int(match[1]) for n in shapes if (match := re.match(r"layers\.(\d+)\.(eh_proj|shared_head|[eh]norm)\.", n))}
    )
    return _step_format(shapes) or NEXTN, layer_numbers


def _step_format(shapes: Shapes) -> MtpFormat | None:
    """Return the format of Step-3.5's layers, or None if these are not such layers. In the published checkpoints only
    the head and its norm are under `transformer`; our training writes the decoder layer there. Some tools rename the
    head to DeepSeek's `shared_head.head`; then only the gate of the attention's output (`g_proj`) tells the format.
    """

    def has_any(pattern: str) -> bool:
        return any(re.match(rf"layers\.\d+\.{pattern}", name) for name in shapes)

    is_layer_nested = has_any(r"transformer\.(?!shared_head\.)")
    if not (is_layer_nested or has_any(r"(transformer\.)?shared_head\.output\.") or has_any(r"self_attn\.g_proj\.")):
        return None
    head = "transformer.shared_head." if has_any(r"transformer\.shared_head\.") else "shared_head."
    layer_prefix = STEP.layer_prefix if is_layer_nested else STEP.prefix
    part = "head" if has_any(r"(transformer\.)?shared_head\.head\.") else "output"
    return replace(STEP, layer_prefix=layer_prefix, norm=f"{head}norm.", head=f"{head}{part}.")


def read_mtp(folder: str, keys: ConfigKeys, shapes: Shapes, target: TargetArch, facts: FactResolver) -> DraftSpec:
    """Return the MTP draft of this config and these shapes; the target's tensors in the same checkpoint are ignored.

    Raises:
        ConfigError: config and shapes disagree or do not fit the target; the message gives both numbers.
    """
    check_same_target(folder, keys, target)
    mtp_format, layer_numbers = recognise_mtp_format(shapes)
    if mtp_format is QWEN and layer_numbers != [0]:
        raise ConfigError(f"draft {folder!r}: 'mtp.layers' are {layer_numbers}, but only one layer, 0, is served")
    if layer_numbers != list(range(layer_numbers[0], layer_numbers[0] + len(layer_numbers))):
        raise ConfigError(f"draft {folder!r}: its MTP layers are {layer_numbers}, which must be consecutive")
    configured_count = keys.data.get("num_nextn_predict_layers")
    if configured_count is not None and configured_count != len(layer_numbers):
        raise ConfigError(
            f"draft {folder!r}: num_nextn_predict_layers is {configured_count} but it holds MTP layers {layer_numbers}"
        )
    geometry, *others = (_layer_geometry(folder, keys, shapes, mtp_format, number) for number in layer_numbers)
    for number, other in zip(layer_numbers[1:], others, strict=True):
        if other != geometry:
            raise ConfigError(
                f"draft {folder!r}: MTP layers {layer_numbers[0]} and {number} differ, which is not served: their "
                "attention, experts and limits must be equal"
            )
    if mtp_format.unit_offset:
        geometry = replace(geometry, unit_offset=True)
    check_same_width(folder, geometry.hidden, target)
    prefix = mtp_format.prefix.format(index=layer_numbers[0])
    has_own_embed = f"{prefix}embed_tokens.weight" in shapes
    names = (
        (r"^fc\.", mtp_format.prefix + mtp_format.fc),
        (r"^embed_norm\.", mtp_format.prefix + mtp_format.embed_norm),
        (r"^hidden_norm\.", mtp_format.prefix + mtp_format.hidden_norm),
        (r"^norm\.", mtp_format.prefix + mtp_format.norm),
        (r"^lm_head\.", mtp_format.prefix + (mtp_format.head or "lm_head.")),
        (r"^embed_tokens\.", mtp_format.prefix + "embed_tokens."),
        (r"^layers\.0\.", mtp_format.layer_prefix),
        *mtp_format.tensor_name_rules,
    )
    copy_patterns = [
        rf"^layers\.\d+\.{name}\.weight$" for name in ("shared_head\\.head", "embed_tokens") if not mtp_format.chained
    ]
    target_hidden = _target_hidden(keys, mtp_format, facts)
    return DraftSpec(
        kind="mtp",
        dialect=mtp_format.dialect,
        layers=(DraftLayer(geometry, pair=False, hidden_norm="input_layernorm"),),
        target_hidden=target.hidden,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        dtype=dtype_of(keys.data),
        input_source="final_postnorm" if target_hidden == "post" else "aux",
        aux_boundaries=() if target_hidden == "post" else (target.num_layers,),
        concat_order=mtp_format.concat_order,
        pair_norms=True,
        recurrent=facts.choose("recurrent", mtp_format.recurrent, f"format {mtp_format.dialect}"),
        embed="own" if has_own_embed and mtp_format.chained else "target",
        head="own" if mtp_format.chained else "target",
        zero_first=mtp_format.zero_first,
        runners=len(layer_numbers),
        first_index=layer_numbers[0],
        chained=mtp_format.chained,
        tensor_name_rules=names,
        ignored_patterns=(*copy_patterns, *_target_patterns(mtp_format, layer_numbers)),
    )


def _target_hidden(keys: ConfigKeys, mtp_format: MtpFormat, facts: FactResolver) -> str:
    """Return which hidden state of the target the draft reads: before ("pre") or after ("post") the final norm. Drafts
    of `aerie train mtp` say so in their config.

    Raises:
        ConfigError: the config has another value.
    """
    configured = keys.data.get("target_hidden")
    if configured not in (None, "pre", "post"):
        raise keys.error(f"target_hidden must be pre or post, got {configured!r}")
    source = f"format {mtp_format.dialect}" if configured is None else "config"
    return str(facts.choose("target_hidden", configured or mtp_format.target_hidden, source))


def _layer_geometry(folder: str, keys: ConfigKeys, shapes: Shapes, mtp_format: MtpFormat, number: int) -> LayerGeometry:
    """Return the geometry of the decoder layer of MTP layer `number`. Its tensors decide between latent and
    grouped-query attention, and between a dense MLP and experts.

    Raises:
        ConfigError: the layer has experts that are not served in this format.
    """
    prefix = mtp_format.layer_prefix.format(index=number).rstrip(".")
    is_dense = any(f"{prefix}.mlp.{part}_proj.weight" in shapes for part in ("gate", "up", "down"))
    if mtp_format is MIMO_V2:  # its layers have a sliding window, and a dense MLP
        return mimo_v2_layers(keys)[1]
    if f"{prefix}.self_attn.g_proj.weight" in shapes:
        return step3p5_layer(keys, number, has_experts=not is_dense)
    if mtp_format is QWEN:
        full_keys = keys.with_defaults(NEXT_DEFAULTS)
        gated_layer = replace(draft_geometry(folder, full_keys, shapes, prefix, allow_partial_rotary=True), gated=True)
        return gated_layer if is_dense else replace(gated_layer, moe=read_qwen3_next_moe(keys))
    if is_latent(shapes, prefix):
        return latent_geometry(keys, is_dense)
    if is_dense:
        return draft_geometry(folder, keys, shapes, prefix)
    if mtp_format is not NEXTN:
        raise ConfigError(
            f"draft {folder!r}: {mtp_format.dialect} layers with experts are not served; its MLP is not dense"
        )
    single_layer_config = dict(keys.data) | {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    return glm4_moe(ConfigKeys(single_layer_config, folder, keys.file)).layer


def _target_patterns(mtp_format: MtpFormat, layer_numbers: list[int]) -> tuple[str, ...]:
    """Return patterns of the target's tensors in the same checkpoint."""
    patterns = [r"^embed_tokens\.", r"^lm_head\.", r"^norm\.", *NON_TEXT_TENSORS]
    own_numbers = "|".join(str(number) for number in layer_numbers)
    if mtp_format.prefix.startswith("layers."):
        return (*patterns, rf"^layers\.(?!({own_numbers})\.)\d+\.")
    return (*patterns, r"^layers\.\d+\.")
