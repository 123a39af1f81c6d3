"""The EAGLE-3 draft module: its checkpoint's format, and unrolled training compared with drafting token by token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from cluster.train.eagle3 import DraftShape, Eagle3TrainingDraft, save_draft

SHAPE = DraftShape(
    vocab_size=40,
    draft_vocab_size=12,
    hidden_size=16,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate_size=24,
    aux_layer_ids=(0, 1, 3),
)


def random_draft(shape: DraftShape = SHAPE) -> Eagle3TrainingDraft:
    torch.manual_seed(3)
    draft = Eagle3TrainingDraft(shape)
    draft.set_vocabulary(torch.randperm(shape.vocab_size)[: shape.draft_vocab_size])
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return draft


def rope(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """Rotate the pairs (j, j + d/2) of x [heads, d] by position * theta^(-2j/d), one pair at a time."""
    half = x.shape[-1] // 2
    out = x.clone()
    for j in range(half):
        angle = torch.tensor(position * theta ** (-2 * j / x.shape[-1]), dtype=torch.float64)
        out[:, j] = x[:, j] * angle.cos() - x[:, j + half] * angle.sin()
        out[:, j + half] = x[:, j + half] * angle.cos() + x[:, j] * angle.sin()
    return out


class NaiveDraft:
    """EAGLE-3 that computes one cell at a time over lists of keys and values, written from the format's description."""

    def __init__(self, tensors: dict[str, torch.Tensor], shape: DraftShape) -> None:
        self.w, self.shape = tensors, shape
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean() + self.shape.rms_norm_eps).sqrt() * self.w[name + ".weight"]

    def cell(self, embedding: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the next cell and append its key and value. Returns (hidden [H] before the norm, logits [V])."""
        w, d, position = self.w, self.shape.head_dim, len(self.keys)
        x = torch.cat([self.norm(embedding, "midlayer.input_layernorm"), self.norm(hidden, "midlayer.hidden_norm")])
        q = rope((w["midlayer.self_attn.q_proj.weight"] @ x).view(-1, d), position, self.shape.rope_theta)
        self.keys.append(rope((w["midlayer.self_attn.k_proj.weight"] @ x).view(-1, d), position, self.shape.rope_theta))
        self.values.append((w["midlayer.self_attn.v_proj.weight"] @ x).view(-1, d))
        heads = []
        for head in range(self.shape.heads):
            kv = head // (self.shape.heads // self.shape.kv_heads)
            scores = torch.stack([q[head] @ key[kv] for key in self.keys]) / d**0.5
            weights = scores.softmax(0)
            heads.append(sum((a * value[kv] for a, value in zip(weights, self.values, strict=True)), torch.zeros(d)))
        hidden = hidden + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(heads)
        y = self.norm(hidden, "midlayer.post_attention_layernorm")
        gate = functional.silu(w["midlayer.mlp.gate_proj.weight"] @ y)
        hidden = hidden + w["midlayer.mlp.down_proj.weight"] @ (gate * (w["midlayer.mlp.up_proj.weight"] @ y))
        return hidden, w["lm_head.weight"] @ self.norm(hidden, "norm")


def test_unrolled_training_steps_match_drafting_token_by_token() -> None:
    draft = random_draft().double()
    length, steps = 7, 4
    aux_hidden = torch.randn(1, length, 3 * SHAPE.hidden_size, dtype=torch.float64)
    embeddings = torch.randn(1, length + steps - 1, SHAPE.hidden_size, dtype=torch.float64)
    unrolled = draft.unroll(aux_hidden, embeddings, steps)
    tensors = {name: tensor.detach() for name, tensor in draft.state_dict().items()}
    for last in range(length):
        naive = NaiveDraft(tensors, SHAPE)
        for t in range(last + 1):
            hidden, logits = naive.cell(embeddings[0, t], tensors["fc.weight"] @ aux_hidden[0, t])
        for step in range(steps):
            torch.testing.assert_close(unrolled[step][0, last], logits, rtol=1e-9, atol=1e-9)
            if step + 1 < steps:
                hidden, logits = naive.cell(embeddings[0, last + step + 1], hidden)


def test_draft_vocabulary_maps_round_trip() -> None:
    draft = random_draft()
    chosen_ids = draft.t2d.nonzero()[:, 0]
    assert len(chosen_ids) == SHAPE.draft_vocab_size
    assert torch.equal(draft.draft_vocab_ids, chosen_ids)
    assert draft.d2t.dtype == torch.int64
    assert bool((draft.draft_vocab_ids.diff() > 0).all())
    draft_ids = torch.arange(SHAPE.draft_vocab_size)
    assert torch.equal(draft_ids + draft.d2t[draft_ids], chosen_ids)


def test_draft_checkpoint_has_exactly_the_expected_tensors(tmp_path: Path) -> None:
    draft = random_draft()
    save_draft(draft, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    h, i, v = SHAPE.hidden_size, SHAPE.intermediate_size, SHAPE.draft_vocab_size
    q, kv = SHAPE.heads * SHAPE.head_dim, SHAPE.kv_heads * SHAPE.head_dim
    expected = {
        "fc.weight": (h, 3 * h),
        "midlayer.self_attn.q_proj.weight": (q, 2 * h),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.o_proj.weight": (h, q),
        "midlayer.input_layernorm.weight": (h,),
        "midlayer.hidden_norm.weight": (h,),
        "midlayer.post_attention_layernorm.weight": (h,),
        "midlayer.mlp.gate_proj.weight": (i, h),
        "midlayer.mlp.up_proj.weight": (i, h),
        "midlayer.mlp.down_proj.weight": (h, i),
        "norm.weight": (h,),
        "lm_head.weight": (v, h),
        "d2t": (v,),
        "t2d": (SHAPE.vocab_size,),
    }
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    assert tensors["t2d"].dtype == torch.bool
    assert {t.dtype for n, t in tensors.items() if n not in {"d2t", "t2d"}} == {torch.bfloat16}
    for name, tensor in draft.state_dict().items():
        expected_tensor = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert torch.equal(tensors[name], expected_tensor), name


@pytest.mark.parametrize("step", [0, 2])
def test_unrolled_draft_is_causal(step: int) -> None:
    draft = random_draft().double()
    aux_hidden = torch.randn(1, 6, 3 * SHAPE.hidden_size, dtype=torch.float64)
    embeddings = torch.randn(1, 8, SHAPE.hidden_size, dtype=torch.float64)
    before = draft.unroll(aux_hidden, embeddings, 3)[step][0, :4]
    aux_hidden[:, 4:] += 1.0
    embeddings[:, 4 + step :] += 1.0
    torch.testing.assert_close(draft.unroll(aux_hidden, embeddings, 3)[step][0, :4], before)
