"""Small random checkpoints in the formats of the wild, and a draft with a set acceptance rate."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.batch import Batch
from cluster.config import TreeShape
from cluster.spec.draft import NoDraft
from cluster.spec.inputs import EagleDraftInput
from cluster.spec.tree import DraftTree, ancestors_of


def tiny_target(
    folder: Path,
    *,
    vocab_size: int = 64,
    hidden: int = 32,
    layers: int = 6,
    heads: int = 4,
    kv_heads: int = 2,
    tied: bool = False,
    seed: int = 0,
    **extra: object,
) -> str:
    """A random Llama target in float32 whose greedy texts do not collapse onto one token."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=None,
        **extra,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.35 if "embed" not in name and "lm_head" not in name else 1.0)
    model.save_pretrained(folder)
    return str(folder)


def tiny_draft(
    folder: Path,
    target: str,
    *,
    num_aux: int = 3,
    layers: int = 1,
    hidden: int | None = None,
    draft_vocab: int | None = None,
    seed: int = 1,
    config_extra: dict[str, object] | None = None,
) -> str:
    """A random EAGLE-3 draft for `target` under SpecForge's names."""
    given = json.loads((Path(target) / "config.json").read_text())
    width, vocab = given["hidden_size"], given["vocab_size"]
    h, heads, kv_heads, d = hidden or width, 4, 2, 8
    vocab_d = draft_vocab or vocab
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    tensors: dict[str, Tensor] = {"fc.weight": random(h, num_aux * width), "norm.weight": torch.ones(h)}
    tensors["lm_head.weight"] = random(vocab_d, h)
    if h != width:
        tensors["embed_tokens.weight"] = random(vocab, h)
    for i in range(layers):
        name, columns = ("midlayer", 2 * h) if i == 0 else (f"layers.{i}", h)
        for part, rows, cols in (
            ("q", heads * d, columns),
            ("k", kv_heads * d, columns),
            ("v", kv_heads * d, columns),
            ("o", h, heads * d),
        ):
            tensors[f"{name}.self_attn.{part}_proj.weight"] = random(rows, cols)
        for part, rows, cols in (("gate", 2 * h, h), ("up", 2 * h, h), ("down", h, 2 * h)):
            tensors[f"{name}.mlp.{part}_proj.weight"] = random(rows, cols)
        for part in ("input_layernorm", "post_attention_layernorm") + (("hidden_norm",) if i == 0 else ()):
            tensors[f"{name}.{part}.weight"] = 1 + 0.1 * random(h)
    if vocab_d != vocab:
        ids = torch.randperm(vocab, generator=generator)[:vocab_d].sort().values
        tensors["d2t"] = ids - torch.arange(vocab_d)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    count = given["num_hidden_layers"]
    outputs = {1: [count // 2], 2: [0, count - 2], 3: [0, count // 2, count - 2], 5: [0, 1, 2, 3, 4]}[num_aux]
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": h,
        "intermediate_size": 2 * h,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": d,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocab,
        "draft_vocab_size": vocab_d,
        "target_hidden_size": width,
        "num_aux_hidden_states": num_aux,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": outputs, "use_aux_hidden_state": True},
        **(config_extra or {}),
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


class OracleDraft(NoDraft):
    """Random trees in which each right token is present with probability `rate`, so that every accept length occurs.

    `truth` maps a request's first tokens to its whole text; the request is found again by its bonus and position.
    """

    def __init__(self, shape: TreeShape, truth: dict[tuple[int, int], list[int]], rate: float, vocab: int) -> None:
        self._shape, self._truth, self._rate, self._vocab = shape, truth, rate, vocab
        self._random = torch.Generator().manual_seed(7)

    def draft(self, batch: Batch, carried: EagleDraftInput, noise: Tensor | None) -> DraftTree:
        n, steps = self._shape.num_draft_tokens, self._shape.num_steps
        r = batch.decodes
        tokens = torch.randint(self._vocab, (r, n), generator=self._random)
        parents = torch.zeros(r, n, dtype=torch.int64)
        depths = torch.zeros(r, n, dtype=torch.int64)
        tokens[:, 0] = carried.bonus
        for i in range(r):
            at = int(batch.seq_lens[i])
            text = self._truth.get((int(batch.rows[i]), 0), [])
            right = 0  # the deepest node that is on the true path
            used: dict[int, set[int]] = {}
            for j in range(1, n):
                shallow = [p for p in range(j) if int(depths[i, p]) < steps]
                parent = int(torch.randint(len(shallow), (1,), generator=self._random))
                parent = shallow[parent]
                token = int(tokens[i, j])
                wanted = at + int(depths[i, right]) + 1
                if (
                    float(torch.rand(1, generator=self._random)) < self._rate
                    and int(depths[i, right]) < steps
                    and wanted < len(text)
                    and text[wanted] not in used.get(right, set())
                ):
                    parent, token, right = right, text[wanted], j
                while token in used.get(parent, set()):
                    token = (token + 1) % self._vocab
                used.setdefault(parent, set()).add(token)
                tokens[i, j], parents[i, j], depths[i, j] = token, parent, depths[i, parent] + 1
        return DraftTree(tokens, parents, depths, ancestors_of(parents, steps))
