"""Text that the target writes itself, and the features a draft learns from.

The decode loop is written out for speed: keys and values lie in one preallocated buffer, which the query heads of a
group read together. It is tested against `transformers`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm
from transformers import LlamaForCausalLM

from cluster.train.eagle3 import rotate


@dataclass(frozen=True)
class Heads:
    """Attention geometry of a target."""

    query: int
    kv: int
    width: int
    theta: float

    @staticmethod
    def of(target: LlamaForCausalLM) -> "Heads":
        """Read from the target's config."""
        config: dict[str, Any] = target.config.to_dict()
        return Heads(
            int(config["num_attention_heads"]),
            int(config["num_key_value_heads"]),
            int(config["head_dim"]),
            float(config["rope_parameters"]["rope_theta"]),
        )


@torch.no_grad()
def continue_rows(
    target: LlamaForCausalLM, prompts: torch.Tensor, count: int, temperatures: torch.Tensor, seed: int
) -> torch.Tensor:
    """Prompts [B, P] with `count` sampled tokens after each: [B, P + count]. End tokens do not stop a row.

    A token is the argmax of logits / temperature plus `gumbel` of its position; temperature 0 has no noise.
    """
    rows, length = prompts.shape
    heads = Heads.of(target)
    ids = torch.cat([prompts, prompts.new_zeros(rows, count)], dim=1)
    caches = target.lm_head.weight.new_zeros(len(target.model.layers), 2, rows, heads.kv, length + count, heads.width)
    start, width = 0, length
    while True:
        hidden = _forward(target, ids[:, start : start + width], caches, start, heads)
        logits = target.lm_head(target.model.norm(hidden[:, -1]))
        position = start + width
        ids[:, position] = draw(logits, temperatures, seed, position)
        if position == length + count - 1:
            return ids
        start, width = position, 1


def _forward(
    target: LlamaForCausalLM, ids: torch.Tensor, caches: torch.Tensor, start: int, heads: Heads
) -> torch.Tensor:
    """Ids [B, q] at positions start.. to the un-normed final hidden [B, q, H]; fills the caches."""
    rows, width = ids.shape
    end = start + width
    positions = torch.arange(start, end)
    future = torch.arange(end)[None, :] > positions[:, None]
    hidden: torch.Tensor = target.model.embed_tokens(ids)
    for layer, (keys, values) in zip(target.model.layers, caches, strict=True):
        attention = layer.self_attn
        x = layer.input_layernorm(hidden)
        q, k, v = (
            projection(x).view(rows, width, -1, heads.width).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        keys[:, :, start:end] = rotate(k, positions, heads.theta)
        values[:, :, start:end] = v
        q = rotate(q, positions, heads.theta) * heads.width**-0.5
        q = q.reshape(rows, heads.kv, heads.query // heads.kv * width, heads.width)
        scores = q @ keys[:, :, :end].mT
        if width > 1:
            scores = scores.view(rows, heads.kv, -1, width, end).masked_fill(future, float("-inf")).view_as(scores)
        mixed = (scores.softmax(dim=-1) @ values[:, :, :end]).view(rows, heads.query, width, heads.width)
        hidden = hidden + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return hidden


def gumbel(rows: int, vocab_size: int, seed: int, position: int) -> torch.Tensor:
    """Gumbel noise [rows, vocab_size] of one position: a function of seed and position alone."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + position)
    return -torch.empty(rows, vocab_size).exponential_(generator=generator).log()


def draw(logits: torch.Tensor, temperatures: torch.Tensor, seed: int, position: int) -> torch.Tensor:
    """Token ids [B] from logits [B, V] for temperatures [B]."""
    if not bool(temperatures.any()):
        return logits.argmax(dim=-1)
    noise = gumbel(len(logits), logits.shape[1], seed, position).to(logits.dtype)
    return (logits + temperatures[:, None] * noise).argmax(dim=-1)


def write_samples(
    target: LlamaForCausalLM,
    prompts: torch.Tensor,
    count: int,
    temperatures: tuple[float, ...],
    *,
    batch: int,
    seed: int,
) -> torch.Tensor:
    """Continue every prompt [rows, P]; the temperatures take turns over the rows. [rows, P + count]."""
    choice = torch.tensor(temperatures)[torch.arange(len(prompts)) % len(temperatures)]
    chunks: list[torch.Tensor] = []
    with tqdm(total=len(prompts) * count, unit="tok", desc="samples", mininterval=5.0) as bar:
        for index, (rows, heat) in enumerate(zip(torch.split(prompts, batch), torch.split(choice, batch), strict=True)):
            chunks.append(continue_rows(target, rows, count, heat, seed + index))
            bar.update(len(rows) * count)
    return torch.cat(chunks)


@torch.no_grad()
def features(
    target: LlamaForCausalLM, ids: torch.Tensor, aux_layer_ids: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Aux hidden [B, T, A] (un-normed, low to high) and logits [B, T, vocab] of the target on ids [B, T]."""
    caught: dict[int, torch.Tensor] = {}

    def catcher(index: int):  # type: ignore[no-untyped-def]
        def catch(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
            caught[index] = output

        return catch

    handles = [target.model.layers[index].register_forward_hook(catcher(index)) for index in aux_layer_ids]
    try:
        logits = target(input_ids=ids, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    return torch.cat([caught[index] for index in aux_layer_ids], dim=-1), logits
