"""MTP layers as a training module, saved in Step-3.5's format: one layer per level, or one layer for all levels.

Shapes: B rows, T cells, H hidden width, V vocabulary. A level drafts one token, and a cell is one position of a row,
with its key and value. Cell t of level i (from 0) reads the embedding of token t+1+i and a hidden state at t, and
predicts token t+2+i. At level 0 the hidden state is the target's, after the final norm. At level i > 0 it is the output
of level i-1 before that level's final norm. Embedding and head are the target's; the checkpoint also stores the head,
because the format requires one. Sources: DeepSeek-V3's report, section 2.2; the table of the format in
`cluster/arch/draft/mtp.py`.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaForCausalLM

from cluster.train.eagle3 import Attention, DraftShape, mlp, write_checkpoint


class Decoder(nn.Module):
    """One decoder layer with the target's structure."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape, shape.hidden_size)
        self.mlp = mlp(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, cells: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Map the residual stream [B, T, H] that enters the layer to the stream that leaves it. `cells` is the argument
        of `Attention.forward`.
        """
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cells)
        out: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class SharedHead(nn.Module):
    """The trained tensors that the format stores under `shared_head`. The head matrix is not among them."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class MtpLayer(nn.Module):
    """One MTP layer: norms and a projection of [embedding, hidden], a decoder layer, and the norm before the head."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.enorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hnorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.transformer = Decoder(shape)
        self.shared_head = SharedHead(shape)

    def forward(
        self, embedding: torch.Tensor, hidden: torch.Tensor, cells: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """Map embedding and hidden states [B, T, H] to the next level's hidden states [B, T, H], before the norm."""
        layer_input = torch.cat([self.enorm(embedding), self.hnorm(hidden)], dim=-1)
        out: torch.Tensor = self.transformer(self.eh_proj(layer_input), cells)
        return out


@dataclass(frozen=True)
class MtpShape:
    """The shape and the number of MTP layers. In the checkpoint their indices begin at `first_index`, which is the
    number of the target's layers.
    """

    layer: DraftShape
    count: int  # the number of levels, or 1 if one layer serves all levels
    first_index: int


class MtpDraft(nn.Module):
    """The MTP layers. Callers pass embedded tokens. `head` [V, H] is the target's head and is not trained."""

    head: torch.Tensor

    def __init__(self, shape: MtpShape, target: LlamaForCausalLM) -> None:
        """Initialise each MTP layer with the target's last layer and final norm, and with a projection that mostly
        copies the hidden state.
        """
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleList(MtpLayer(shape.layer) for _ in range(shape.count))
        self.register_buffer("head", target.lm_head.weight.detach(), persistent=False)
        last, width = target.model.layers[-1], shape.layer.hidden_size
        with torch.no_grad():
            for layer in self.layers:
                assert isinstance(layer, MtpLayer)
                layer.transformer.load_state_dict(last.state_dict())
                layer.shared_head.norm.weight.copy_(target.model.norm.weight)
                layer.eh_proj.weight.mul_(0.1)
                layer.eh_proj.weight[:, width:] += torch.eye(width)

    def unroll(self, hidden: torch.Tensor, embeddings: torch.Tensor, levels: int) -> list[torch.Tensor]:
        """Return the logits [B, T, V] of each of `levels` levels.

        `hidden` [B, T, H] is the target's at positions 0..T-1; `embeddings` [B, T + levels - 1, H] are of the tokens at
        positions 1..T+levels-1. With one layer per level, each layer has its own KV cells. A single layer for all
        levels sees the cells of level 0 up to the query's position and, of every later level, only the cell at that
        position. When drafting, its KV cache holds exactly these cells.
        """
        length, shares_one_layer = hidden.shape[1], self.shape.count == 1
        cells: list[tuple[torch.Tensor, torch.Tensor]] = []
        logits: list[torch.Tensor] = []
        for level in range(levels):
            layer = self.layers[0 if shares_one_layer else level]
            assert isinstance(layer, MtpLayer)
            hidden = layer(embeddings[:, level : level + length], hidden, cells if shares_one_layer else [])
            logits.append(layer.shared_head.norm(hidden) @ self.head.T)
        return logits


def save_mtp(draft: MtpDraft, directory: Path) -> None:
    """Write config.json and model.safetensors in bf16. The format stores norm weights as weight - 1."""
    first_index = draft.shape.first_index
    config = {
        "architectures": ["Step3p5MTP"],
        "model_type": "step3p5_mtp",
        "num_hidden_layers": first_index,
        "num_nextn_predict_layers": draft.shape.count,
        "target_hidden": "post",  # otherwise the format means the hidden state before the target's final norm
    }
    tensors: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(draft.layers):
        prefix = f"model.layers.{first_index + index}."
        for name, tensor in layer.state_dict().items():
            tensors[prefix + name] = (tensor - 1 if tensor.ndim == 1 else tensor).bfloat16().contiguous()
        tensors[prefix + "shared_head.output.weight"] = draft.head.bfloat16().clone()
    write_checkpoint(directory, draft.shape.layer, tensors, config)
