"""Train the target, a deep and narrow Llama, for a given wall time."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from cluster.train.dataset import TokenIds, Windows, with_repeats
from cluster.train.loop import TrainingRun, train_for
from cluster.train.optimizer import Optimizers


@dataclass(frozen=True)
class TargetRecipe:
    """The shape of the target and its training parameters."""

    vocab_size: int = 2048
    hidden_size: int = 256
    layers: int = 10
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 704
    length: int = 512  # window of every fourth step, in tokens; to save time, other windows are half as long
    tokens_per_step: int = 4096
    repeat_steps: int = 380  # before this step, a quarter of the rows come from `with_repeats`
    matrix_lr: float = 0.02
    other_lr: float = 0.004
    seed: int = 0


@dataclass(frozen=True)
class TargetReport:
    """The cost of training, and the loss on held-out text with the saved (bf16) weights."""

    steps: int
    tokens: int
    seconds: float
    heldout_loss: float


def build_target(recipe: TargetRecipe) -> LlamaForCausalLM:
    """Return an untrained target in float32. The output matrix of every attention and every MLP starts at zero."""
    config = LlamaConfig(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        intermediate_size=recipe.intermediate_size,
        max_position_embeddings=16384,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(recipe.seed)
    target = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
    return target


def split_parameters(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the layers' matrices, for Muon, and all other trained parameters, for AdamW. Parameters that are not
    trained are left out.
    """
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            is_matrix = parameter.ndim == 2 and "embed_tokens" not in name and "lm_head" not in name
            (matrices if is_matrix else others).append(parameter)
    return matrices, others


def next_token_loss(target: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of the next token; ids [rows, length]."""
    logits = target(input_ids=ids, use_cache=False).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def heldout_loss(target: LlamaForCausalLM, ids: TokenIds, length: int, limit: int | None = None) -> float:
    """Return the mean cross entropy over consecutive windows of `length` held-out ids. At most `limit` windows are
    read; None reads all.
    """
    rows = torch.from_numpy(ids)
    count = len(rows) // length
    windows = rows[: count * length].view(count, length)[:limit]
    losses = [float(next_token_loss(target, chunk)) * len(chunk) for chunk in torch.split(windows, 8)]
    return sum(losses) / len(windows)


def train_target(
    recipe: TargetRecipe, train: TokenIds, heldout: TokenIds, *, minutes: float, checkpoint: Path
) -> tuple[LlamaForCausalLM, TargetReport]:
    """Train for `minutes` in all, before and after a resume. Then round the weights to bf16 and measure the loss."""
    target = build_target(recipe).train()
    optimizers = Optimizers(*split_parameters(target), matrix_lr=recipe.matrix_lr, other_lr=recipe.other_lr)
    half_length = recipe.length // 2
    long_rows = Windows(train, recipe.length, recipe.tokens_per_step // recipe.length, recipe.seed)
    short_rows = Windows(train, half_length, recipe.tokens_per_step // half_length, recipe.seed + 1)

    def loss_at(step: int) -> torch.Tensor:
        ids = (long_rows if step % 4 == 3 else short_rows)(step)
        return next_token_loss(target, with_repeats(ids, 0.25, step) if step < recipe.repeat_steps else ids)

    steps, seconds = train_for(
        TrainingRun("target", checkpoint, minutes),
        target,
        optimizers,
        loss_at,
        lambda: f"held-out loss {heldout_loss(target, heldout, recipe.length, 32):.4f}",
    )
    rounded_target = round_to_bf16(target)
    loss = heldout_loss(rounded_target, heldout, recipe.length)
    return rounded_target, TargetReport(steps, steps * recipe.tokens_per_step, seconds, loss)


def round_to_bf16(target: LlamaForCausalLM) -> LlamaForCausalLM:
    """Round every weight in place to a value of bf16, but keep the type float32. Freeze `target` and return it."""
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.copy_(parameter.bfloat16().float())
    target.train(False)
    target.requires_grad_(False)
    return target


def save_target(target: LlamaForCausalLM, directory: Path, stop_ids: list[int]) -> None:
    """Write the checkpoint as bf16 safetensors; `target` itself stays in float32."""
    directory.mkdir(parents=True, exist_ok=True)
    copy = LlamaForCausalLM(target.config)
    copy.load_state_dict(target.state_dict())
    copy = copy.bfloat16()
    copy.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=0, eos_token_id=stop_ids, pad_token_id=0
    )
    copy.save_pretrained(str(directory))


def load_target(directory: Path) -> LlamaForCausalLM:
    """Return the saved target in float32, frozen."""
    target: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(str(directory), dtype=torch.float32)
    target.train(False)
    target.requires_grad_(False)
    return target
