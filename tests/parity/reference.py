"""A second implementation of target and draft, dense and in float64, written from the descriptions of the formats.

It has no pages, no windows and no packing: every call runs a whole causal text. The target is Llama as published. The
draft is EAGLE-3: layer 0 reads [norm(embedding of the next token) | norm(hidden)]; later layers are ordinary; the head
reads the output of the final norm; the recurrent state is the output before that norm, unless `norm_output` is set.
"""

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

torch.set_num_threads(1)
KV = list[Tensor]
"""Per layer a tensor `[T, 2, nkv, d]`: k (after rope) and v."""


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def frequencies(config: dict[str, Any], d: int) -> Tensor:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = scaling.get("rope_theta") or config.get("rope_theta") or 10000.0
    theta = theta[-1] if isinstance(theta, list) else theta  # of each layer, the draft's layers last
    inverse = theta ** -(torch.arange(0, d, 2, dtype=torch.float64) / d)
    if scaling.get("rope_type") != "llama3":
        return inverse
    length = scaling["original_max_position_embeddings"]
    slow, fast = length / scaling["low_freq_factor"], length / scaling["high_freq_factor"]
    out = []
    for f in inverse.tolist():
        wave = 2 * math.pi / f
        if wave > slow:
            f /= scaling["factor"]
        elif wave >= fast:
            smooth = (length / wave - scaling["low_freq_factor"]) / (
                scaling["high_freq_factor"] - scaling["low_freq_factor"]
            )
            f = (1 - smooth) * f / scaling["factor"] + smooth * f
        out.append(f)
    return torch.tensor(out, dtype=torch.float64)


def rope(x: Tensor, inverse: Tensor) -> Tensor:
    """Rotate x `[T, n, d]` at positions 0 .. T - 1, half-split pairs."""
    angle = torch.arange(x.shape[0], dtype=torch.float64)[:, None, None] * inverse
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class Weights:
    """A checkpoint in float64 with the arithmetic of its layers."""

    def __init__(self, folder: str) -> None:
        self.config: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
        raw = load_file(Path(folder) / "model.safetensors")
        self.w = {name.removeprefix("model."): t.double() if t.is_floating_point() else t for name, t in raw.items()}
        c = self.config
        self.heads, self.kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.d, self.eps = c["head_dim"], c["rms_norm_eps"]
        self.inverse = frequencies(c, self.d)

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.w[f"{name}.weight"].T
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def norm(self, name: str, x: Tensor) -> Tensor:
        return rms(x, self.w[f"{name}.weight"], self.eps)

    def attention(self, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output of causal attention over all rows, and the layer's KV."""
        t = x.shape[0]
        q = rope(self.linear(f"{name}.q_proj", x).view(t, self.heads, self.d), self.inverse)
        k = rope(self.linear(f"{name}.k_proj", x).view(t, self.kv_heads, self.d), self.inverse)
        v = self.linear(f"{name}.v_proj", x).view(t, self.kv_heads, self.d)
        group = self.heads // self.kv_heads
        weights = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) / self.d**0.5
        weights = weights.masked_fill(torch.ones(t, t).triu(1).bool(), float("-inf")).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1)).reshape(t, -1)
        return self.linear(f"{name}.o_proj", out), torch.stack([k, v], 1)

    def mlp(self, name: str, x: Tensor) -> Tensor:
        gate = torch.nn.functional.silu(self.linear(f"{name}.gate_proj", x))
        return self.linear(f"{name}.down_proj", gate * self.linear(f"{name}.up_proj", x))

    def layer(self, name: str, hidden: Tensor) -> tuple[Tensor, Tensor]:
        out, kv = self.attention(f"{name}.self_attn", self.norm(f"{name}.input_layernorm", hidden))
        hidden = hidden + out
        return hidden + self.mlp(f"{name}.mlp", self.norm(f"{name}.post_attention_layernorm", hidden)), kv


@dataclass(frozen=True)
class TargetPass:
    """The result of a forward. `stream[i]` `[T, H]` is the input of layer i; the last one is the input of the final
    norm. `hidden` is the output of the final norm.
    """

    stream: list[Tensor]
    hidden: Tensor
    logits: Tensor
    kv: KV


class TargetReference(Weights):
    """A dense Llama."""

    def run(self, tokens: list[int]) -> TargetPass:
        hidden = self.w["embed_tokens.weight"][torch.tensor(tokens)]
        stream, kv = [hidden], []
        for i in range(self.config["num_hidden_layers"]):
            hidden, cells = self.layer(f"layers.{i}", hidden)
            stream.append(hidden)
            kv.append(cells)
        hidden = self.norm("norm", hidden)
        head = self.w["embed_tokens.weight" if self.config["tie_word_embeddings"] else "lm_head.weight"]
        return TargetPass(stream, hidden, hidden @ head.T, kv)


class DraftReference(Weights):
    """A dense EAGLE-3 draft."""

    def __init__(self, folder: str, target: TargetReference) -> None:
        super().__init__(folder)
        self.embed = self.w.get("embed_tokens.weight", target.w["embed_tokens.weight"])
        self.head = self.w.get("lm_head.weight", target.w.get("lm_head.weight", target.w["embed_tokens.weight"]))
        ids = torch.arange(self.config["draft_vocab_size"])
        self.target_ids = (ids + self.w["d2t"] if "d2t" in self.w else ids).tolist()
        eagle_config, aux_ids_key = self.config["eagle_config"], "eagle_aux_hidden_state_layer_ids"
        self.uses_aux = eagle_config["use_aux_hidden_state"]
        if self.uses_aux:
            self.boundaries = (
                [i + 1 for i in eagle_config[aux_ids_key]] if aux_ids_key in eagle_config else self.config[aux_ids_key]
            )

    def fuse(self, target: TargetPass) -> Tensor:
        """Return the hidden states `[T, H]` that the draft reads at every position of the target's text."""
        if not self.uses_aux:
            return target.hidden
        aux_states = [target.stream[b] for b in self.boundaries]
        if "fc_norm.0.weight" in self.w:
            aux_states = [self.norm(f"fc_norm.{i}", aux_state) for i, aux_state in enumerate(aux_states)]
        joined = torch.cat(aux_states, -1)
        return self.linear("fc", self.norm("input_norm", joined) if "input_norm.weight" in self.w else joined)

    def run(self, next_tokens: list[int], hidden: Tensor) -> tuple[Tensor, Tensor, KV]:
        """Return logits `[T, Vd]`, recurrent states `[T, H]` and KV. Row p reads the token at position p + 1 and the
        hidden state at position p.
        """
        normed = self.norm("midlayer.hidden_norm", hidden) if "midlayer.hidden_norm.weight" in self.w else hidden
        embedding = self.norm("midlayer.input_layernorm", self.embed[torch.tensor(next_tokens)])
        residual = normed if self.config["norm_before_residual"] else hidden
        out, cells = self.attention("midlayer.self_attn", torch.cat([embedding, normed], -1))
        x, kv = residual + out, [cells]
        x = x + self.mlp("midlayer.mlp", self.norm("midlayer.post_attention_layernorm", x))
        for i in range(1, self.config["num_hidden_layers"]):
            x, cells = self.layer(f"layers.{i}", x)
            kv.append(cells)
        final = self.norm("norm", x)
        return final @ self.head.T, final if self.config["norm_output"] else x, kv


@cache
def target_reference(folder: str) -> TargetReference:
    return TargetReference(folder)


@cache
def draft_reference(folder: str, target: str) -> DraftReference:
    return DraftReference(folder, target_reference(target))
