"""Tiny random drafts as their producers write them: names, config keys, files."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny import draft_folder, folder_of_session, target_folder

Tensors = dict[str, Tensor]
H, V, HEADS, KV, D = 32, 64, 4, 2, 8


class Random:
    """Random weights from one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator) * 0.3

    def scale(self, size: int) -> Tensor:
        return 1 + self.matrix(size)

    def layer(
        self, name: str, columns: int, norms: tuple[str, ...], biased: str = "", qk_norm: bool = False, h: int = H
    ) -> Tensors:
        """One layer under HF names; `biased` lists the letters of attention projections with a bias."""
        sizes = {"q": (HEADS * D, columns), "k": (KV * D, columns), "v": (KV * D, columns), "o": (h, HEADS * D)}
        made = {f"{name}.self_attn.{p}_proj.weight": self.matrix(*size) for p, size in sizes.items()}
        made |= {f"{name}.self_attn.{p}_proj.bias": self.matrix(sizes[p][0]) for p in biased}
        for part, size in (("gate", (2 * h, h)), ("up", (2 * h, h)), ("down", (h, 2 * h))):
            made[f"{name}.mlp.{part}_proj.weight"] = self.matrix(*size)
        if qk_norm:
            made |= {f"{name}.self_attn.{p}_norm.weight": self.scale(D) for p in "qk"}
        return made | {f"{name}.{norm}.weight": self.scale(h) for norm in norms}


def write(
    tensors: Tensors, config: dict[str, Any], *, file: str = "model.safetensors", keys: str = "config.json"
) -> str:
    """A new folder with these."""
    root = folder_of_session()
    folder = root / f"written-{len(list(root.iterdir()))}"
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    (folder / keys).write_text(json.dumps(config))
    return str(folder)


def rewritten(
    folder: str, rename: dict[str, str], config: Callable[[dict[str, Any]], dict[str, Any]], drop: str = "^$"
) -> str:
    """The same draft under other names (patterns) and another config."""
    held = load_file(Path(folder) / "model.safetensors")
    made = {}
    for name, tensor in held.items():
        if not re.search(drop, name):
            for pattern, replacement in rename.items():
                name = re.sub(pattern, replacement, name)
            made[name] = tensor
    return write(made, config(json.loads((Path(folder) / "config.json").read_text())))


def base_config(**more: Any) -> dict[str, Any]:
    """The keys of every Llama-like config."""
    given = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": H,
        "intermediate_size": 2 * H,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": D,
        "rms_norm_eps": 1e-5,
        "vocab_size": V,
        "torch_dtype": "float16",
    }
    return {key: value for key, value in (given | more).items() if value is not None}


def eagle1(bias: bool | None = None, layers: int = 1, biased: str = "", vocab: int | None = None) -> str:
    """As yuhuili/EAGLE-*: no norm in front of layer 0, none at the end; without the key `bias`, fc has one."""
    random = Random(3)
    tensors = {"fc.weight": random.matrix(H, 2 * H), "embed_tokens.weight": random.matrix(V, H)}
    if bias is not False:
        tensors["fc.bias"] = random.matrix(H)
    for i in range(layers):
        norms = ("post_attention_layernorm",) if i == 0 else ("input_layernorm", "post_attention_layernorm")
        tensors |= random.layer(f"layers.{i}", H, norms, biased)
    config = base_config(num_hidden_layers=layers, bias=bias, head_dim=None)
    if vocab is not None:
        ids = torch.randperm(V, generator=random.generator)[:vocab].sort().values
        tensors["d2t"] = ids - torch.arange(vocab)
        config["draft_vocab_size"] = vocab
    return write(tensors, config)


def original(**options: Any) -> str:
    """As yuhuili/EAGLE3-*: `midlayer`, a Llama's architecture name, no eagle_config, no ids; 8 target layers."""

    def config(given: dict[str, Any]) -> dict[str, Any]:
        keep = base_config(draft_vocab_size=given["draft_vocab_size"], head_dim=None)
        return keep | {"tie_word_embeddings": False}

    return rewritten(draft_folder(deep_target(), **options), {}, config)


def deep_target() -> str:
    """Eight layers, so that EAGLE-3's default boundaries (2, 4, 5) ascend."""
    return target_folder(layers=8)


def modelopt(layers: int = 1, use_aux: bool = True, last_norm: bool = True, before_fc: bool = False) -> str:
    """As ModelOpt exports: `layers.i`, `eagle_config`, `d2t` without `t2d`."""
    folder = draft_folder(
        target_folder(), layers=layers, use_aux=use_aux, draft_vocab=40, norm_before_fc=before_fc, seed=5
    )
    nested = {
        "use_aux_hidden_state": use_aux,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": last_norm,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "norm_before_fc": before_fc,
    }
    if use_aux:
        nested["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]

    def config(given: dict[str, Any]) -> dict[str, Any]:
        return base_config(
            architectures=["LlamaForCausalLMEagle3"],
            num_hidden_layers=layers,
            draft_vocab_size=40,
            eagle_config=nested,
        )

    return rewritten(folder, {"^midlayer": "layers.0"}, config, drop="t2d" + ("" if last_norm else "|^norm"))


def speculators(
    layers: int = 1, qwen3: bool = False, residual: bool = True, nested: dict[str, Any] | None = None, **options: Any
) -> str:
    """As speculators saves: geometry in `transformer_layer_config`, boundary ids at the top level, `layers.0`."""
    random = Random(7)
    tensors: Tensors = {"fc.weight": random.matrix(H, 3 * H), "norm.weight": random.scale(H)}
    tensors["lm_head.weight"] = random.matrix(40, H)
    both = ("input_layernorm", "post_attention_layernorm")
    for i in range(layers):
        norms = (*both, "hidden_norm") if i == 0 else both
        tensors |= random.layer(f"layers.{i}", 2 * H if i == 0 else H, norms, qk_norm=qwen3)
    if options.get("norm_before_fc"):
        tensors["input_norm.weight"] = random.scale(3 * H)
    if options.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": random.scale(H) for i in range(3)}
    ids = torch.randperm(V, generator=random.generator)[:40].sort().values
    tensors |= {"d2t": ids - torch.arange(40), "t2d": torch.zeros(V, dtype=torch.bool).index_fill_(0, ids, True)}
    inner = base_config(model_type="qwen3" if qwen3 else "llama", num_hidden_layers=layers, torch_dtype=None)
    inner = {**inner, "attention_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    inner |= nested or {}
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": None, "architectures": []}},
        "draft_vocab_size": 40,
        "target_hidden_size": None,
        "norm_before_residual": residual,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
        "transformer_layer_config": {key: value for key, value in inner.items() if key != "architectures"},
        **options,
    }
    return write(tensors, config)


def legacy_31() -> str:
    """EAGLE-3.1 under its first names: `use_aux_norm`, `aux_norm_low|mid|high`."""
    folder = draft_folder(target_folder(), fc_norm=True, norm_output=True, seed=6)
    names = {r"^fc_norm\.0\.": "aux_norm_low.", r"^fc_norm\.1\.": "aux_norm_mid.", r"^fc_norm\.2\.": "aux_norm_high."}
    return rewritten(folder, names, lambda given: given | {"use_aux_norm": True})


def later(meaning: str) -> str:
    """Three layers whose later ones are ordinary, SGLang's (`hidden_norm`), or DeepSpec's (2 H wide)."""
    folder = draft_folder(target_folder(), layers=3, seed=8)
    held = load_file(Path(folder) / "model.safetensors")
    config = json.loads((Path(folder) / "config.json").read_text())
    random = Random(9)
    for i in (1, 2):
        if meaning != "input_layernorm":
            held[f"layers.{i}.hidden_norm.weight"] = random.scale(H)
        if meaning == "pair":
            for part, rows in (("q", HEADS * D), ("k", KV * D), ("v", KV * D)):
                held[f"layers.{i}.self_attn.{part}_proj.weight"] = random.matrix(rows, 2 * H)
    if meaning == "pair":
        config |= {"target_layer_ids": [0, 1, 2], "ttt_length": 7}
        del config["eagle_config"]
    return write(held, config)
