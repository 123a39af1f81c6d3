"""Gemma-4's assistant, `Gemma4AssistantForCausalLM`: a draft without a KV cache (SGLang: "frozen-KV MTP").

A forward is: x = pre_projection([target's scaled embedding | hidden]), then Gemma-4 layers without keys and values of
their own, and a norm. The head is the draft's own; `post_projection` gives the hidden that the next level reads. Each
layer reads the keys and values of the last layer of the target that has the same type and stores any. All levels of a
tree are at the position of the root, and see the committed tokens only.

Some checkpoints have clusters of tokens (`use_ordered_embeddings`), with which a head need not compute all logits. Here
the head computes all logits, so that the clusters are not needed.
"""

from dataclasses import replace

from cluster.arch.draft.facts import FactResolver
from cluster.arch.draft.spec import DraftLayer, DraftSpec
from cluster.arch.families.gemma4 import NAMES, gemma4_layers, last_with_own_kv
from cluster.arch.keys import ConfigKeys, Shapes, dtype_of
from cluster.arch.layer import LayerGeometry
from cluster.arch.target import TargetArch
from cluster.config import ConfigError

NO_BORROWING = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
CLUSTER_TENSORS = r"^masked_embedding\."


def read_gemma4_assistant(
    folder: str, keys: ConfigKeys, shapes: Shapes, target: TargetArch, _: FactResolver
) -> DraftSpec:
    """Return the assistant of this config and these shapes. It has no facts that its tensors cannot show.

    Raises:
        ConfigError: a value is wrong, or the draft does not fit the target; the message names what differs.
    """
    text = keys.section("text_config")
    width = keys.integer("backbone_hidden_size", 1536)
    if width != target.hidden:
        raise ConfigError(
            f"draft {folder!r} is for a target of width {width} (backbone_hidden_size), and this target has "
            f"{target.hidden}; give the assistant of this target"
        )
    vocab_size = text.integer("vocab_size", 262144)
    if vocab_size != target.vocab_size:
        raise ConfigError(f"draft {folder!r} has a vocabulary of {vocab_size} ids, and the target {target.vocab_size}")
    layers = gemma4_layers(text.with_data({**text.data, **NO_BORROWING}))
    has_own_head = "lm_head.weight" in shapes
    names = NAMES if has_own_head else ((r"^lm_head\.", "embed_tokens."), *NAMES)
    return DraftSpec(
        kind="frozen_kv",
        dialect="gemma4-assistant",
        layers=tuple(
            DraftLayer(_borrowing(folder, index, layer, target), pair=False, hidden_norm="input_layernorm")
            for index, layer in enumerate(layers)
        ),
        target_hidden=target.hidden,
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size,
        dtype=dtype_of(text.with_defaults(keys.data).data),
        input_source="final_postnorm",
        recurrent="post",
        embed_scale=target.embed_scale,
        head="own",
        tensor_name_rules=names,
        ignored_patterns=(CLUSTER_TENSORS, *((r"^embed_tokens\.",) if has_own_head else ())),
    )


def _borrowing(folder: str, index: int, layer: LayerGeometry, target: TargetArch) -> LayerGeometry:
    """Return `layer` of the draft, which borrows from the last layer of the target that has the same type and stores
    keys and values.

    Raises:
        ConfigError: there is none, or its keys and values have other sizes.
    """
    number = last_with_own_kv(target.layers, layer)
    if number is None:
        kind = "full_attention" if layer.sliding_window is None else "sliding_attention"
        raise ConfigError(
            f"draft {folder!r}: layer {index} has type {kind}, and no layer of the target has this type, whose keys "
            "and values it could read; give the assistant of this target"
        )
    lender = target.layers[number]
    if layer.cell != lender.cell or layer.sliding_window != lender.sliding_window:
        raise ConfigError(
            f"draft {folder!r}: layer {index} reads {_sizes(layer)}, and layer {number} of the target keeps "
            f"{_sizes(lender)}; give the assistant of this target"
        )
    # As in `transformers`, whose mask for the assistant includes both ends of the window.
    window = None if layer.sliding_window is None else layer.sliding_window + 1
    return replace(layer, borrows=number, keys_as_values=False, sliding_window=window)


def _sizes(layer: LayerGeometry) -> str:
    window = "all tokens" if layer.sliding_window is None else f"a window of {layer.sliding_window}"
    return f"{layer.kv_heads} KV heads of {layer.head_dim} numbers, with {window}"
