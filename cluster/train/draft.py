"""Train the EAGLE-3 draft by training-time test, on text that the target generates and on real text."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.nn import functional
from transformers import LlamaForCausalLM

from cluster.train.acceptance import Acceptance, AcceptanceProbe
from cluster.train.dataset import TokenIds, Windows, shuffled_rows
from cluster.train.eagle3 import DraftShape, Eagle3TrainingDraft
from cluster.train.loop import TrainingRun, train_for
from cluster.train.optimizer import Optimizers
from cluster.train.samples import features, write_samples
from cluster.train.target import split_parameters


@dataclass(frozen=True)
class DraftRecipe:
    """The shape of the draft, the text it is trained on, and the training parameters."""

    shape: DraftShape = field(default_factory=DraftShape)
    steps: int = 5  # unrolled steps of the training-time test
    step_decay: float = 0.8
    overlap_sharpness: float = 3.0
    """With a larger value, less overlap with the target changes the loss from cross entropy to 1 - overlap (see
    `chain_loss`).
    """
    prompt_length: int = 64
    sample_length: int = 192
    samples: int = 1280
    temperatures: tuple[float, ...] = (0.0, 0.8, 1.0)
    sample_batch: int = 128
    length: int = 512  # window of real text, in tokens; samples have prompt_length + sample_length tokens
    tokens_per_step: int = 2048
    matrix_lr: float = 0.015
    other_lr: float = 0.002
    seed: int = 1


@dataclass(frozen=True)
class DraftReport:
    """The cost of training, the share of the text's tokens that the draft vocabulary covers, and the acceptance of the
    saved weights by temperature.
    """

    steps: int
    tokens: int
    sampled_tokens: int
    seconds: float
    coverage: float
    acceptance: dict[str, Acceptance]


def most_frequent(ids: torch.Tensor, vocab_size: int, count: int) -> tuple[torch.Tensor, float]:
    """Return the `count` most frequent ids of a text, ascending, and the share of the text that these ids cover."""
    counts = torch.bincount(ids.flatten(), minlength=vocab_size)
    top_ids = counts.topk(count).indices
    return top_ids.sort().values, float(counts[top_ids].sum() / counts.sum())


@torch.no_grad()
def start_from_target(draft: Eagle3TrainingDraft, target: LlamaForCausalLM) -> None:
    """Initialise the draft near the target. The head gets the target's rows for the draft vocabulary. The layer gets
    the weights of the target's last layer; in its attention input, they apply to the half with the hidden state. `fc`
    mostly copies the highest aux hidden state.
    """
    width = draft.shape.hidden_size  # the attention input is [embedding, hidden], each of this width
    last_layer = target.model.layers[-1]
    attention = draft.midlayer.self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(attention, name).weight
        weight[:, :width].mul_(0.5)
        weight[:, width:].copy_(getattr(last_layer.self_attn, name).weight)
    attention.o_proj.weight.copy_(last_layer.self_attn.o_proj.weight)
    draft.midlayer.mlp.load_state_dict(last_layer.mlp.state_dict())
    draft.midlayer.hidden_norm.weight.copy_(last_layer.input_layernorm.weight)
    draft.midlayer.post_attention_layernorm.weight.copy_(last_layer.post_attention_layernorm.weight)
    draft.norm.weight.copy_(target.model.norm.weight)
    draft.lm_head.weight.copy_(target.lm_head.weight[draft.draft_vocab_ids])
    draft.fc.weight.mul_(0.1)
    draft.fc.weight[:, -width:] += torch.eye(width)


def unrolled_loss(
    draft: Eagle3TrainingDraft, target: LlamaForCausalLM, ids: torch.Tensor, recipe: DraftRecipe
) -> torch.Tensor:
    """Return the loss of all S unrolled steps on ids [B, L]. Positions 0..L-S-1 are trained at every step.

    A position counts only if the target's likeliest token is in the draft vocabulary. The teacher is the target's
    distribution, restricted to that vocabulary and renormalised.
    """
    length = ids.shape[1] - recipe.steps
    aux_hidden, logits = features(target, ids, recipe.shape.aux_layer_ids)
    embeddings = target.model.embed_tokens(ids[:, 1:])
    is_usable = draft.t2d[logits.argmax(dim=-1)]
    teacher = functional.softmax(logits[..., draft.draft_vocab_ids], dim=-1)
    return chain_loss(draft.unroll(aux_hidden[:, :length], embeddings, recipe.steps), teacher, is_usable, recipe)


def chain_loss(
    draft_logits: list[torch.Tensor], teacher: torch.Tensor, usable: torch.Tensor, recipe: DraftRecipe
) -> torch.Tensor:
    """Return the weighted mean of the losses of a chain's steps. `draft_logits` has one tensor of logits [B, T, V] per
    step; `teacher` is [B, L, V]; `usable` [B, L] selects the positions that count.

    Step i at position t is compared with the teacher at position t + 1 + i. p is the teacher's distribution, q the
    draft's. The loss of a position is w * CE(p, q) + (1 - w) * (1 - overlap), where overlap = sum(min(p, q)) is the
    share of accepted tokens, and w = exp(-sharpness * overlap). Step i has the weight `step_decay` ** i.
    """
    length = draft_logits[0].shape[1]
    total = teacher.new_zeros(())
    weight_sum = 0.0
    for step, logits in enumerate(draft_logits):
        cells = slice(step + 1, step + 1 + length)
        p, log_q = teacher[:, cells], logits.log_softmax(dim=-1)
        cross_entropy = -(p * log_q).sum(-1)
        overlap = torch.minimum(p, log_q.exp()).sum(-1)
        cross_entropy_weight = torch.exp(-recipe.overlap_sharpness * overlap.detach())
        position_loss = cross_entropy_weight * cross_entropy + (1 - cross_entropy_weight) * (1 - overlap)
        weight = recipe.step_decay**step
        total = total + weight * position_loss[usable[:, cells]].mean()
        weight_sum += weight
    return total / weight_sum


class DraftText:
    """Training batches. Every fourth step has real text. Other steps have text that the target generated, because the
    draft will draft such text.
    """

    def __init__(self, samples: torch.Tensor, train: TokenIds, recipe: DraftRecipe) -> None:
        self.samples = samples
        self.rows = max(1, recipe.tokens_per_step // samples.shape[1])
        self.windows = Windows(train, recipe.length, max(1, recipe.tokens_per_step // recipe.length), recipe.seed)
        self.seed = recipe.seed

    def __call__(self, step: int) -> torch.Tensor:
        """Return the token ids [B, L] of one step."""
        cycle, step_in_cycle = divmod(step, 4)
        if step_in_cycle == 3:
            return self.windows(cycle)
        return self.samples[shuffled_rows(3 * cycle + step_in_cycle, len(self.samples), self.rows, self.seed)]


def sample_text(target: LlamaForCausalLM, train: TokenIds, recipe: DraftRecipe, cache: Path) -> torch.Tensor:
    """Return prompts from the train text with the target's continuations, [samples, prompt + sample length]. The result
    is cached in the file `cache`.
    """
    if cache.exists():
        stored: torch.Tensor = torch.load(cache, weights_only=True)
        return stored
    prompts = Windows(train, recipe.prompt_length, recipe.samples, recipe.seed + 100)(0)
    samples = write_samples(
        target, prompts, recipe.sample_length, recipe.temperatures, batch=recipe.sample_batch, seed=recipe.seed
    )
    cache.parent.mkdir(parents=True, exist_ok=True)
    torch.save(samples, cache)
    return samples


def train_draft(
    recipe: DraftRecipe,
    target: LlamaForCausalLM,
    train: TokenIds,
    heldout_prompts: list[list[int]],
    *,
    minutes: float,
    work: Path,
) -> tuple[Eagle3TrainingDraft, DraftReport]:
    """Generate samples with the target, train for `minutes` on them and on real text, round the weights to bf16, and
    measure the acceptance. Training resumes from a checkpoint in `work`.
    """
    samples = sample_text(target, train, recipe, work / "samples.pt")
    text = torch.cat([samples.flatten(), torch.from_numpy(train)])
    vocab_ids, coverage = most_frequent(text, recipe.shape.vocab_size, recipe.shape.draft_vocab_size)
    torch.manual_seed(recipe.seed)
    draft = Eagle3TrainingDraft(recipe.shape)
    draft.set_vocabulary(vocab_ids)
    start_from_target(draft, target)
    prompts = torch.tensor(heldout_prompts)
    probes = {
        f"{temperature}": AcceptanceProbe(target, prompts, 128, temperature, recipe.shape.aux_layer_ids)
        for temperature in (0.0, 0.8, 1.0)
    }
    training_text = DraftText(samples, train, recipe)
    tokens = 0

    def loss_at(step: int) -> torch.Tensor:
        nonlocal tokens
        ids = training_text(step)
        tokens += ids.numel()
        return unrolled_loss(draft, target, ids, recipe)

    def evaluate() -> str:
        return "; ".join(f"T={name} {probe.measure(draft)}" for name, probe in probes.items())

    optimizers = Optimizers(*split_parameters(draft), matrix_lr=recipe.matrix_lr, other_lr=recipe.other_lr)
    print(f"draft vocabulary {len(vocab_ids)} covers {coverage:.4f}; untrained {evaluate()}", flush=True)
    run = TrainingRun("draft", work / "draft.pt", minutes)
    steps, seconds = train_for(run, draft, optimizers, loss_at, evaluate)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(parameter.bfloat16().float())
    acceptance = {name: probe.measure(draft) for name, probe in probes.items()}
    return draft, DraftReport(steps, steps * recipe.tokens_per_step, samples.numel(), seconds, coverage, acceptance)
