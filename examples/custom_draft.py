"""Write an EAGLE-3 draft with random weights for a target, as a training program would write a trained one.

    python examples/custom_draft.py models/demo/target my-draft

A draft is a folder with config.json and model.safetensors. Here its tensors have SpecForge's names; docs/models.md
lists the other dialects that Aerie reads. The target is a folder with a config like Llama's.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

DRAFT_VOCAB = 1024  # the draft may propose only some of the target's tokens; fewer make its head cheaper
NUM_AUX = 3  # hidden states of the target that the draft reads: of a low, a middle and a high layer


def tensors_of(target: dict[str, int], generator: torch.Generator) -> dict[str, Tensor]:
    """Return the tensors of a draft of one layer, by name. The shape of a matrix is [outputs, inputs]."""
    hidden, inner, head = target["hidden_size"], target["intermediate_size"], target["head_dim"]
    queries, keys = target["num_attention_heads"] * head, target["num_key_value_heads"] * head

    def weight(outputs: int, inputs: int) -> Tensor:
        return torch.randn(outputs, inputs, generator=generator) * inputs**-0.5

    # The ids that the draft can propose. Here they are random; for a trained draft, take the most frequent ones.
    ids = torch.randperm(target["vocab_size"], generator=generator)[:DRAFT_VOCAB].sort().values
    return {
        # Maps the target's hidden states, side by side in one vector, to a single hidden state of the draft.
        "fc.weight": weight(hidden, NUM_AUX * hidden),
        # The layer reads the token's embedding and the hidden state side by side, so its projections take 2 * hidden.
        "midlayer.input_layernorm.weight": torch.ones(hidden),  # norm of the embedding (the target's)
        "midlayer.hidden_norm.weight": torch.ones(hidden),  # norm of the hidden state
        "midlayer.self_attn.q_proj.weight": weight(queries, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": weight(keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": weight(keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": weight(hidden, queries),
        "midlayer.post_attention_layernorm.weight": torch.ones(hidden),
        "midlayer.mlp.gate_proj.weight": weight(inner, hidden),
        "midlayer.mlp.up_proj.weight": weight(inner, hidden),
        "midlayer.mlp.down_proj.weight": weight(hidden, inner),
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": weight(DRAFT_VOCAB, hidden),
        # Row i of the head is token i + d2t[i] of the target; t2d marks these tokens.
        "d2t": ids - torch.arange(DRAFT_VOCAB),
        "t2d": torch.zeros(target["vocab_size"], dtype=torch.bool).index_fill_(0, ids, True),
    }


def config_of(target: dict[str, int]) -> dict[str, object]:
    """Return the contents of the config.json for these tensors."""
    layers = target["num_hidden_layers"]
    same = ("hidden_size", "intermediate_size", "head_dim", "num_attention_heads", "num_key_value_heads", "vocab_size")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{name: target[name] for name in same},
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": target["max_position_embeddings"],
        "draft_vocab_size": DRAFT_VOCAB,
        "target_hidden_size": target["hidden_size"],
        "num_aux_hidden_states": NUM_AUX,
        # Which hidden states: the outputs of these layers of the target, counted from 0.
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [2, layers // 2 - 1, layers - 4],
            "use_aux_hidden_state": True,
        },
    }


def main() -> int:
    """Write the draft's folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="the target's folder")
    parser.add_argument("out", type=Path, help="the folder to write")
    args = parser.parse_args()
    target = json.loads((args.target / "config.json").read_text(encoding="utf-8"))
    args.out.mkdir(parents=True, exist_ok=True)
    tensors = tensors_of(target, torch.Generator().manual_seed(0))
    save_file(
        {name: t.bfloat16() if t.is_floating_point() else t for name, t in tensors.items()},
        args.out / "model.safetensors",
    )
    (args.out / "config.json").write_text(json.dumps(config_of(target), indent=2), encoding="utf-8")
    print(f"wrote {args.out}; next: aerie inspect {args.target} --draft {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
