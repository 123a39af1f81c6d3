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


def latent_layer(random: Random, name: str, columns: int, norms: tuple[str, ...]) -> Tensors:
    """One layer of latent attention (16 + 8 ranks, heads of 8 + 4, values of 8) under HF names."""
    made = random.layer(name, H, norms)
    made = {key: tensor for key, tensor in made.items() if "self_attn" not in key}
    sizes = {
        "q_a_proj": (16, columns),
        "q_b_proj": (HEADS * 12, 16),
        "kv_a_proj_with_mqa": (12, columns),
        "kv_b_proj": (HEADS * 16, 8),
        "o_proj": (H, HEADS * 8),
    }
    made |= {f"{name}.self_attn.{part}.weight": random.matrix(*size) for part, size in sizes.items()}
    made[f"{name}.self_attn.q_a_layernorm.weight"] = random.scale(16)
    made[f"{name}.self_attn.kv_a_layernorm.weight"] = random.scale(8)
    return made


EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 12,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}


def experts(random: Random, name: str) -> Tensors:
    """DeepSeek-V3's experts: a router with its correction, routed ones, one that every token takes."""
    made = {f"{name}.gate.weight": random.matrix(8, H), f"{name}.gate.e_score_correction_bias": random.matrix(8)}
    for expert in (*(f"experts.{e}" for e in range(8)), "shared_experts"):
        for part, size in (("gate", (12, H)), ("up", (12, H)), ("down", (H, 12))):
            made[f"{name}.{expert}.{part}_proj.weight"] = random.matrix(*size)
    return made


LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}


def mla_eagle3() -> str:
    """As Kimi's Eagle3DeepseekV2: only `q_a_proj` and `kv_a_proj_with_mqa` see the doubled width."""
    random = Random(21)
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
        **LATENT,
    )
    return write(tensors, config)


NATIVE = (
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
    """As mistralai/*-eagle: params.json, consolidated.safetensors, no embedding and no head."""
    random, norms = Random(31), ("input_layernorm", "post_attention_layernorm")
    tensors: Tensors = {"fc.weight": random.matrix(H, 2 * H), "norm.weight": random.scale(H)}
    for i in range(layers):
        made = latent_layer(random, f"layers.{i}", H, norms) if mla else random.layer(f"layers.{i}", H, norms)
        tensors |= made
    for theirs, ours in NATIVE:
        tensors = {re.sub(theirs, ours, name): tensor for name, tensor in tensors.items()}
    if fp8:
        for name in [n for n in tensors if n.endswith(".weight") and tensors[n].dim() == 2]:
            stem, scale = name.removesuffix(".weight"), tensors[name].abs().max() / 448
            tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
            tensors |= {f"{stem}.qscale_weight": scale, f"{stem}.qscale_act": torch.tensor(0.5)}
        tensors |= {f"layers.0.attention.{p}_fake_quantizer.qscale_act": torch.tensor(0.1) for p in "qkv"}
    given = {
        "dim": H,
        "n_layers": layers,
        "n_heads": HEADS,
        "n_kv_heads": KV,
        "head_dim": D,
        "hidden_dim": 2 * H,
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
        "vocab_size": V,
        **(LATENT if mla else {}),
        **params,
    }
    return write(tensors, given, file="consolidated.safetensors", keys="params.json")


def mtp(
    dialect: str, count: int = 1, mla: bool = False, trained: int = 41, vocab: int = V, sparse: bool = False
) -> str:
    """The MTP layers of a checkpoint, as their producers spell them, after the target's 4 layers.

    `sparse`: with experts, as DeepSeek-V3 and GLM ship them.
    """
    random, tensors = Random(trained), Tensors()
    norms = ("input_layernorm", "post_attention_layernorm")
    for i in range(count):
        if dialect == "mimo":
            at, inner, parts = f"model.mtp_layers.{i}.", "", ("token_layernorm", "hidden_layernorm", "input_proj")
            out = "final_layernorm"
        else:
            at, parts, out = f"model.layers.{4 + i}.", ("enorm", "hnorm", "eh_proj"), "shared_head.norm"
            inner = "transformer." if dialect == "step" else ""
        tensors |= {f"{at}{part}.weight": random.scale(H) for part in (*parts[:2], out)}
        tensors[f"{at}{parts[2]}.weight"] = random.matrix(H, 2 * H)
        if dialect == "step":
            tensors[f"{at}shared_head.output.weight"] = random.matrix(vocab, H)
        if dialect == "deepseek":
            tensors[f"{at}embed_tokens.weight"] = random.matrix(vocab, H)
            tensors[f"{at}shared_head.head.weight"] = random.matrix(vocab, H)
        name = f"{at}{inner}".rstrip(".")
        layer = latent_layer(random, name, H, norms) if mla else random.layer(name, H, norms)
        if sparse:
            layer = {key: tensor for key, tensor in layer.items() if ".mlp." not in key}
            layer |= experts(random, f"{name}.mlp")
        tensors |= layer
    more: dict[str, Any] = {"num_hidden_layers": 4, "num_nextn_predict_layers": count, "vocab_size": vocab}
    if mla:
        more |= {**LATENT, "head_dim": None, "n_routed_experts": 8, "num_key_value_heads": HEADS}
    return write(tensors, base_config(**(more | (EXPERTS if sparse else {}))))
