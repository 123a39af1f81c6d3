"""The EAGLE-3 draft as a training module, with SpecForge's tensor names and checkpoint format.

Shapes: B rows, T cells, H hidden width, A = num_aux * H, V draft vocabulary, S unrolled steps. A cell is one position
of a row, with its key and value. At step 0, cell t reads the target's aux hidden state (the outputs of some layers) at
t and the embedding of token t+1, has rotary position t and predicts token t+2.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP


@dataclass(frozen=True)
class DraftShape:
    """The sizes of a draft, and the target layers whose hidden states it reads."""

    vocab_size: int = 2048
    draft_vocab_size: int = 1536
    hidden_size: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 704
    aux_layer_ids: tuple[int, ...] = (2, 5, 8)
    """In SpecForge's numbering: id i is the output of layer i, the residual stream that enters layer i + 1."""
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 16384


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Apply rotary embedding in the neox layout (split halves). x [B, heads, T, d], positions [T]."""
    half = x.shape[-1] // 2
    exponents = torch.arange(half, dtype=torch.float64) / half
    angles = positions.double()[:, None] * theta**-exponents
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


class Attention(nn.Module):
    """Grouped-query attention with an input of `width` numbers per row."""

    def __init__(self, shape: DraftShape, width: int) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(width, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, cells: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Map x [B, T, width] to the attention output [B, T, H]. `cells` has the keys and values of all earlier steps,
        so this is step len(cells); its own keys and values are appended.

        A query at cell t sees cells 0..t of step 0 and, of each later step, only cell t. When drafting, the KV cache
        holds exactly these cells.
        """
        shape, step = self.shape, len(cells)
        rows, length = x.shape[:2]
        heads_per_kv_head = shape.heads // shape.kv_heads
        positions = torch.arange(step, step + length)

        def split(y: torch.Tensor, heads: int) -> torch.Tensor:
            return y.view(rows, length, heads, shape.head_dim).transpose(1, 2)

        q = rotate(split(self.q_proj(x), shape.heads), positions, shape.rope_theta) * shape.head_dim**-0.5
        k = rotate(split(self.k_proj(x), shape.kv_heads), positions, shape.rope_theta)
        v = split(self.v_proj(x), shape.kv_heads)
        cells.append((k, v))
        q = q.reshape(rows, shape.kv_heads, heads_per_kv_head, length, shape.head_dim)
        first_k, first_v = cells[0]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = (q.flatten(2, 3) @ first_k.mT).view(rows, shape.kv_heads, heads_per_kv_head, length, length)
        scores = scores.masked_fill(future, float("-inf"))
        later_scores = [(q * key[:, :, None]).sum(-1, keepdim=True) for key, _ in cells[1:]]  # cell t with cell t alone
        weights = torch.cat([scores, *later_scores], dim=-1).softmax(dim=-1)
        attended = (weights[..., :length].flatten(2, 3) @ first_v).view_as(q)
        for index, (_, value) in enumerate(cells[1:]):
            attended = attended + weights[..., length + index, None] * value[:, :, None]
        output: torch.Tensor = self.o_proj(attended.flatten(1, 2).transpose(1, 2).flatten(2))
        return output


def mlp(shape: DraftShape) -> LlamaMLP:
    """Return a SwiGLU MLP, [.., H] to [.., H]."""
    # An MLP has no heads, but the config validates their number.
    width, inner = shape.hidden_size, shape.intermediate_size
    config = LlamaConfig(hidden_size=width, intermediate_size=inner, num_attention_heads=1)
    return LlamaMLP(config)  # type: ignore[no-untyped-call]


class MidLayer(nn.Module):
    """The draft's only layer: attention over [norm(embedding), norm(hidden)], then the MLP."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape, 2 * shape.hidden_size)
        self.mlp = mlp(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self, embedding: torch.Tensor, hidden: torch.Tensor, cells: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """Map embedding and hidden states [B, T, H] to the next step's hidden states [B, T, H], before the norm."""
        x = torch.cat([self.input_layernorm(embedding), self.hidden_norm(hidden)], dim=-1)
        hidden = hidden + self.self_attn(x, cells)
        out: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Eagle3TrainingDraft(nn.Module):
    """The draft: `fc`, one layer, norm and head. It has no embedding: callers pass the target's token embeddings."""

    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.aux_layer_ids) * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = MidLayer(shape)
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(shape.vocab_size, dtype=torch.bool))

    @property
    def draft_vocab_ids(self) -> torch.Tensor:
        """The target ids of the draft vocabulary, ascending, [V]. `d2t` stores target id minus draft id."""
        return torch.arange(len(self.d2t)) + self.d2t

    def set_vocabulary(self, draft_vocab_ids: torch.Tensor) -> None:
        """Set the draft vocabulary to these distinct target ids [V]."""
        ascending = draft_vocab_ids.sort().values
        self.d2t.copy_(ascending - torch.arange(len(ascending)))
        self.t2d.zero_()
        self.t2d[ascending] = True

    def unroll(self, aux_hidden: torch.Tensor, embeddings: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """Run EAGLE-3's training-time test: the draft reads its own hidden states after step 0. Return the logits
        [B, T, V] of each of `steps` steps.

        `aux_hidden` [B, T, A] is of positions 0..T-1; `embeddings` [B, T + steps - 1, H] are of the tokens at positions
        1..T+steps-1. Step i at cell t reads token t+1+i and predicts token t+2+i.
        """
        hidden = self.fc(aux_hidden)
        length = hidden.shape[1]
        cells: list[tuple[torch.Tensor, torch.Tensor]] = []
        logits: list[torch.Tensor] = []
        for step in range(steps):
            hidden = self.midlayer(embeddings[:, step : step + length], hidden, cells)
            logits.append(self.lm_head(self.norm(hidden)))
        return logits


def save_draft(draft: Eagle3TrainingDraft, directory: Path) -> None:
    """Write config.json and model.safetensors, with weights in bf16."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": draft.shape.draft_vocab_size,
        "tie_word_embeddings": False,
        "num_aux_hidden_states": len(draft.shape.aux_layer_ids),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(draft.shape.aux_layer_ids),
            "use_aux_hidden_state": True,
        },
    }
    tensors = {
        name: tensor.bfloat16().contiguous() if tensor.is_floating_point() else tensor.clone()
        for name, tensor in draft.state_dict().items()
    }
    write_checkpoint(directory, draft.shape, tensors, config)


def write_checkpoint(
    directory: Path, shape: DraftShape, tensors: dict[str, torch.Tensor], format_config: dict[str, object]
) -> None:
    """Write `tensors` to model.safetensors, and the sizes of `shape` and all of `format_config` to config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        **format_config,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.max_position_embeddings,
        "vocab_size": shape.vocab_size,
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
