"""Train the target: a deep and narrow Llama, for a given wall time, on windows of 512 tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from cluster.train.dataset import Ids, Windows
from cluster.train.optimizer import Optimizers, clock_factor


@dataclass(frozen=True)
class TargetRecipe:
    """Shape of the target and how it is trained."""

    vocab_size: int = 2048
    hidden_size: int = 256
    layers: int = 10
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 704
    length: int = 512
    batch: int = 8
    matrix_lr: float = 0.02
    other_lr: float = 0.004
    seed: int = 0


@dataclass(frozen=True)
class TargetReport:
    """What training cost and what came out, on held-out text, with the weights as saved."""

    steps: int
    tokens: int
    seconds: float
    heldout_loss: float


def build_target(recipe: TargetRecipe) -> LlamaForCausalLM:
    """A fresh target in float32; the last matrix of every block starts at zero."""
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
    """(matrices of the layers, everything else that is trained)."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            is_matrix = parameter.ndim == 2 and "embed_tokens" not in name and "lm_head" not in name
            (matrices if is_matrix else others).append(parameter)
    return matrices, others


def next_token_loss(target: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next token; ids [rows, length]."""
    logits = target(input_ids=ids, use_cache=False).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def heldout_loss(target: LlamaForCausalLM, ids: Ids, length: int, limit: int | None = None) -> float:
    """Mean cross entropy over consecutive windows of held-out ids."""
    rows = torch.from_numpy(ids)
    count = len(rows) // length
    windows = rows[: count * length].view(count, length)[:limit]
    losses = [float(next_token_loss(target, chunk)) * len(chunk) for chunk in windows.split(8)]
    return sum(losses) / len(windows)


def train_target(
    recipe: TargetRecipe, train: Ids, heldout: Ids, *, minutes: float, checkpoint: Path, save_every: float = 240.0
) -> tuple[LlamaForCausalLM, TargetReport]:
    """Train until `minutes` of training time are spent, counting the time before a resume."""
    target = build_target(recipe).train()
    optimizers = Optimizers(*split_parameters(target), matrix_lr=recipe.matrix_lr, other_lr=recipe.other_lr)
    step, elapsed = 0, 0.0
    if checkpoint.exists():
        stored = torch.load(checkpoint, weights_only=True)
        target.load_state_dict(stored["target"])
        optimizers.load_state_dict(stored["optimizers"])
        step, elapsed = int(stored["step"]), float(stored["elapsed"])
    windows = Windows(train, recipe.length, recipe.batch, recipe.seed)
    budget = minutes * 60.0
    saved = elapsed
    smooth = 0.0
    bar = tqdm(total=round(budget), initial=round(elapsed), unit="s", desc="target", mininterval=5.0)
    while elapsed < budget:
        started = time.monotonic()
        loss = next_token_loss(target, windows(step))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizers.step(clock_factor(elapsed / budget))
        step += 1
        elapsed += time.monotonic() - started
        smooth = float(loss) if smooth == 0.0 else 0.95 * smooth + 0.05 * float(loss)
        bar.set_postfix(step=step, loss=f"{smooth:.3f}", refresh=False)
        bar.update(round(elapsed) - bar.n)
        if elapsed - saved > save_every or elapsed >= budget:
            saved = elapsed
            _save_checkpoint(checkpoint, target, optimizers, step, elapsed)
            bar.write(f"step {step}, {elapsed:.0f} s: held-out loss {heldout_loss(target, heldout, recipe.length, 32):.4f}")
    bar.close()
    report_tokens = step * recipe.batch * recipe.length
    rounded = round_to_bf16(target)
    loss_after = heldout_loss(rounded, heldout, recipe.length)
    return rounded, TargetReport(step, report_tokens, elapsed, loss_after)


def _save_checkpoint(
    path: Path, target: LlamaForCausalLM, optimizers: Optimizers, step: int, elapsed: float
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "target": target.state_dict(),
        "optimizers": optimizers.state_dict(),
        "step": step,
        "elapsed": elapsed,
    }
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def round_to_bf16(target: LlamaForCausalLM) -> LlamaForCausalLM:
    """The same model with every weight rounded to bf16, kept in float32 and frozen for use as a teacher."""
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return target.eval().requires_grad_(False)


def save_target(target: LlamaForCausalLM, directory: Path, stop_ids: list[int]) -> None:
    """Write the checkpoint in bf16 safetensors; the model itself is left in float32."""
    directory.mkdir(parents=True, exist_ok=True)
    copy = LlamaForCausalLM(target.config)
    copy.load_state_dict(target.state_dict())
    copy = copy.bfloat16()
    copy.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=stop_ids, pad_token_id=0)
    copy.save_pretrained(str(directory))


def load_target(directory: Path) -> LlamaForCausalLM:
    """The saved target in float32, frozen."""
    target: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(str(directory), dtype=torch.float32)
    return target.eval().requires_grad_(False)
