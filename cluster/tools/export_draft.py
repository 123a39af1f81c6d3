"""`aerie export-draft`: write an EAGLE-3 draft in another dialect (the checkpoint format of another tool).

Weights are copied bit for bit. If the draft has a `draft_sample.json` (its output on some tokens, checked on load),
that file is copied too, because it is valid in every dialect. Idle layers may be appended: layers that add nothing,
because both output projections are zero. An idle layer has the input that all layers after the first have in the
dialect (`DIALECTS`). A draft that the dialect cannot express is refused.
"""

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from cluster.arch import DraftSpec, aux_boundaries, read_draft, read_json, read_target
from cluster.arch.draft.sample import SAMPLE_FILE as SAMPLE
from cluster.arch.hub import folder_of
from cluster.config import ConfigError
from cluster.models.checkpoint import Checkpoint

Config = dict[str, Any]
AUX_LAYER_IDS_KEY = "eagle_aux_hidden_state_layer_ids"
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")


def export_draft(folder: str, target: str, dialect: str, out: str, layers: int | None = None) -> DraftSpec:
    """Write the draft in `folder`, whose target is `target`, to the new folder `out` in the format `dialect`. Return
    the draft's spec as read back from `out`.

    `layers` is the number of layers to write (None: as many as the draft has). If it is more than the draft has, idle
    layers are appended, which change nothing.

    Raises:
        ConfigError: the dialect is unknown or cannot express the draft, or `out` is not empty.
    """
    if dialect not in DIALECTS:
        raise ConfigError(f"--dialect must be one of {', '.join(DIALECTS)}; got {dialect!r}")
    if Path(out).exists() and any(Path(out).iterdir()):
        raise ConfigError(f"{out!r} is not empty; give a new folder")
    checkpoint, arch = Checkpoint(folder), read_target(target)
    spec = read_draft(folder, checkpoint.shapes, arch)
    if spec.kind != "eagle3":
        raise ConfigError(f"draft {folder!r} is {spec.dialect}; only EAGLE-3 drafts can be exported")
    if spec.layer.latent is not None or not spec.use_aux_hidden_state:
        raise ConfigError(f"draft {folder!r}: latent attention and use_aux_hidden_state false cannot be exported")
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.shapes}
    num_layers = layers or spec.num_layers
    later_input, config_of = DIALECTS[dialect]
    _check_expressible(spec, dialect, later_input, num_layers, folder, arch.num_layers)
    for i in range(spec.num_layers, num_layers):
        tensors |= idle_layer(tensors, i, later_input, spec.hidden)
    config = config_of(spec) | _geometry(spec, num_layers, read_json(folder, "config.json"), dialect == "speculators")
    if dialect == "specforge":
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    if dialect == "modelopt":
        tensors.pop("t2d", None)
    Path(out).mkdir(parents=True, exist_ok=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, Path(out) / "model.safetensors", {"format": "pt"})
    (Path(out) / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if (Path(folder) / SAMPLE).is_file():
        shutil.copy(Path(folder) / SAMPLE, out)
    return read_draft(out, Checkpoint(out).shapes, arch)


def _check_expressible(
    spec: DraftSpec, dialect: str, later_input: str, num_layers: int, folder: str, target_layers: int
) -> None:
    """Raise a ConfigError if the dialect cannot express the draft. The message lists all that it cannot express."""
    inexpressible = []
    if dialect != "speculators":
        if 0 in spec.aux_boundaries:
            inexpressible.append("the embedding as an aux hidden state, which is no layer's output")
        if spec.norm_before_residual:
            inexpressible.append("norm_before_residual")
    if 0 not in spec.aux_boundaries or dialect == "speculators":
        written = DIALECTS[dialect][1](spec)
        read_back = aux_boundaries(written, target_layers, folder, is_speculators=dialect == "speculators")
        if read_back != spec.aux_boundaries:
            inexpressible.append(f"aux boundaries {list(spec.aux_boundaries)}, read back as {list(read_back)}")
    if spec.layer.interleaved or spec.layer.sliding_window:
        inexpressible.append("interleaved rope or a window")
    if num_layers < spec.num_layers:
        inexpressible.append(f"{spec.num_layers} layers in {num_layers} (raise --layers)")
    later_inputs = {"pair" if layer.pair else layer.hidden_norm for layer in spec.layers[1:]}
    if later_inputs - {later_input}:
        inexpressible.append(f"later layers with other inputs ({', '.join(sorted(later_inputs))})")
    if inexpressible:
        raise ConfigError(
            f"draft {folder!r} cannot be written as {dialect}, which cannot express: {'; '.join(inexpressible)}"
        )


def idle_layer(tensors: dict[str, Tensor], index: int, later_input: str, hidden: int) -> dict[str, Tensor]:
    """Return the tensors of layer `index`, by name. They are a copy of layer 0 with both output projections zero, so
    the layer adds nothing to the hidden state. `later_input` says what the layer reads, as in `DIALECTS`; `hidden` is
    the width of the hidden state.
    """
    layer_tensors: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.startswith("layers.0."):
            continue
        suffix = name.removeprefix("layers.0.")
        if suffix == "hidden_norm.weight" and later_input == "input_layernorm":
            continue
        if suffix.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")) and later_input != "pair":
            tensor = tensor[:, hidden:]  # layer 0 reads [embedding, hidden], this layer reads only hidden
        is_output_projection = suffix.startswith(("self_attn.o_proj", "mlp.down_proj"))
        layer_tensors[f"layers.{index}.{suffix}"] = torch.zeros_like(tensor) if is_output_projection else tensor.clone()
    return layer_tensors


def _geometry(spec: DraftSpec, num_layers: int, source_config: Config, nested: bool) -> Config:
    layer = spec.layer
    layer_config = {
        "model_type": "qwen3" if layer.qk_norm else "llama",
        "hidden_size": layer.hidden,
        "intermediate_size": layer.intermediate,
        "num_hidden_layers": num_layers,
        "num_attention_heads": layer.heads,
        "num_key_value_heads": layer.kv_heads,
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": layer.eps,
        "attention_bias": layer.out_bias,
        "mlp_bias": layer.mlp_bias,
        "vocab_size": spec.vocab_size,
        **{key: value for key, value in source_config.items() if key in ROPE_KEYS},
    }
    if nested:
        return {"transformer_layer_config": layer_config}
    return layer_config | {
        "draft_vocab_size": spec.draft_vocab_size,
        "torch_dtype": spec.dtype,
        "tie_word_embeddings": False,
    }


def _flags(spec: DraftSpec) -> Config:
    return {"norm_output": spec.recurrent == "post", "fc_norm": spec.fc_norm, "norm_before_fc": spec.norm_before_fc}


def _aux_output_layers(spec: DraftSpec) -> list[int]:
    """Return the ids of the layers whose outputs are the aux hidden states. Boundary j, the input of layer j, is the
    output of layer j - 1.
    """
    return [boundary - 1 for boundary in spec.aux_boundaries]


def _specforge(spec: DraftSpec) -> Config:
    eagle = {AUX_LAYER_IDS_KEY: _aux_output_layers(spec), "use_aux_hidden_state": True}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "target_hidden_size": spec.target_hidden,
        "num_aux_hidden_states": spec.num_aux,
        "eagle_config": eagle,
        **_flags(spec),
    }


def _modelopt(spec: DraftSpec) -> Config:
    eagle = {
        AUX_LAYER_IDS_KEY: _aux_output_layers(spec),
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": spec.final_norm,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
    }
    return _specforge(spec) | {"eagle_config": eagle}


def _deepspec(spec: DraftSpec) -> Config:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "target_hidden_size": spec.target_hidden,
        "target_layer_ids": _aux_output_layers(spec),
        **_flags(spec),
    }


def _speculators(spec: DraftSpec) -> Config:
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": None, "architectures": []},
        },
        "draft_vocab_size": spec.draft_vocab_size,
        "target_hidden_size": spec.target_hidden,
        "norm_before_residual": spec.norm_before_residual,
        AUX_LAYER_IDS_KEY: list(spec.aux_boundaries),
        **_flags(spec),
    }


DIALECTS: dict[str, tuple[str, Callable[[DraftSpec], Config]]] = {
    "specforge": ("hidden_norm", _specforge),
    "modelopt": ("input_layernorm", _modelopt),
    "speculators": ("input_layernorm", _speculators),
    "deepspec": ("pair", _deepspec),
}
"""For each dialect: what the layers after the first read, and the function that makes the config. `hidden_norm` and
`input_layernorm` mean that these layers read the hidden state through the norm of that name. `pair` means that they
read the embedding and the hidden state, as layer 0 does.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `aerie export-draft`."""
    parser.add_argument("draft", metavar="DRAFT", help="an EAGLE-3 draft: its folder, or its name on a hub")
    parser.add_argument("--target", required=True, metavar="MODEL", help="its target: a folder or a name on a hub")
    parser.add_argument("--dialect", required=True, help=f"one of {', '.join(DIALECTS)}")
    parser.add_argument("--out", required=True, metavar="DIR", help="a new folder")
    parser.add_argument("--layers", type=int, help="number of layers to write: layers that do nothing are appended")


def run(args: argparse.Namespace) -> int:
    """Export the draft and print what was written."""
    draft, target = folder_of(args.draft), folder_of(args.target, weights=False)
    spec = export_draft(draft, target, args.dialect, args.out, args.layers)
    print(f"{args.out}: {spec.dialect}, {spec.num_layers} layer(s), boundaries {list(spec.aux_boundaries)}")
    return 0
