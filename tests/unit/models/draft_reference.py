"""Reference implementations of drafts: dense, in float64, written from the formats' descriptions, without product code.

Every family has a function `run`. It takes, for all rows of a text, the token after each row and the row's hidden
state; it returns the logits and the hidden states that the next level reads (recurrent).
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.parity.reference import TargetPass, TargetReference, frequencies, rms

Run = Callable[[list[int], Tensor], tuple[Tensor, Tensor]]


def rotate(x: Tensor, inverse: Tensor, interleaved: bool) -> Tensor:
    """Rotate x `[T, n, d]` at positions 0 .. T - 1.

    The two numbers of a pair are half of `d` apart; if `interleaved`, they are neighbours.
    """
    angle = torch.arange(x.shape[0], dtype=torch.float64)[:, None, None] * inverse
    cos, sin = angle.cos(), angle.sin()
    if not interleaved:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


HF_NAMES = (
    (r"^eagle_linear", "fc"),
    (r"\.attention_norm", ".input_layernorm"),
    (r"\.ffn_norm", ".post_attention_layernorm"),
    (r"\.feed_forward\.w1", ".mlp.gate_proj"),
    (r"\.feed_forward\.w2", ".mlp.down_proj"),
    (r"\.feed_forward\.w3", ".mlp.up_proj"),
    (r"\.attention\.wkv_a_with_mqa", ".self_attn.kv_a_proj_with_mqa"),
    (r"\.attention\.wkv_b", ".self_attn.kv_b_proj"),
    (r"\.attention\.wq_([ab])", r".self_attn.q_\1_proj"),
    (r"\.attention\.(q|kv)_a_norm", r".self_attn.\1_a_layernorm"),
    (r"\.attention\.w([qkvo])\.", r".self_attn.\1_proj."),
)
"""Patterns of Mistral's tensor names, each with the HF name that this file uses."""


def dequantise(raw: dict[str, Tensor]) -> dict[str, Tensor]:
    """Multiply FP8 weights by their `qscale_weight`; leave out the scales of activations and of the KV cache."""
    weights = {}
    for name, tensor in raw.items():
        scale = name.removesuffix(".weight") + ".qscale_weight"
        if tensor.dtype == torch.float8_e4m3fn:
            weights[name] = tensor.double() * raw[scale].double()
        elif "qscale_" not in name:
            weights[name] = tensor
    return weights


class Reference:
    """A draft checkpoint in float64. `conventions` are the facts that its format states; the subclasses list them."""

    def __init__(self, folder: str, target: TargetReference, **conventions: Any) -> None:
        path = Path(folder)
        file = path / "consolidated.safetensors"
        raw = load_file(file if file.is_file() else path / "model.safetensors")
        config = path / ("params.json" if file.is_file() else "config.json")
        outer = json.loads(config.read_text())
        if file.is_file():
            raw = dequantise(raw)
            for mistral_pattern, hf_name in HF_NAMES:
                raw = {re.sub(mistral_pattern, hf_name, name): tensor for name, tensor in raw.items()}
        self.config: dict[str, Any] = {
            **outer,
            **outer.get("transformer_layer_config", {}),
            **outer.get("text_config", {}),
        }
        self.w = {re.sub(r"^model\.", "", n): t.double() if t.is_floating_point() else t for n, t in raw.items()}
        self.target, self.conventions = target, conventions
        c = self.config
        self.heads = c.get("num_attention_heads") or c["n_heads"]
        self.kv_heads = c.get("num_key_value_heads") or c.get("n_kv_heads") or self.heads
        self.d = c.get("head_dim") or c.get("hidden_size", 0) // self.heads
        self.eps = c.get("rms_norm_eps") or c.get("norm_eps") or 1e-6
        self.inverse = frequencies(c, self.d)
        self.embed = self.w.get("embed_tokens.weight", target.w["embed_tokens.weight"])
        self.head = self.w.get("lm_head.weight", target.w.get("lm_head.weight", target.w["embed_tokens.weight"]))

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.w[f"{name}.weight"].T
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.w[f"{name}.weight"]
        return rms(x, weight + 1 if self.conventions.get("gemma") else weight, self.eps)

    def latent(self, name: str, x: Tensor) -> Tensor:
        """Return MLA's output as published: full keys and values per head, rope over neighbouring pairs at the end.

        The epsilon of its two inner norms is 1e-6 whatever the config says, as in DeepSeek's own code.
        """

        def inner_norm(norm_name: str, y: Tensor) -> Tensor:
            return rms(y, self.w[f"{name}.{norm_name}.weight"], 1e-6)

        c, t = self.config, x.shape[0]
        nope_dim, rope_dim, value_dim, lora_rank = (
            c[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
        )
        inverse = frequencies(c, rope_dim)
        q = self.linear(f"{name}.q_b_proj", inner_norm("q_a_layernorm", self.linear(f"{name}.q_a_proj", x)))
        q = q.view(t, self.heads, nope_dim + rope_dim)
        q = torch.cat([q[..., :nope_dim], rotate(q[..., nope_dim:], inverse, True)], -1)
        down = self.linear(f"{name}.kv_a_proj_with_mqa", x)
        up = self.linear(f"{name}.kv_b_proj", inner_norm("kv_a_layernorm", down[:, :lora_rank]))
        up = up.view(t, self.heads, nope_dim + value_dim)
        key = rotate(down[:, None, lora_rank:], inverse, True).expand(t, self.heads, rope_dim)
        weights = (
            torch.einsum("qhd,khd->hqk", q, torch.cat([up[..., :nope_dim], key], -1)) / (nope_dim + rope_dim) ** 0.5
        )
        weights = weights.masked_fill(torch.ones(t, t).triu(1).bool(), float("-inf")).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, up[..., nope_dim:]).reshape(t, -1)
        return self.linear(f"{name}.o_proj", out)

    def attention(self, name: str, x: Tensor) -> Tensor:
        if f"{name}.kv_a_proj_with_mqa.weight" in self.w:
            return self.latent(name, x)
        t = x.shape[0]
        q = self.linear(f"{name}.q_proj", x).view(t, self.heads, self.d)
        k = self.linear(f"{name}.k_proj", x).view(t, self.kv_heads, self.d)
        v = self.linear(f"{name}.v_proj", x).view(t, self.kv_heads, self.d)
        if f"{name}.q_norm.weight" in self.w:
            q, k = self.norm(f"{name}.q_norm", q), self.norm(f"{name}.k_norm", k)
        interleaved = bool(self.conventions.get("interleaved"))
        q, k = rotate(q, self.inverse, interleaved), rotate(k, self.inverse, interleaved)
        if "llama_4_scaling" in self.config:
            scaling = self.config["llama_4_scaling"]
            block = torch.arange(t) // scaling["original_max_position_embeddings"]
            q = q * (1 + scaling["beta"] * torch.log(1 + block.double()))[:, None, None]
        group = self.heads // self.kv_heads
        weights = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) / self.d**0.5
        distance = torch.arange(t)[:, None] - torch.arange(t)
        window = self.conventions.get("window", {}).get(name)
        masked = (distance < 0) | (distance >= window) if window else distance < 0
        weights = weights.masked_fill(masked, float("-inf")).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1)).reshape(t, -1)
        return self.linear(f"{name}.o_proj", out)

    def experts(self, name: str, x: Tensor) -> Tensor:
        """Return the output of DeepSeek-V3's experts.

        Scores are sigmoids; the correction counts for the choice only. Groups are chosen first, each by the sum of its
        two best experts, then experts. The weights of the chosen experts add up to `routed_scaling_factor`. The shared
        expert is added.
        """
        c = self.config
        count, groups = c["n_routed_experts"], c["n_group"]
        rows = []
        for row in x:
            scores = (self.w[f"{name}.gate.weight"] @ row).sigmoid()
            corrected_scores = scores + self.w[f"{name}.gate.e_score_correction_bias"]
            group_scores = corrected_scores.view(groups, -1).sort(descending=True).values[:, :2].sum(1)
            kept_groups = set(group_scores.argsort(descending=True)[: c["topk_group"]].tolist())
            allowed = [e for e in range(count) if e // (count // groups) in kept_groups]
            chosen = sorted(allowed, key=lambda e: -float(corrected_scores[e]))[: c["num_experts_per_tok"]]
            expert_weights = scores[chosen] / scores[chosen].sum() * c["routed_scaling_factor"]
            rows.append(
                sum(w * self.mlp(f"{name}.experts.{e}", row) for w, e in zip(expert_weights, chosen, strict=True))
            )
        return torch.stack(rows) + self.mlp(f"{name}.shared_experts", x)

    def mlp(self, name: str, x: Tensor) -> Tensor:
        if f"{name}.gate.weight" in self.w:
            return self.experts(name, x)
        gate = torch.nn.functional.silu(self.linear(f"{name}.gate_proj", x))
        return self.linear(f"{name}.down_proj", gate * self.linear(f"{name}.up_proj", x))

    def layer(self, name: str, x: Tensor, norm: str | None = "input_layernorm") -> Tensor:
        """Run an ordinary decoder layer. `norm` names the norm before attention; None: there is no such norm."""
        x = x + self.attention(f"{name}.self_attn", self.norm(f"{name}.{norm}", x) if norm else x)
        return x + self.mlp(f"{name}.mlp", self.norm(f"{name}.post_attention_layernorm", x))

    def logits(self, x: Tensor) -> Tensor:
        return x @ self.head.T


class Eagle3(Reference):
    """EAGLE-3. Conventions:

    boundaries: of the aux hidden states; None: fuse reads the target's last hidden state.
    residual_normed: the residual of the first layer is the normed hidden state.
    post: the next level reads the hidden state after the final norm.
    later: the kind of each layer >= 1: "pair", or the name of the norm before attention.
    window: the sliding window of each attention module that has one.
    """

    def fuse(self, target_pass: TargetPass) -> Tensor:
        if self.conventions["boundaries"] is None:
            return target_pass.hidden
        aux_states = [target_pass.stream[b] for b in self.conventions["boundaries"]]
        names = ["aux_norm_low", "aux_norm_mid", "aux_norm_high"]
        if "aux_norm_low.weight" not in self.w:
            names = [f"fc_norm.{i}" for i in range(len(aux_states))]
        if f"{names[0]}.weight" in self.w:
            aux_states = [self.norm(name, aux_state) for name, aux_state in zip(names, aux_states, strict=True)]
        joined = torch.cat(aux_states, -1)
        return self.linear("fc", self.norm("input_norm", joined) if "input_norm.weight" in self.w else joined)

    def pair(self, name: str, embedding: Tensor, hidden: Tensor) -> Tensor:
        # A decoder layer that reads the embedding and the hidden state, concatenated.
        normed = self.norm(f"{name}.hidden_norm", hidden) if f"{name}.hidden_norm.weight" in self.w else hidden
        x = torch.cat([self.norm(f"{name}.input_layernorm", embedding), normed], -1)
        x = (normed if self.conventions.get("residual_normed") else hidden) + self.attention(f"{name}.self_attn", x)
        return x + self.mlp(f"{name}.mlp", self.norm(f"{name}.post_attention_layernorm", x))

    def run(self, next_tokens: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        embedding = self.embed[torch.tensor(next_tokens)]
        first = "midlayer" if any(name.startswith("midlayer.") for name in self.w) else "layers.0"
        x = self.pair(first, embedding, hidden)
        for i, layer_kind in enumerate(self.conventions.get("later", ()), start=1):
            name = f"layers.{i}"
            x = self.pair(name, embedding, x) if layer_kind == "pair" else self.layer(name, x, layer_kind)
        final = self.norm("norm", x) if "norm.weight" in self.w else x
        return self.logits(final), final if self.conventions.get("post") else x


class Eagle1(Reference):
    """EAGLE-1: there is no norm before the first attention and none after the last layer."""

    def fuse(self, target_pass: TargetPass) -> Tensor:
        return target_pass.hidden

    def run(self, next_tokens: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        x = self.linear("fc", torch.cat([self.embed[torch.tensor(next_tokens)], hidden], -1))
        count = self.config.get("num_hidden_layers") or self.config["model"]["num_hidden_layers"]
        for i in range(count):
            x = self.layer(f"layers.{i}", x, "input_layernorm" if i else None)
        return self.logits(x), x


class Mistral(Reference):
    """Mistral EAGLE: `eagle_linear`, ordinary layers, a final norm. The next level reads the final norm's output."""

    def fuse(self, target_pass: TargetPass) -> Tensor:
        return target_pass.hidden

    def run(self, next_tokens: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        x = self.linear("fc", torch.cat([self.embed[torch.tensor(next_tokens)], hidden], -1))
        for i in range(self.config["n_layers"]):
            x = self.layer(f"layers.{i}", x)
        final = self.norm("norm", x)
        return self.logits(final), x if self.conventions.get("pre") else final


class Mtp(Reference):
    """One MTP layer that serves every level. Conventions:

    at, inner: prefixes of the MTP layer and of its decoder layer (`at` if left out).
    parts: names of the embedding norm, the hidden norm, the projection and the output norm.
    hidden_first: the projection reads the hidden state before the embedding.
    gemma: norms multiply by 1 + weight. zero_first: the embedding of the first row is zero.
    head: the name of the draft's own head. pre: the next level reads the hidden state before the output norm.
    before_norm: the first level reads the target's hidden state before the target's final norm.
    """

    def fuse(self, target_pass: TargetPass) -> Tensor:
        return target_pass.stream[-1] if self.conventions.get("before_norm") else target_pass.hidden

    def run(self, next_tokens: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        prefix, (embedding_norm, hidden_norm, projection, output_norm) = (
            self.conventions["at"],
            self.conventions["parts"],
        )
        embedding = self.embed[torch.tensor(next_tokens)].clone()
        if self.conventions.get("zero_first"):
            embedding[0] = 0
        normed_inputs = [self.norm(prefix + embedding_norm, embedding), self.norm(prefix + hidden_norm, hidden)]
        x = self.linear(
            prefix + projection,
            torch.cat(normed_inputs[::-1] if self.conventions.get("hidden_first") else normed_inputs, -1),
        )
        x = self.layer(self.conventions.get("inner", prefix).rstrip("."), x)
        final = self.norm(prefix + output_norm, x)
        head = self.w[self.conventions["head"]] if "head" in self.conventions else self.head
        return final @ head.T, x if self.conventions.get("pre") else final
