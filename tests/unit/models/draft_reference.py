"""Drafts once more, dense and float64, written from the formats' descriptions; nothing of the product is used.

Every family is one function from (tokens after the cells, hiddens of the cells) of a whole text to (logits, recurrent).
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
    """Rotate x `[T, n, d]` at positions 0 .. T - 1; pairs are halves apart, or neighbours."""
    angle = torch.arange(x.shape[0], dtype=torch.float64)[:, None, None] * inverse
    cos, sin = angle.cos(), angle.sin()
    if not interleaved:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


NATIVE = (
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
"""Mistral's names, in the words of this file."""


def dequantised(raw: dict[str, Tensor]) -> dict[str, Tensor]:
    """FP8 weights times their `qscale_weight`; scales of activations and of the KV cache left out."""
    made = {}
    for name, tensor in raw.items():
        scale = name.removesuffix(".weight") + ".qscale_weight"
        if tensor.dtype == torch.float8_e4m3fn:
            made[name] = tensor.double() * raw[scale].double()
        elif "qscale_" not in name:
            made[name] = tensor
    return made


class Reference:
    """A checkpoint in float64; `say` are the conventions that its format states."""

    def __init__(self, folder: str, target: TargetReference, **say: Any) -> None:
        path = Path(folder)
        file = path / "consolidated.safetensors"
        raw = load_file(file if file.is_file() else path / "model.safetensors")
        config = path / ("params.json" if file.is_file() else "config.json")
        outer = json.loads(config.read_text())
        if file.is_file():
            raw = dequantised(raw)
            for theirs, ours in NATIVE:
                raw = {re.sub(theirs, ours, name): tensor for name, tensor in raw.items()}
        self.config: dict[str, Any] = {**outer, **outer.get("transformer_layer_config", {})}
        self.w = {re.sub(r"^model\.", "", n): t.double() if t.is_floating_point() else t for n, t in raw.items()}
        self.target, self.say = target, say
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
        return rms(x, weight + 1 if self.say.get("gemma") else weight, self.eps)

    def latent(self, name: str, x: Tensor) -> Tensor:
        """MLA as published: full keys and values per head, rope over neighbouring pairs of the last part.

        Its two inner norms keep 1e-6 whatever the config says, as in DeepSeek's own code.
        """

        def inner(part: str, y: Tensor) -> Tensor:
            return rms(y, self.w[f"{name}.{part}.weight"], 1e-6)

        c, t = self.config, x.shape[0]
        nope, turned, value, rank = (
            c[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
        )
        inverse = frequencies(c, turned)
        q = self.linear(f"{name}.q_b_proj", inner("q_a_layernorm", self.linear(f"{name}.q_a_proj", x)))
        q = q.view(t, self.heads, nope + turned)
        q = torch.cat([q[..., :nope], rotate(q[..., nope:], inverse, True)], -1)
        down = self.linear(f"{name}.kv_a_proj_with_mqa", x)
        up = self.linear(f"{name}.kv_b_proj", inner("kv_a_layernorm", down[:, :rank]))
        up = up.view(t, self.heads, nope + value)
        key = rotate(down[:, None, rank:], inverse, True).expand(t, self.heads, turned)
        weights = torch.einsum("qhd,khd->hqk", q, torch.cat([up[..., :nope], key], -1)) / (nope + turned) ** 0.5
        weights = weights.masked_fill(torch.ones(t, t).triu(1).bool(), float("-inf")).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, up[..., nope:]).reshape(t, -1)
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
        pairs = bool(self.say.get("interleaved"))
        q, k = rotate(q, self.inverse, pairs), rotate(k, self.inverse, pairs)
        if "llama_4_scaling" in self.config:
            scaling = self.config["llama_4_scaling"]
            block = torch.arange(t) // scaling["original_max_position_embeddings"]
            q = q * (1 + scaling["beta"] * torch.log(1 + block.double()))[:, None, None]
        group = self.heads // self.kv_heads
        weights = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) / self.d**0.5
        far = torch.arange(t)[:, None] - torch.arange(t)
        window = self.say.get("window", {}).get(name)
        hidden = (far < 0) | (far >= window) if window else far < 0
        weights = weights.masked_fill(hidden, float("-inf")).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1)).reshape(t, -1)
        return self.linear(f"{name}.o_proj", out)

    def experts(self, name: str, x: Tensor) -> Tensor:
        """DeepSeek-V3's: sigmoid scores, the correction for the choice only, first of groups by their two best, then of
        experts; the chosen scores add up to `routed_scaling_factor`; the shared expert is added.
        """
        c = self.config
        count, groups = c["n_routed_experts"], c["n_group"]
        rows = []
        for row in x:
            scores = (self.w[f"{name}.gate.weight"] @ row).sigmoid()
            ranked = scores + self.w[f"{name}.gate.e_score_correction_bias"]
            by_group = ranked.view(groups, -1).sort(descending=True).values[:, :2].sum(1)
            kept = set(by_group.argsort(descending=True)[: c["topk_group"]].tolist())
            allowed = [e for e in range(count) if e // (count // groups) in kept]
            chosen = sorted(allowed, key=lambda e: -float(ranked[e]))[: c["num_experts_per_tok"]]
            share = scores[chosen] / scores[chosen].sum() * c["routed_scaling_factor"]
            rows.append(sum(w * self.mlp(f"{name}.experts.{e}", row) for w, e in zip(share, chosen, strict=True)))
        return torch.stack(rows) + self.mlp(f"{name}.shared_experts", x)

    def mlp(self, name: str, x: Tensor) -> Tensor:
        if f"{name}.gate.weight" in self.w:
            return self.experts(name, x)
        gate = torch.nn.functional.silu(self.linear(f"{name}.gate_proj", x))
        return self.linear(f"{name}.down_proj", gate * self.linear(f"{name}.up_proj", x))

    def layer(self, name: str, x: Tensor, norm: str | None = "input_layernorm") -> Tensor:
        """An ordinary decoder layer whose norm before attention has this name, or is not there."""
        x = x + self.attention(f"{name}.self_attn", self.norm(f"{name}.{norm}", x) if norm else x)
        return x + self.mlp(f"{name}.mlp", self.norm(f"{name}.post_attention_layernorm", x))

    def logits(self, x: Tensor) -> Tensor:
        return x @ self.head.T


class Eagle3(Reference):
    """EAGLE-3. Say: boundaries (None: the target's last hidden), residual_normed, post, later (per layer >= 1)."""

    def fuse(self, seen: TargetPass) -> Tensor:
        if self.say["boundaries"] is None:
            return seen.hidden
        parts = [seen.stream[b] for b in self.say["boundaries"]]
        names = ["aux_norm_low", "aux_norm_mid", "aux_norm_high"]
        if "aux_norm_low.weight" not in self.w:
            names = [f"fc_norm.{i}" for i in range(len(parts))]
        if f"{names[0]}.weight" in self.w:
            parts = [self.norm(name, part) for name, part in zip(names, parts, strict=True)]
        joined = torch.cat(parts, -1)
        return self.linear("fc", self.norm("input_norm", joined) if "input_norm.weight" in self.w else joined)

    def pair(self, name: str, embedding: Tensor, hidden: Tensor) -> Tensor:
        normed = self.norm(f"{name}.hidden_norm", hidden) if f"{name}.hidden_norm.weight" in self.w else hidden
        x = torch.cat([self.norm(f"{name}.input_layernorm", embedding), normed], -1)
        x = (normed if self.say.get("residual_normed") else hidden) + self.attention(f"{name}.self_attn", x)
        return x + self.mlp(f"{name}.mlp", self.norm(f"{name}.post_attention_layernorm", x))

    def run(self, following: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        embedding = self.embed[torch.tensor(following)]
        first = "midlayer" if any(name.startswith("midlayer.") for name in self.w) else "layers.0"
        x = self.pair(first, embedding, hidden)
        for i, meaning in enumerate(self.say.get("later", ()), start=1):
            name = f"layers.{i}"
            x = self.pair(name, embedding, x) if meaning == "pair" else self.layer(name, x, meaning)
        final = self.norm("norm", x) if "norm.weight" in self.w else x
        return self.logits(final), final if self.say.get("post") else x


class Eagle1(Reference):
    """EAGLE-1: nothing is normed before the first attention, nothing after the last layer."""

    def fuse(self, seen: TargetPass) -> Tensor:
        return seen.hidden

    def run(self, following: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        x = self.linear("fc", torch.cat([self.embed[torch.tensor(following)], hidden], -1))
        count = self.config.get("num_hidden_layers") or self.config["model"]["num_hidden_layers"]
        for i in range(count):
            x = self.layer(f"layers.{i}", x, "input_layernorm" if i else None)
        return self.logits(x), x


class Mistral(Reference):
    """Mistral EAGLE: ordinary layers after `eagle_linear`, a final norm; the next level reads the normed output."""

    def fuse(self, seen: TargetPass) -> Tensor:
        return seen.hidden

    def run(self, following: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        x = self.linear("fc", torch.cat([self.embed[torch.tensor(following)], hidden], -1))
        for i in range(self.config["n_layers"]):
            x = self.layer(f"layers.{i}", x)
        final = self.norm("norm", x)
        return self.logits(final), x if self.say.get("pre") else final


class Mtp(Reference):
    """One MTP layer used again and again. Say: at, inner, parts (of embed, hidden, joined, out), hidden_first, gemma,
    zero_first, head, pre."""

    def fuse(self, seen: TargetPass) -> Tensor:
        return seen.hidden

    def run(self, following: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        at, (of_embed, of_hidden, joined, out) = self.say["at"], self.say["parts"]
        embedding = self.embed[torch.tensor(following)].clone()
        if self.say.get("zero_first"):
            embedding[0] = 0
        both = [self.norm(at + of_embed, embedding), self.norm(at + of_hidden, hidden)]
        x = self.linear(at + joined, torch.cat(both[::-1] if self.say.get("hidden_first") else both, -1))
        x = self.layer(self.say.get("inner", at).rstrip("."), x)
        final = self.norm(at + out, x)
        head = self.w[self.say["head"]] if "head" in self.say else self.head
        return final @ head.T, x if self.say.get("pre") else final
