"""Train MTP layers on text that the target generates and on real text: one layer per level, or one for all levels.

Both variants read the same rows in the same order for the same number of steps, so they can be compared.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.nn import functional
from transformers import LlamaForCausalLM

from cluster.train.dataset import TokenIds, Windows, shuffled_rows
from cluster.train.draft import DraftRecipe, chain_loss, sample_text
from cluster.train.loop import TrainingRun, train_for
from cluster.train.mtp import MtpDraft, MtpShape
from cluster.train.optimizer import Optimizers
from cluster.train.target import split_parameters


@dataclass(frozen=True)
class MtpRecipe:
    """The numbers of MTP layers, of levels (tokens drafted one after the other) and of training steps. The recipe
    `draft` gives the text, the loss and the learning rates.
    """

    layers: int = 3
    levels: int = 3
    steps: int = 300
    draft: DraftRecipe = field(default_factory=lambda: DraftRecipe(samples=1024))


@dataclass(frozen=True)
class MtpText:
    """Rows of token ids [R, T], and the target's post-norm hidden states on them [R, T, H]."""

    ids: torch.Tensor
    hidden: torch.Tensor

    def __call__(self, rows: torch.Tensor) -> "MtpText":
        """Return the rows with the indices `rows`."""
        return MtpText(self.ids[rows], self.hidden[rows])


@torch.no_grad()
def read_text(target: LlamaForCausalLM, train: TokenIds, recipe: DraftRecipe, work: Path) -> MtpText:
    """Return a text of the target's samples and of one row of real text for every three samples, with the target's
    hidden states on all rows. The result is cached in `work`.
    """
    cache = work / "mtp-text.pt"
    if cache.exists():
        return MtpText(**torch.load(cache, weights_only=True))
    samples = sample_text(target, train, recipe, work / "samples.pt")
    real_text = Windows(train, samples.shape[1], max(1, len(samples) // 3), recipe.seed)(0)
    ids = torch.cat([samples, real_text])
    hidden = torch.cat(
        [target.model(input_ids=rows, use_cache=False).last_hidden_state for rows in torch.split(ids, 16)]
    )
    torch.save({"ids": ids, "hidden": hidden}, cache)
    return MtpText(ids, hidden)


def mtp_loss(draft: MtpDraft, target: LlamaForCausalLM, text: MtpText, recipe: MtpRecipe) -> torch.Tensor:
    """Return the loss over all levels on rows of T tokens. Positions 0..T-levels-1 are trained at every level."""
    length = text.ids.shape[1] - recipe.levels
    embeddings = target.model.embed_tokens(text.ids[:, 1:])
    teacher = functional.softmax(target.lm_head(text.hidden), dim=-1)
    draft_logits = draft.unroll(text.hidden[:, :length], embeddings, recipe.levels)
    return chain_loss(draft_logits, teacher, torch.ones_like(text.ids, dtype=torch.bool), recipe.draft)


def train_mtp(recipe: MtpRecipe, target: LlamaForCausalLM, train: TokenIds, *, work: Path) -> MtpDraft:
    """Train until `recipe.steps` steps are done, including those of the checkpoint in `work`, if there is one."""
    draft_recipe = recipe.draft
    text = read_text(target, train, draft_recipe, work)
    torch.manual_seed(draft_recipe.seed)
    draft = MtpDraft(MtpShape(draft_recipe.shape, recipe.layers, len(target.model.layers)), target)
    batch = max(1, draft_recipe.tokens_per_step // text.ids.shape[1])

    def loss_at(step: int) -> torch.Tensor:
        return mtp_loss(draft, target, text(shuffled_rows(step, len(text.ids), batch, draft_recipe.seed)), recipe)

    train_for(
        TrainingRun(f"mtp {recipe.layers}", work / f"mtp-{recipe.layers}.pt", steps=recipe.steps),
        draft,
        Optimizers(*split_parameters(draft), matrix_lr=draft_recipe.matrix_lr, other_lr=draft_recipe.other_lr),
        loss_at,
        lambda: f"{sum(p.numel() for p in draft.parameters()):,} parameters",
    )
    return draft
