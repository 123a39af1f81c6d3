"""Writers of tiny random drafts in their producers' formats: tensor names, config keys and files."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.tiny_checkpoints import draft_folder, folder_of_session, target_folder

Tensors = dict[str, Tensor]
# Hidden size, vocabulary size, heads, KV heads, head dimension.
H, V, HEADS, KV, D = 32, 64, 4, 2, 8


class RandomWeights:
    """A generator of random weights from one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator) * 0.3

    def scale(self, size: int) -> Tensor:
        return 1 + self.matrix(size)

    def layer(
        self, name: str, columns: int, norms: tuple[str, ...], biased: str = "", qk_norm: bool = False, h: int = H
    ) -> Tensors:
        """Return one layer under HF names. `biased` has the letters of the attention projections that have a bias."""
        sizes = {"q": (HEADS * D, columns), "k": (KV * D, columns), "v": (KV * D, columns), "o": (h, HEADS * D)}
        tensors = {f"{name}.self_attn.{p}_proj.weight": self.matrix(*size) for p, size in sizes.items()}
        tensors |= {f"{name}.self_attn.{p}_proj.bias": self.matrix(sizes[p][0]) for p in biased}
        for projection, size in (("gate", (2 * h, h)), ("up", (2 * h, h)), ("down", (h, 2 * h))):
            tensors[f"{name}.mlp.{projection}_proj.weight"] = self.matrix(*size)
        if qk_norm:
            tensors |= {f"{name}.self_attn.{p}_norm.weight": self.scale(D) for p in "qk"}
        return tensors | {f"{name}.{norm}.weight": self.scale(h) for norm in norms}


def write(
    tensors: Tensors,
    config: dict[str, Any],
    *,
    weights_name: str = "model.safetensors",
    config_name: str = "config.json",
) -> str:
    """Write `tensors` and `config` into a new folder and return its path."""
    root = folder_of_session()
    folder = root / f"written-{len(list(root.iterdir()))}"
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / weights_name)
    (folder / config_name).write_text(json.dumps(config))
    return str(folder)


def rewrite_draft(
    folder: str, rename: dict[str, str], config: Callable[[dict[str, Any]], dict[str, Any]], drop: str = "^$"
) -> str:
    """Write a copy of the draft in `folder` with other tensor names and another config; return the new folder.

    `rename` maps patterns of tensor names to replacements. Tensors whose name matches `drop` are left out.
    """
    stored_tensors = load_file(Path(folder) / "model.safetensors")
    renamed_tensors = {}
    for name, tensor in stored_tensors.items():
        if not re.search(drop, name):
            for pattern, replacement in rename.items():
                name = re.sub(pattern, replacement, name)
            renamed_tensors[name] = tensor
    return write(renamed_tensors, config(json.loads((Path(folder) / "config.json").read_text())))


def base_config(**overrides: Any) -> dict[str, Any]:
    """Return the keys of every Llama-like config, with `overrides`. An override of None drops its key."""
    defaults = {
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
    return {key: value for key, value in (defaults | overrides).items() if value is not None}


def eagle1(bias: bool | None = None, layers: int = 1, biased: str = "", vocab: int | None = None) -> str:
    """Write an EAGLE-1 draft like yuhuili/EAGLE-*: layer 0 has no input norm, and there is no final norm.

    If `bias` is None, the config has no such key, and fc has a bias.
    """
    random = RandomWeights(3)
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
    """Write an EAGLE-3 draft like yuhuili/EAGLE3-*, for a target of 8 layers.

    Its layer is named `midlayer`, its architecture is a Llama's, and its config has no eagle_config and no layer ids.
    """

    def config(draft_config: dict[str, Any]) -> dict[str, Any]:
        common_keys = base_config(draft_vocab_size=draft_config["draft_vocab_size"], head_dim=None)
        return common_keys | {"tie_word_embeddings": False}

    return rewrite_draft(draft_folder(deep_target(), **options), {}, config)


def deep_target() -> str:
    """Return a target with eight layers, so that EAGLE-3's default boundaries (2, 4, 5) ascend."""
    return target_folder(layers=8)


def modelopt(layers: int = 1, use_aux: bool = True, last_norm: bool = True, before_fc: bool = False) -> str:
    """Write an EAGLE-3 draft as ModelOpt exports it: with `layers.i`, `eagle_config`, and `d2t` without `t2d`."""
    folder = draft_folder(
        target_folder(), layers=layers, use_aux=use_aux, draft_vocab=40, norm_before_fc=before_fc, seed=5
    )
    eagle_config = {
        "use_aux_hidden_state": use_aux,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": last_norm,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "norm_before_fc": before_fc,
    }
    if use_aux:
        eagle_config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]

    def config(draft_config: dict[str, Any]) -> dict[str, Any]:
        return base_config(
            architectures=["LlamaForCausalLMEagle3"],
            num_hidden_layers=layers,
            draft_vocab_size=40,
            eagle_config=eagle_config,
        )

    return rewrite_draft(folder, {"^midlayer": "layers.0"}, config, drop="t2d" + ("" if last_norm else "|^norm"))


def speculators(
    layers: int = 1,
    qwen3: bool = False,
    residual: bool = True,
    layer_overrides: dict[str, Any] | None = None,
    **options: Any,
) -> str:
    """Write an EAGLE-3 draft as speculators saves it.

    The geometry is in `transformer_layer_config`, boundary ids are at the top level, the first layer is `layers.0`.
    """
    random = RandomWeights(7)
    tensors: Tensors = {"fc.weight": random.matrix(H, 3 * H), "norm.weight": random.scale(H)}
    tensors["lm_head.weight"] = random.matrix(40, H)
    layer_norms = ("input_layernorm", "post_attention_layernorm")
    for i in range(layers):
        norms = (*layer_norms, "hidden_norm") if i == 0 else layer_norms
        tensors |= random.layer(f"layers.{i}", 2 * H if i == 0 else H, norms, qk_norm=qwen3)
    if options.get("norm_before_fc"):
        tensors["input_norm.weight"] = random.scale(3 * H)
    if options.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": random.scale(H) for i in range(3)}
    ids = torch.randperm(V, generator=random.generator)[:40].sort().values
    tensors |= {"d2t": ids - torch.arange(40), "t2d": torch.zeros(V, dtype=torch.bool).index_fill_(0, ids, True)}
    layer_config = base_config(model_type="qwen3" if qwen3 else "llama", num_hidden_layers=layers, torch_dtype=None)
    layer_config = {
        **layer_config,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }
    layer_config |= layer_overrides or {}
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": None, "architectures": []}},
        "draft_vocab_size": 40,
        "target_hidden_size": None,
        "norm_before_residual": residual,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
        "transformer_layer_config": {key: value for key, value in layer_config.items() if key != "architectures"},
        **options,
    }
    return write(tensors, config)


def legacy_31() -> str:
    """Write an EAGLE-3.1 draft under its first names: `use_aux_norm` and `aux_norm_low|mid|high`."""
    folder = draft_folder(target_folder(), fc_norm=True, norm_output=True, seed=6)
    names = {r"^fc_norm\.0\.": "aux_norm_low.", r"^fc_norm\.1\.": "aux_norm_mid.", r"^fc_norm\.2\.": "aux_norm_high."}
    return rewrite_draft(folder, names, lambda draft_config: draft_config | {"use_aux_norm": True})


def three_layer_draft(later_layer_kind: str) -> str:
    """Write an EAGLE-3 draft of three layers. `later_layer_kind` is the kind of layers 1 and 2.

    "input_layernorm": ordinary layers. "hidden_norm": SGLang's layers. "pair": DeepSpec's layers, with inputs 2 H wide.
    """
    folder = draft_folder(target_folder(), layers=3, seed=8)
    tensors = load_file(Path(folder) / "model.safetensors")
    config = json.loads((Path(folder) / "config.json").read_text())
    random = RandomWeights(9)
    for i in (1, 2):
        if later_layer_kind != "input_layernorm":
            tensors[f"layers.{i}.hidden_norm.weight"] = random.scale(H)
        if later_layer_kind == "pair":
            for projection, rows in (("q", HEADS * D), ("k", KV * D), ("v", KV * D)):
                tensors[f"layers.{i}.self_attn.{projection}_proj.weight"] = random.matrix(rows, 2 * H)
    if later_layer_kind == "pair":
        config |= {"target_layer_ids": [0, 1, 2], "ttt_length": 7}
        del config["eagle_config"]
    return write(tensors, config)


def latent_layer(random: RandomWeights, name: str, columns: int, norms: tuple[str, ...]) -> Tensors:
    """Return one layer of latent attention under HF names: ranks 16 and 8, heads of 8 + 4, values of 8."""
    tensors = random.layer(name, H, norms)
    tensors = {key: tensor for key, tensor in tensors.items() if "self_attn" not in key}
    sizes = {
        "q_a_proj": (16, columns),
        "q_b_proj": (HEADS * 12, 16),
        "kv_a_proj_with_mqa": (12, columns),
        "kv_b_proj": (HEADS * 16, 8),
        "o_proj": (H, HEADS * 8),
    }
    tensors |= {f"{name}.self_attn.{projection}.weight": random.matrix(*size) for projection, size in sizes.items()}
    tensors[f"{name}.self_attn.q_a_layernorm.weight"] = random.scale(16)
    tensors[f"{name}.self_attn.kv_a_layernorm.weight"] = random.scale(8)
    return tensors


MOE_CONFIG = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 12,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}


def experts(random: RandomWeights, name: str) -> Tensors:
    """Return DeepSeek-V3's experts: a router with its correction, routed experts, and one shared expert."""
    tensors = {f"{name}.gate.weight": random.matrix(8, H), f"{name}.gate.e_score_correction_bias": random.matrix(8)}
    for expert in (*(f"experts.{e}" for e in range(8)), "shared_experts"):
        for projection, size in (("gate", (12, H)), ("up", (12, H)), ("down", (H, 12))):
            tensors[f"{name}.{expert}.{projection}_proj.weight"] = random.matrix(*size)
    return tensors


MLA_CONFIG = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}


def mla_eagle3() -> str:
    """Write a draft like Kimi's Eagle3DeepseekV2: only `q_a_proj` and `kv_a_proj_with_mqa` have inputs 2 H wide."""
    random = RandomWeights(21)
    tensors: Tensors = {"fc.weight": random.matrix(H, 3 * H), "norm.weight": random.scale(H)}
    tensors["lm_head.weight"] = random.matrix(V, H)
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    tensors |= latent_layer(random, "layers.0", 2 * H, norms)
    config = base_config(
        architectures=["Eagle3DeepseekV2ForCausalLM"],
        model_type="kimi_k2",
        head_dim=None,
        num_key_value_heads=HEADS,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_last_layernorm": True},
        n_routed_experts=8,
        **MLA_CONFIG,
    )
    return write(tensors, config)


# Patterns of HF tensor names, each with Mistral's name.
MISTRAL_NAMES = (
    (r"^fc\.", "eagle_linear."),
    (r"\.input_layernorm", ".attention_norm"),
    (r"\.post_attention_layernorm", ".ffn_norm"),
    (r"\.mlp\.gate_proj", ".feed_forward.w1"),
    (r"\.mlp\.down_proj", ".feed_forward.w2"),
    (r"\.mlp\.up_proj", ".feed_forward.w3"),
    (r"\.self_attn\.kv_a_proj_with_mqa", ".attention.wkv_a_with_mqa"),
    (r"\.self_attn\.kv_b_proj", ".attention.wkv_b"),
    (r"\.self_attn\.q_([ab])_proj", r".attention.wq_\1"),
    (r"\.self_attn\.(q|kv)_a_layernorm", r".attention.\1_a_norm"),
    (r"\.self_attn\.([qkvo])_proj", r".attention.w\1"),
)


def mistral(layers: int = 2, mla: bool = False, fp8: bool = False, **params: Any) -> str:
    """Write a draft like mistralai/*-eagle: params.json, consolidated.safetensors, no embedding and no head."""
    random, norms = RandomWeights(31), ("input_layernorm", "post_attention_layernorm")
    tensors: Tensors = {"fc.weight": random.matrix(H, 2 * H), "norm.weight": random.scale(H)}
    for i in range(layers):
        layer_tensors = latent_layer(random, f"layers.{i}", H, norms) if mla else random.layer(f"layers.{i}", H, norms)
        tensors |= layer_tensors
    for hf_pattern, mistral_name in MISTRAL_NAMES:
        tensors = {re.sub(hf_pattern, mistral_name, name): tensor for name, tensor in tensors.items()}
    if fp8:
        for name in [n for n in tensors if n.endswith(".weight") and tensors[n].dim() == 2]:
            stem, scale = name.removesuffix(".weight"), tensors[name].abs().max() / 448
            tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
            tensors |= {f"{stem}.qscale_weight": scale, f"{stem}.qscale_act": torch.tensor(0.5)}
        tensors |= {f"layers.0.attention.{p}_fake_quantizer.qscale_act": torch.tensor(0.1) for p in "qkv"}
    params_dict = {
        "dim": H,
        "n_layers": layers,
        "n_heads": HEADS,
        "n_kv_heads": KV,
        "head_dim": D,
        "hidden_dim": 2 * H,
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
        "vocab_size": V,
        **(MLA_CONFIG if mla else {}),
        **params,
    }
    return write(tensors, params_dict, weights_name="consolidated.safetensors", config_name="params.json")


def mtp(dialect: str, count: int = 1, mla: bool = False, seed: int = 41, vocab: int = V, sparse: bool = False) -> str:
    """Write `count` MTP layers under their producer's names, which follow the target's 4 layers; return the folder.

    `seed` seeds the weights. `sparse` layers have experts, as DeepSeek-V3 and GLM ship them.
    """
    random, tensors = RandomWeights(seed), Tensors()
    norms = ("input_layernorm", "post_attention_layernorm")
    for i in range(count):
        if dialect == "mimo":
            prefix, layer_infix, input_modules = (
                f"model.mtp_layers.{i}.",
                "",
                ("token_layernorm", "hidden_layernorm", "input_proj"),
            )
            final_norm = "final_layernorm"
        else:
            prefix, input_modules, final_norm = (
                f"model.layers.{4 + i}.",
                ("enorm", "hnorm", "eh_proj"),
                "shared_head.norm",
            )
            layer_infix = "transformer." if dialect == "step" else ""
        tensors |= {f"{prefix}{module}.weight": random.scale(H) for module in (*input_modules[:2], final_norm)}
        tensors[f"{prefix}{input_modules[2]}.weight"] = random.matrix(H, 2 * H)
        if dialect == "step":
            tensors[f"{prefix}shared_head.output.weight"] = random.matrix(vocab, H)
        if dialect == "deepseek":
            tensors[f"{prefix}embed_tokens.weight"] = random.matrix(vocab, H)
            tensors[f"{prefix}shared_head.head.weight"] = random.matrix(vocab, H)
        name = f"{prefix}{layer_infix}".rstrip(".")
        layer = latent_layer(random, name, H, norms) if mla else random.layer(name, H, norms)
        if sparse:
            layer = {key: tensor for key, tensor in layer.items() if ".mlp." not in key}
            layer |= experts(random, f"{name}.mlp")
        tensors |= layer
    config_keys: dict[str, Any] = {"num_hidden_layers": 4, "num_nextn_predict_layers": count, "vocab_size": vocab}
    if mla:
        config_keys |= {**MLA_CONFIG, "head_dim": None, "n_routed_experts": 8, "num_key_value_heads": HEADS}
    return write(tensors, base_config(**(config_keys | (MOE_CONFIG if sparse else {}))))
