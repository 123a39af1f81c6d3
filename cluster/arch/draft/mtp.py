"""MTP layers inside a target's checkpoint: DeepSeek and GLM NextN, Step-3.5, MiMo, Qwen3-Next.

A layer is: x = fc([norm(embed) | norm(hidden)]) (MiMo: hidden first), then one full decoder layer, a norm, and a head.
Several MTP layers form a draft runner list (SGLang #22954). Sources: the DeepSeek-V3 report (arXiv 2412.19437, 2.2),
vLLM's and SGLang's loaders.
"""

import re
from dataclasses import dataclass, replace
from typing import Literal

from cluster.arch.draft.facts import FactResolver
from cluster.arch.draft.spec import DraftLayer, DraftSpec
from cluster.arch.draft.widths import draft_geometry, is_latent, latent_geometry, same_target, same_width
from cluster.arch.families.deepseek import NAMES as DEEPSEEK_NAMES
from cluster.arch.families.glm import glm4_moe
from cluster.arch.families.qwen import NEXT_DEFAULTS, NEXT_NAMES, qwen3_next_experts
from cluster.arch.keys import ConfigKeys, Shapes, dtype_of
from cluster.arch.layer import LayerGeometry
from cluster.arch.target import TargetArch
from cluster.config import ConfigError


@dataclass(frozen=True, slots=True)
class MtpFormat:
    """A producer's names for the tensors of an MTP layer, and its conventions, which `DraftSpec` explains.

    `prefix` precedes all names, with the layer's number as {index}; `inner` also precedes the names of the decoder
    layer. `joined` is the name of fc. `names` rename parts of the decoder layer.
    """

    dialect: str
    prefix: str
    inner: str
    joined: str
    embed_norm: str
    hidden_norm: str
    norm: str
    head: str | None
    order: Literal["embed_first", "hidden_first"] = "embed_first"
    zero_first: bool = True
    unit_offset: bool = False
    chained: bool = False
    recurrent: Literal["pre", "post"] = "post"
    names: tuple[tuple[str, str], ...] = DEEPSEEK_NAMES


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
    inner="layers.{index}.transformer.",
    head="shared_head.output.",
    unit_offset=True,
    chained=True,
    recurrent="pre",
    zero_first=False,
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
    order="hidden_first",
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
    names=NEXT_NAMES,
)


def format_of(shapes: Shapes) -> tuple[MtpFormat, list[int]]:
    """Return the producer's format, and the numbers of the MTP layers."""
    mimo = {int(m[1]) for n in shapes if (m := re.match(r"mtp_layers\.(\d+)\.", n))}
    if mimo:
        return MIMO, sorted(mimo)
    if any(name.startswith("mtp.") for name in shapes):
        return QWEN, sorted({int(m[1]) for n in shapes if (m := re.match(r"mtp\.layers\.(\d+)\.", n))})
    numbers = sorted(
        {int(m[1]) for n in shapes if (m := re.match(r"layers\.(\d+)\.(eh_proj|shared_head|[eh]norm)\.", n))}
    )
    step = any(re.match(r"layers\.\d+\.(transformer|shared_head\.output)\.", n) for n in shapes)
    return (STEP if step else NEXTN), numbers


def read_mtp(folder: str, keys: ConfigKeys, shapes: Shapes, target: TargetArch, facts: FactResolver) -> DraftSpec:
    """Return the MTP draft of this config and these shapes; the target's tensors in the same checkpoint are ignored.

    Raises:
        ConfigError: config and shapes disagree or do not fit the target; the message gives both numbers.
    """
    same_target(folder, keys, target)
    form, numbers = format_of(shapes)
    if form is QWEN and numbers != [0]:
        raise ConfigError(f"draft {folder!r}: 'mtp.layers' are {numbers}, but only one layer, 0, is served")
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        raise ConfigError(f"draft {folder!r}: its MTP layers are {numbers}, which must be consecutive")
    given = keys.data.get("num_nextn_predict_layers")
    if given is not None and given != len(numbers):
        raise ConfigError(f"draft {folder!r}: num_nextn_predict_layers is {given} but it holds MTP layers {numbers}")
    geometry = _geometry(folder, keys, shapes, form, form.inner.format(index=numbers[0]).rstrip("."))
    if form.unit_offset:
        geometry = replace(geometry, unit_offset=True)
    same_width(folder, geometry.hidden, target)
    at = form.prefix.format(index=numbers[0])
    own_embed = f"{at}embed_tokens.weight" in shapes
    names = (
        (r"^fc\.", form.prefix + form.joined),
        (r"^embed_norm\.", form.prefix + form.embed_norm),
        (r"^hidden_norm\.", form.prefix + form.hidden_norm),
        (r"^norm\.", form.prefix + form.norm),
        (r"^lm_head\.", form.prefix + (form.head or "lm_head.")),
        (r"^embed_tokens\.", form.prefix + "embed_tokens."),
        (r"^layers\.0\.", form.inner),
        *form.names,
    )
    copies = [rf"^layers\.\d+\.{name}\.weight$" for name in ("shared_head\\.head", "embed_tokens") if not form.chained]
    return DraftSpec(
        kind="mtp",
        dialect=form.dialect,
        layers=(DraftLayer(geometry, pair=False, hidden_norm="input_layernorm"),),
        target_hidden=target.hidden,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        dtype=dtype_of(keys.data),
        input_source="final_postnorm",
        concat_order=form.order,
        pair_norms=True,
        recurrent=facts.choose("recurrent", form.recurrent, f"format {form.dialect}"),
        embed="own" if own_embed and form.chained else "target",
        head="own" if form.chained else "target",
        zero_first=form.zero_first,
        runners=len(numbers),
        first_index=numbers[0],
        chained=form.chained,
        names=names,
        ignored_patterns=(*copies, *_others(form, numbers)),
    )


def _geometry(folder: str, keys: ConfigKeys, shapes: Shapes, form: MtpFormat, prefix: str) -> LayerGeometry:
    """Return the decoder layer, with the target family's attention: latent as in DeepSeek, or grouped heads."""
    dense = any(f"{prefix}.mlp.{part}_proj.weight" in shapes for part in ("gate", "up", "down"))
    if form is QWEN:
        given = keys.over(NEXT_DEFAULTS)
        gated = replace(draft_geometry(folder, given, shapes, prefix, partial=True), gated=True)
        return gated if dense else replace(gated, moe=qwen3_next_experts(keys))
    if is_latent(shapes, prefix):
        return latent_geometry(keys, dense)
    if dense:
        return draft_geometry(folder, keys, shapes, prefix)
    if form is not NEXTN:
        raise ConfigError(f"draft {folder!r}: {form.dialect} layers with experts are not served; its MLP is not dense")
    alone = dict(keys.data) | {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    return glm4_moe(ConfigKeys(alone, folder, keys.file)).layer


def _others(form: MtpFormat, numbers: list[int]) -> tuple[str, ...]:
    """Return patterns of the target's tensors in the same checkpoint."""
    of_target = [r"^embed_tokens\.", r"^lm_head\.", r"^norm\."]
    listed = "|".join(str(n) for n in numbers)
    if form.prefix.startswith("layers."):
        return (*of_target, rf"^layers\.(?!({listed})\.)\d+\.")
    return (*of_target, r"^layers\.\d+\.")
