"""MTP layers whose decoder layer has experts or gates: writers of tiny layers in their producers' formats, and a
reference that runs the same layers by the layer classes of `transformers`.
"""

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.glm4_moe import modeling_glm4_moe as glm4_moe
from transformers.models.mimo_v2_flash import modeling_mimo_v2_flash as mimo_v2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next
from transformers.models.step3p7 import modeling_step3p7 as step3p7

from tests.support.float64_transformers import exact
from tests.unit.models.draft_folders import (
    HEADS,
    MLA_CONFIG,
    D,
    H,
    RandomWeights,
    Tensors,
    V,
    base_config,
    latent_layer,
    write,
)
from tests.unit.models.draft_reference import Mtp

CLASSES: dict[str, tuple[Any, Any, Any]] = {
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        deepseek_v3.DeepseekV3DecoderLayer,
        deepseek_v3.DeepseekV3RotaryEmbedding,
    ),
    "glm4_moe": (transformers.Glm4MoeConfig, glm4_moe.Glm4MoeDecoderLayer, glm4_moe.Glm4MoeRotaryEmbedding),
    "mimo_v2_flash": (
        transformers.MiMoV2FlashConfig,
        mimo_v2.MiMoV2FlashDecoderLayer,
        mimo_v2.MiMoV2FlashRotaryEmbedding,
    ),
    "step3p5": (transformers.Step3p7TextConfig, step3p7.Step3p7DecoderLayer, step3p7.Step3p7RotaryEmbedding),
    "qwen3_next": (
        transformers.Qwen3NextConfig,
        qwen3_next.Qwen3NextDecoderLayer,
        qwen3_next.Qwen3NextRotaryEmbedding,
    ),
}
"""Classes of the config, the decoder layer and the rotary embedding of each `model_type`."""


class TransformersMtpLayer(Mtp):
    """An MTP layer whose decoder layer is the `transformers` class of its `model_type`.

    That class must know every tensor of the decoder layer. Norms, concatenation and head around the decoder layer are
    `Mtp`'s. `conventions["config"]` has keys that replace those of the draft's config.
    """

    def __init__(self, folder: str, target: Any, **conventions: Any) -> None:
        super().__init__(folder, target, **conventions)
        self.w = dequantise(self.w)
        config_class, layer_class, rotary_class = CLASSES[self.config["model_type"]]
        config = config_class(
            **{key: self.config[key] for key in self.config if key != "architectures"} | conventions["config"]
        )
        config._attn_implementation = config._experts_implementation = "eager"
        with exact():
            self.module = layer_class(config, 0).double().eval()
            self.rotary = rotary_class(config)
        self.module.load_state_dict(self.layer_tensors())

    def layer_tensors(self) -> Tensors:
        """Return the tensors of the decoder layer, under the names of the `transformers` class."""
        return stack_experts(self.w, self.conventions["inner"])

    def layer(self, name: str, x: Tensor, norm: str | None = "input_layernorm") -> Tensor:
        positions = torch.arange(x.shape[0])[None]
        causal_mask = torch.full((1, 1, x.shape[0], x.shape[0]), float("-inf")).triu(1).double()
        with exact(), torch.inference_mode():
            output = self.module(
                x[None], position_embeddings=self.rotary(x[None], positions), attention_mask=causal_mask,
                position_ids=positions,
            )  # fmt: skip
        assert isinstance(output, Tensor) and output.dtype == torch.float64
        return output[0]


class WindowedMtpLayer(TransformersMtpLayer):
    """An MTP layer whose decoder layer has a sliding window. Further conventions:

    window: the number of tokens that a row sees, itself included.
    renamed: the names in the `transformers` class of tensors that have another name; those renamed to "" are left out.
    """

    def layer_tensors(self) -> Tensors:
        """Return the tensors of the decoder layer, under the names of the `transformers` class."""
        names, tensors = self.conventions["renamed"], super().layer_tensors()
        return {names.get(name, name): tensor for name, tensor in tensors.items() if names.get(name, name)}

    def layer(self, name: str, x: Tensor, norm: str | None = "input_layernorm") -> Tensor:
        distance = torch.arange(x.shape[0])[:, None] - torch.arange(x.shape[0])
        hidden = (distance < 0) | (distance >= self.conventions["window"])
        mask = torch.zeros(distance.shape, dtype=torch.float64).masked_fill(hidden, float("-inf"))[None, None]
        positions = torch.arange(x.shape[0])[None]
        with exact(), torch.inference_mode():
            angles = self.rotary(x[None], positions, "sliding_attention")
            output = self.module(x[None], position_embeddings=angles, attention_mask=mask, position_ids=positions)
        assert isinstance(output, Tensor) and output.dtype == torch.float64
        return output[0]


def dequantise(stored_tensors: Tensors) -> Tensors:
    """Multiply each weight by the scale of its only block; leave out the scales."""
    scales = {name: tensor for name, tensor in stored_tensors.items() if name.endswith("_scale_inv")}
    weights = {name: tensor for name, tensor in stored_tensors.items() if name not in scales}
    for name, scale in scales.items():
        weight = name.removesuffix("_scale_inv")
        weights[weight] = weights[weight].double() * scale.double()
    return weights


def stack_experts(stored_tensors: Tensors, prefix: str) -> Tensors:
    """Return the decoder layer's tensors under `prefix`, with all experts in one tensor, as `transformers` has them."""
    tensors = {name.removeprefix(prefix): tensor for name, tensor in stored_tensors.items() if name.startswith(prefix)}
    outer_modules = {"embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head"}
    tensors = {name: tensor for name, tensor in tensors.items() if name.split(".")[0] not in outer_modules}
    count = len([name for name in tensors if name.startswith("mlp.experts.") and name.endswith("down_proj.weight")])
    if count:
        expert_weights = [
            [tensors.pop(f"mlp.experts.{e}.{p}_proj.weight") for e in range(count)] for p in ("gate", "up", "down")
        ]
        tensors["mlp.experts.gate_up_proj"] = torch.stack(
            [torch.cat(pair) for pair in zip(*expert_weights[:2], strict=True)]
        )
        tensors["mlp.experts.down_proj"] = torch.stack(expert_weights[2])
    return tensors


def experts(random: RandomWeights, name: str, count: int, width: int) -> Tensors:
    """Return a router and `count` experts of `width` columns."""
    tensors = {f"{name}.gate.weight": random.matrix(count, H)}
    for e in range(count):
        tensors |= mlp(random, f"{name}.experts.{e}", width)
    return tensors


def mlp(random: RandomWeights, name: str, width: int) -> Tensors:
    sizes = {"gate": (width, H), "up": (width, H), "down": (H, width)}
    return {f"{name}.{part}_proj.weight": random.matrix(*size) for part, size in sizes.items()}


def without_mlp(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if ".mlp." not in name}


QWEN_NEXT_KEYS = {
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
    """Write MTP layers like those of Qwen3-Next's checkpoints.

    Tensors are named `mtp.*`; a layer has full attention with a gate per head; norms multiply by 1 + weight.
    """
    random, tensors = RandomWeights(51), Tensors()
    for i in range(layers):
        name = f"mtp.layers.{i}"
        layer_tensors = random.layer(name, H, ("input_layernorm", "post_attention_layernorm"), biased, qk_norm=True)
        layer_tensors[f"{name}.self_attn.q_proj.weight"] = random.matrix(2 * HEADS * D, H)
        if "q" in biased:
            layer_tensors[f"{name}.self_attn.q_proj.bias"] = random.matrix(2 * HEADS * D)
        if sparse:
            layer_tensors = without_mlp(layer_tensors) | experts(random, f"{name}.mlp", 6, 12)
            layer_tensors |= mlp(random, f"{name}.mlp.shared_expert", 20)
            layer_tensors[f"{name}.mlp.shared_expert_gate.weight"] = random.matrix(1, H)
        tensors |= layer_tensors
    tensors |= {
        f"mtp.{norm}.weight": random.scale(H) for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    }
    tensors["mtp.fc.weight"] = random.matrix(H, 2 * H)
    return write(tensors, base_config(**QWEN_NEXT_KEYS | config))


MIMO_V2_KEYS: dict[str, Any] = {
    "model_type": "mimo_v2_flash",
    "architectures": ["MiMoV2FlashForCausalLM"],
    "num_hidden_layers": 4,
    "head_dim": 12,
    "v_head_dim": 8,
    "num_key_value_heads": 1,
    "swa_num_attention_heads": HEADS,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 12,
    "swa_v_head_dim": 8,
    "rope_theta": 5e6,
    "swa_rope_theta": 1e4,
    "partial_rotary_factor": 0.334,
    "sliding_window_size": 5,
    "layernorm_epsilon": 1e-5,
    "attention_value_scale": 0.707,
    "hybrid_layer_pattern": [0, 1, 1, 0],
}


def mimo_v2_layers(count: int = 1, vocab: int = V) -> str:
    """Write MTP layers as MiMo-V2-Flash ships them: K of 12 and V of 8 numbers, a sliding window, and sinks."""
    random, tensors = RandomWeights(54), Tensors()
    for i in range(count):
        name = f"model.mtp.layers.{i}"
        sizes = {"q": (HEADS * 12, H), "k": (2 * 12, H), "v": (2 * 8, H), "o": (H, HEADS * 8)}
        tensors |= {f"{name}.self_attn.{part}_proj.weight": random.matrix(*size) for part, size in sizes.items()}
        tensors[f"{name}.self_attn.attention_sink_bias"] = random.matrix(HEADS)
        tensors |= mlp(random, f"{name}.mlp", 2 * H)
        norms = ("enorm", "hnorm", "input_layernorm", "pre_mlp_layernorm", "final_layernorm")
        tensors |= {f"{name}.{norm}.weight": random.scale(H) for norm in norms}
        tensors[f"{name}.eh_proj.weight"] = random.matrix(H, 2 * H)
    return write(tensors, base_config(**MIMO_V2_KEYS, vocab_size=vocab))


STEP_KEYS: dict[str, Any] = {
    "model_type": "step3p5",
    "architectures": ["Step3p5ForCausalLM"],
    "num_hidden_layers": 4,
    "head_dim": 12,
    "num_attention_groups": 2,
    "num_key_value_heads": None,
    "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 6, "head_dim": 12},
    "layer_types": ["full_attention"] * 4 + ["sliding_attention"] * 3,
    "sliding_window": 6,
    "rope_theta": [1e6] * 4 + [1e4] * 3,
    "partial_rotary_factors": [0.5] * 4 + [1.0] * 3,
    "swiglu_limits_shared": [0.0] * 4 + [0.3] * 3,
    "moe_layers_enum": "1,2,3",
}


def step_layers(count: int = 1, vocab: int = V, wrapped: bool = False) -> str:
    """Write MTP layers as Step-3.5 ships them: more heads, one gate per head, a sliding window, norms of 1 + weight. If
    `wrapped`, they are those of Step-3.7, whose config has the language model in `text_config`.
    """
    random, tensors = RandomWeights(55), Tensors()
    for i in range(count):
        name = f"model.layers.{4 + i}"
        sizes = {"q": (6 * 12, H), "k": (2 * 12, H), "v": (2 * 12, H), "o": (H, 6 * 12), "g": (6, H)}
        tensors |= {f"{name}.self_attn.{part}_proj.weight": random.matrix(*size) for part, size in sizes.items()}
        tensors |= {f"{name}.self_attn.{part}_norm.weight": random.scale(12) for part in "qk"}
        tensors |= mlp(random, f"{name}.mlp", 2 * H)
        norms = ("input_layernorm", "post_attention_layernorm", "enorm", "hnorm", "transformer.shared_head.norm")
        tensors |= {f"{name}.{norm}.weight": random.matrix(H) for norm in norms}
        tensors[f"{name}.eh_proj.weight"] = random.matrix(H, 2 * H)
        tensors[f"{name}.transformer.shared_head.output.weight"] = random.matrix(vocab, H)
    config = base_config(**STEP_KEYS, num_nextn_predict_layers=count, vocab_size=vocab)
    if wrapped:
        tensors["vision_model.conv1.weight"] = torch.zeros(2)
        config = {"architectures": ["Step3p7ForConditionalGeneration"], "model_type": "step3p7", "text_config": config}
    return write(tensors, config)


EXPERT_KEYS = {
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
DEEPSEEK_KEYS = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "head_dim": None,
    "num_key_value_heads": HEADS,
}


def grouped_experts(random: RandomWeights, name: str) -> Tensors:
    """Return eight experts, the correction of the router's choice, and two shared experts in one MLP."""
    tensors = experts(random, f"{name}.mlp", 8, 12) | mlp(random, f"{name}.mlp.shared_experts", 24)
    return tensors | {f"{name}.mlp.gate.e_score_correction_bias": random.matrix(8)}


def outer_tensors(random: RandomWeights, name: str, copies: bool = True) -> Tensors:
    """Return the tensors of a NextN layer outside its decoder layer.

    With `copies` the checkpoint has the layer's copies of the target's embedding and head too.
    """
    tensors = {f"{name}.{norm}.weight": random.scale(H) for norm in ("enorm", "hnorm", "shared_head.norm")}
    tensors[f"{name}.eh_proj.weight"] = random.matrix(H, 2 * H)
    if copies:
        tensors |= {f"{name}.{module}.weight": random.matrix(V, H) for module in ("embed_tokens", "shared_head.head")}
    return tensors


def nextn_experts(fp8: bool = False, **config: Any) -> str:
    """Write an MTP layer as DeepSeek-V3 ships it: latent attention and experts, after the target's 4 layers."""
    random, name = RandomWeights(52), "model.layers.4"
    norms = ("input_layernorm", "post_attention_layernorm")
    tensors = without_mlp(latent_layer(random, name, H, norms))
    tensors |= grouped_experts(random, name) | outer_tensors(random, name)
    for weight in [w for w in tensors if fp8 and "_proj.weight" in w and "eh_proj" not in w]:
        scale = (tensors[weight].abs().max() / 448).view(1, 1)
        tensors |= {weight: (tensors[weight] / scale).to(torch.float8_e4m3fn), f"{weight}_scale_inv": scale}
    return write(tensors, base_config(**DEEPSEEK_KEYS | MLA_CONFIG | EXPERT_KEYS | config))


def glm(biased: str = "qkv", **config: Any) -> str:
    """Write an MTP layer as GLM-4.5 ships it: grouped heads, half of each head rotated, q and k norms, and experts
    like DeepSeek's."""
    random, name = RandomWeights(53), "model.layers.4"
    norms, attention_keys = (
        ("input_layernorm", "post_attention_layernorm"),
        {"use_qk_norm": True, "attention_bias": bool(biased)},
    )
    qk_norm = bool(config.get("use_qk_norm", True))
    tensors = without_mlp(random.layer(name, H, norms, biased, qk_norm=qk_norm))
    tensors |= grouped_experts(random, name) | outer_tensors(random, name)
    model_keys = {"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "partial_rotary_factor": 0.5}
    return write(tensors, base_config(**model_keys | EXPERT_KEYS | attention_keys | config))
