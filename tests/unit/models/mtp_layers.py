"""MTP layers whose decoder layer is a mixture of experts, or gated: tiny ones as their producers write them, and the
same ones run by the layer classes of `transformers`.
"""

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.glm4_moe import modeling_glm4_moe as glm4_moe
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from tests.exact import exact
from tests.unit.models.draft_folders import HEADS, LATENT, D, H, Random, Tensors, V, base_config, latent_layer, write
from tests.unit.models.draft_reference import Mtp

CLASSES: dict[str, tuple[Any, Any, Any]] = {
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        deepseek_v3.DeepseekV3DecoderLayer,
        deepseek_v3.DeepseekV3RotaryEmbedding,
    ),
    "glm4_moe": (transformers.Glm4MoeConfig, glm4_moe.Glm4MoeDecoderLayer, glm4_moe.Glm4MoeRotaryEmbedding),
    "qwen3_next": (
        transformers.Qwen3NextConfig,
        qwen3_next.Qwen3NextDecoderLayer,
        qwen3_next.Qwen3NextRotaryEmbedding,
    ),
}
"""Config, decoder layer and rotary embedding of a `model_type`."""


class LayerOfTransformers(Mtp):
    """An MTP layer whose decoder layer is the class of its `model_type`; every one of its tensors must be known to it.

    What is around it, norms, concatenation and head, is `Mtp`'s. `config` of `say` are keys on top of the draft's.
    """

    def __init__(self, folder: str, target: Any, **say: Any) -> None:
        super().__init__(folder, target, **say)
        self.w = dequantised(self.w)
        kind, layer, rotary = CLASSES[self.config["model_type"]]
        config = kind(**{key: self.config[key] for key in self.config if key != "architectures"} | say["config"])
        config._attn_implementation = config._experts_implementation = "eager"
        with exact():
            self.module = layer(config, 0).double().eval()
            self.rotary = rotary(config)
        self.module.load_state_dict(stacked(self.w, say["inner"]))

    def layer(self, name: str, x: Tensor, norm: str | None = "input_layernorm") -> Tensor:
        positions = torch.arange(x.shape[0])[None]
        future = torch.full((1, 1, x.shape[0], x.shape[0]), float("-inf")).triu(1).double()
        with exact(), torch.inference_mode():
            out = self.module(
                x[None], position_embeddings=self.rotary(x[None], positions), attention_mask=future,
                position_ids=positions,
            )  # fmt: skip
        assert isinstance(out, Tensor) and out.dtype == torch.float64
        return out[0]


def dequantised(held: Tensors) -> Tensors:
    """Weights of one block times its scale; scales left out."""
    scales = {name: tensor for name, tensor in held.items() if name.endswith("_scale_inv")}
    made = {name: tensor for name, tensor in held.items() if name not in scales}
    for name, scale in scales.items():
        weight = name.removesuffix("_scale_inv")
        made[weight] = made[weight].double() * scale.double()
    return made


def stacked(held: Tensors, prefix: str) -> Tensors:
    """What lies under `prefix` with all experts in one tensor, as `transformers` keeps them."""
    made = {name.removeprefix(prefix): tensor for name, tensor in held.items() if name.startswith(prefix)}
    around = {"embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head"}
    made = {name: tensor for name, tensor in made.items() if name.split(".")[0] not in around}
    count = len([name for name in made if name.startswith("mlp.experts.") and name.endswith("down_proj.weight")])
    if count:
        each = [[made.pop(f"mlp.experts.{e}.{p}_proj.weight") for e in range(count)] for p in ("gate", "up", "down")]
        made["mlp.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(*each[:2], strict=True)])
        made["mlp.experts.down_proj"] = torch.stack(each[2])
    return made


def experts(random: Random, name: str, count: int, width: int) -> Tensors:
    """A router and `count` experts of `width` columns."""
    made = {f"{name}.gate.weight": random.matrix(count, H)}
    for e in range(count):
        made |= mlp(random, f"{name}.experts.{e}", width)
    return made


def mlp(random: Random, name: str, width: int) -> Tensors:
    sizes = {"gate": (width, H), "up": (width, H), "down": (H, width)}
    return {f"{name}.{part}_proj.weight": random.matrix(*size) for part, size in sizes.items()}


def without_mlp(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if ".mlp." not in name}


NEXT = {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "num_hidden_layers": 4,
    "partial_rotary_factor": 0.5,
    "rope_theta": 1e4,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
    "norm_topk_prob": True,
}


def qwen_next(sparse: bool = True, biased: str = "", layers: int = 1, **config: Any) -> str:
    """As Qwen3-Next's checkpoints: `mtp.*`, one layer of full attention with a gate per head, norms of 1 + weight."""
    random, tensors = Random(51), Tensors()
    for i in range(layers):
        name = f"mtp.layers.{i}"
        made = random.layer(name, H, ("input_layernorm", "post_attention_layernorm"), biased, qk_norm=True)
        made[f"{name}.self_attn.q_proj.weight"] = random.matrix(2 * HEADS * D, H)
        if "q" in biased:
            made[f"{name}.self_attn.q_proj.bias"] = random.matrix(2 * HEADS * D)
        if sparse:
            made = without_mlp(made) | experts(random, f"{name}.mlp", 6, 12)
            made |= mlp(random, f"{name}.mlp.shared_expert", 20)
            made[f"{name}.mlp.shared_expert_gate.weight"] = random.matrix(1, H)
        tensors |= made
    tensors |= {
        f"mtp.{norm}.weight": random.scale(H) for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    }
    tensors["mtp.fc.weight"] = random.matrix(H, 2 * H)
    return write(tensors, base_config(**NEXT | config))


GROUPED = {
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 12,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "head_dim": None,
    "num_key_value_heads": HEADS,
}


def grouped_experts(random: Random, name: str) -> Tensors:
    """Eight experts with the correction of their choice, and two shared ones side by side."""
    made = experts(random, f"{name}.mlp", 8, 12) | mlp(random, f"{name}.mlp.shared_experts", 24)
    return made | {f"{name}.mlp.gate.e_score_correction_bias": random.matrix(8)}


def around(random: Random, name: str, copies: bool = True) -> Tensors:
    """What a NextN layer has beside its decoder layer; `copies`: of the target's embedding and head."""
    made = {f"{name}.{norm}.weight": random.scale(H) for norm in ("enorm", "hnorm", "shared_head.norm")}
    made[f"{name}.eh_proj.weight"] = random.matrix(H, 2 * H)
    if copies:
        made |= {f"{name}.{part}.weight": random.matrix(V, H) for part in ("embed_tokens", "shared_head.head")}
    return made


def nextn_experts(fp8: bool = False, **config: Any) -> str:
    """As DeepSeek-V3 ships its MTP layer: latent attention and experts, after the target's 4 layers."""
    random, name = Random(52), "model.layers.4"
    norms = ("input_layernorm", "post_attention_layernorm")
    tensors = without_mlp(latent_layer(random, name, H, norms))
    tensors |= grouped_experts(random, name) | around(random, name)
    for weight in [w for w in tensors if fp8 and "_proj.weight" in w and "eh_proj" not in w]:
        scale = (tensors[weight].abs().max() / 448).view(1, 1)
        tensors |= {weight: (tensors[weight] / scale).to(torch.float8_e4m3fn), f"{weight}_scale_inv": scale}
    return write(tensors, base_config(**DEEPSEEK | LATENT | GROUPED | config))


def glm(biased: str = "qkv", **config: Any) -> str:
    """As GLM-4.5 ships its MTP layer: grouped heads of which half is rotated, with norms; DeepSeek's experts."""
    random, name = Random(53), "model.layers.4"
    norms, more = ("input_layernorm", "post_attention_layernorm"), {"use_qk_norm": True, "attention_bias": bool(biased)}
    qk_norm = bool(config.get("use_qk_norm", True))
    tensors = without_mlp(random.layer(name, H, norms, biased, qk_norm=qk_norm))
    tensors |= grouped_experts(random, name) | around(random, name)
    own = {"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "partial_rotary_factor": 0.5}
    return write(tensors, base_config(**own | GROUPED | more | config))
