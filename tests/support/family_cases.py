"""The registry of target families: their classes in `transformers`, their sizes, and several configs of each."""

from tests.support.family_sizes import (
    DEEPSEEK,
    DYNAMIC,
    GEMMA4,
    GEMMA4_MOE,
    GEMMA4_SMALL,
    GROWING,
    LINEAR,
    LLAMA3,
    LLAMA4,
    MIMO_V2,
    STEP,
    STEP_MLPS,
    VOCAB,
    YARN,
    Family,
    mimo_ropes,
    rope,
)
from tests.support.published_formats import (
    write_gemma4,
    write_kimi,
    write_mimo,
    write_mimo_v2,
    write_native,
    write_step,
)

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        "LlamaConfig",
        {},
        {
            "grouped heads, llama3 rope": rope(LLAMA3, 500000.0),
            "one head each, tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
            "one kv head, biases, heads of 12": {
                "num_key_value_heads": 1,
                "attention_bias": True,
                "mlp_bias": True,
                "head_dim": 12,
            },
            "linear rope, sharded": {**rope(LINEAR), "shards": True},
            "dynamic rope": rope(DYNAMIC),
            "yarn": rope(YARN),
        },
    ),
    "mistral": Family(
        "MistralForCausalLM",
        "MistralConfig",
        {},
        {
            "window of 9": {"sliding_window": 9, "head_dim": 8},
            "no window, theta 1e6": {"sliding_window": None, **rope({"rope_type": "default"}, 1e6)},
            "window of 2, one head each": {"sliding_window": 2, "num_key_value_heads": 4},
            "yarn, heads of 20, sharded": {"sliding_window": None, "head_dim": 20, **rope(YARN), "shards": True},
        },
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {},
        {
            "tied": {"tie_word_embeddings": True},
            "late layers windowed": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
            "yarn, one kv head": {"num_key_value_heads": 1, **rope(YARN)},
        },
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {"head_dim": 12},
        {
            "grouped heads": {},
            "tied, biases": {"tie_word_embeddings": True, "attention_bias": True},
            "layer types, yarn": {
                "use_sliding_window": True,
                "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                **rope(YARN),
            },
        },
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {"head_dim": 12, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        {
            "renormalised": {"norm_topk_prob": True},
            "not renormalised, tied": {"norm_topk_prob": False, "tie_word_embeddings": True},
            "some layers dense": {"mlp_only_layers": [0], "decoder_sparse_step": 2, "norm_topk_prob": True},
            "odd columns, sharded": {"moe_intermediate_size": 11, "num_experts_per_tok": 3, "shards": True},
        },
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        "MixtralConfig",
        {"num_local_experts": 4},
        {
            "two of four": {},
            "three of five, window of 8": {
                "num_local_experts": 5,
                "num_experts_per_tok": 3,
                "sliding_window": 8,
            },
            "one head each, tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
        },
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "intermediate_size": 32,
        },
        {
            "yarn": rope({**YARN, "truncate": False}, 150000.0),
            "own layer types": {
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
            },
            "one head each, low limit": {"num_key_value_heads": 4, "swiglu_limit": 0.5},
            "odd columns, sharded": {"intermediate_size": 21, "shards": True},
        },
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 8, "tie_word_embeddings": True},
        {
            "three local, one global": {"sliding_window_pattern": 4},
            "own layer types": {"layer_types": ["full_attention", "sliding_attention"] * 2},
            "linear global rope": {
                "sliding_window_pattern": 2,
                "rope_parameters": {
                    "full_attention": {**LINEAR, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            },
            "untied, capped, biases": {
                "tie_word_embeddings": False,
                "final_logit_softcapping": 3.0,
                "attention_bias": True,
            },
        },
        seed=5,
    ),
    "gemma4": Family(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        GEMMA4,
        {
            "three local, one global": {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
            "layers that borrow, with inputs of their own": GEMMA4_SMALL,
        },
    ),
    "gemma4_moe": Family(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        GEMMA4 | GEMMA4_MOE,
        {
            "experts beside the MLP, keys as values": {},
            "all parts, capped, biases, sharded": {
                **GEMMA4_SMALL,
                "num_kv_shared_layers": 1,
                "attention_bias": True,
                "final_logit_softcapping": 3.0,
                "tie_word_embeddings": False,
                "shards": True,
            },
        },
    ),
    "gemma4_published": Family(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        GEMMA4,
        {"published config, unused keys and values": {**GEMMA4_SMALL, **GEMMA4_MOE}},
        rewrite=write_gemma4,
    ),
    "llama4": Family(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        LLAMA4,
        {
            "chunks of 8, every fourth layer without rope": rope({"rope_type": "default"}, 500000.0),
            "dense and sparse in turn, no norms, llama3 rope": {
                "interleave_moe_layer_step": 2,
                "use_qk_norm": False,
                "no_rope_layers": [1, 0, 1, 0],
                **rope(LLAMA3, 500000.0),
            },
            "two of five experts, biases, sharded": {
                "num_local_experts": 5,
                "num_experts_per_tok": 2,
                "attention_bias": True,
                "attn_temperature_tuning": False,
                "attention_chunk_size": 5,
                "no_rope_layers": [0, 1, 1, 1],
                "shards": True,
            },
        },
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        DEEPSEEK,
        {
            "low-rank queries": {},
            "whole queries, two shared": {"q_lora_rank": None, "n_shared_experts": 2},
            "yarn with mscale": rope({**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}),
            "biases, all layers sparse, sharded": {
                "attention_bias": True,
                "first_k_dense_replace": 0,
                "norm_topk_prob": False,
                "shards": True,
            },
        },
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        {
            "head_dim": 12,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "first_k_dense_replace": 1,
            "num_mtp_layers": 0,
        },
        {
            "half rotated, norms, biases": {"use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 2.5},
            "groups, two shared": {"n_group": 4, "topk_group": 2, "n_shared_experts": 2, "norm_topk_prob": False},
            "a quarter rotated, yarn, sharded": {
                "head_dim": 16,
                **rope({**YARN, "partial_rotary_factor": 0.25}),
                "first_k_dense_replace": 0,
                "shards": True,
            },
        },
    ),
    "mimo_v2": Family(
        "MiMoV2FlashForCausalLM",
        "MiMoV2FlashConfig",
        MIMO_V2,
        {
            "one full KV head, two with a window": mimo_ropes(0.334),
            "half rotated, wide values, biases": {
                **mimo_ropes(0.5),
                "v_head_dim": 20,
                "num_key_value_heads": 2,
                "attention_bias": True,
                "attention_value_scale": None,
            },
            "own layer types, groups, sharded": {
                **mimo_ropes(0.5),
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
                "n_group": 4,
                "topk_group": 2,
                "norm_topk_prob": False,
                "routed_scaling_factor": 1.7,
                "shards": True,
            },
        },
    ),
    "mimo_v2_published": Family(
        "MiMoV2FlashForCausalLM",
        "MiMoV2FlashConfig",
        MIMO_V2,
        {"published config, beside its draft": mimo_ropes(0.334)},
        rewrite=write_mimo_v2,
    ),
    "llava": Family(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {"image_token_index": 63},
        {
            "around Llama": rope(LLAMA3),
            "around Mistral, sharded": {"model_type": "mistral", "sliding_window": 9, "shards": True},
            "around Qwen2, tied": {"model_type": "qwen2", "tie_word_embeddings": True},
        },
        text="LlamaConfig",
    ),
    "step3p7": Family(
        "Step3p7ForConditionalGeneration",
        "Step3p7Config",
        STEP,
        {
            "more heads in windows": {"image_token_id": 63, "mlp_layer_types": STEP_MLPS},
            "partial ropes, limits": {
                "image_token_id": 63,
                "mlp_layer_types": STEP_MLPS,
                "swiglu_limits": [0, 0.3, 0, 0.2],
                "swiglu_limits_shared": [0.2, 0, 0, 0.4],
                "moe_router_scaling_factor": 1.5,
                "rope_parameters": {
                    "full_attention": {**LLAMA3, "rope_theta": 1e6, "partial_rotary_factor": 0.5},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            },
        },
        text="Step3p7TextConfig",
    ),
    "step3p5": Family(
        "Step3p7ForConditionalGeneration",
        "Step3p7Config",
        STEP,
        {
            "published config, beside its draft": {
                "image_token_id": 63,
                "mlp_layer_types": STEP_MLPS,
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
                },
            }
        },
        text="Step3p7TextConfig",
        rewrite=write_step,
    ),
    "mistral3": Family(
        "Mistral3ForConditionalGeneration",
        "Mistral3Config",
        {"image_token_index": 63, "head_dim": 12, "sliding_window": None},
        {"around Mistral": {"model_type": "mistral"}},
        text="MistralConfig",
    ),
    "gemma3_wrapped": Family(
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 8, "tie_word_embeddings": True},
        {"around Gemma-3": {"image_token_index": 63, "mm_tokens_per_image": 4, "sliding_window_pattern": 2}},
        text="Gemma3TextConfig",
    ),
    "gemma4_wrapped": Family(
        "Gemma4ForConditionalGeneration",
        "Gemma4Config",
        GEMMA4,
        {"around Gemma-4": {"image_token_id": 2 * VOCAB, **GEMMA4_SMALL}},
        text="Gemma4TextConfig",
    ),
    "llama4_wrapped": Family(
        "Llama4ForConditionalGeneration",
        "Llama4Config",
        LLAMA4,
        {"around Llama-4": {"image_token_index": 2 * VOCAB}},
        text="Llama4TextConfig",
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        "Ministral3Config",
        {"head_dim": 12},
        {
            "growing queries": rope({**YARN, **GROWING}),
            "no growth, a window": {"sliding_window": 9, **rope({**YARN, **GROWING, "llama_4_scaling_beta": 0.0})},
        },
    ),
    "mistral_native": Family(
        "MistralForCausalLM",
        "MistralConfig",
        {},
        {
            "window of 9, heads of 12": {"sliding_window": 9, "head_dim": 12},
            "no window, one head each": {"sliding_window": None, "num_key_value_heads": 4},
            "yarn": {"sliding_window": None, **rope(YARN)},
        },
        rewrite=write_native,
    ),
    "ministral3_native": Family(
        "Ministral3ForCausalLM",
        "Ministral3Config",
        {"head_dim": 12, "sliding_window": None},
        {"growing queries": rope({**YARN, **GROWING})},
        rewrite=write_native,
    ),
    "mimo": Family("Qwen2ForCausalLM", "Qwen2Config", {}, {"beside its draft": {}}, rewrite=write_mimo),
    "kimi": Family(
        "DeepseekV3ForCausalLM", "DeepseekV3Config", DEEPSEEK, {"around DeepSeek-V3": {}}, rewrite=write_kimi
    ),
}
