"""Write the model card of a trained pair from the reports of its training run."""

import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.train.draft import DraftRecipe, DraftReport
from cluster.train.target import TargetRecipe, TargetReport


@dataclass(frozen=True)
class CardFacts:
    """The recipes, reports and counts of one training run."""

    target: TargetRecipe
    draft: DraftRecipe
    target_report: TargetReport
    draft_report: DraftReport
    train_tokens: int
    heldout_tokens: int
    heldout_bytes: int
    heldout_files: int
    train_files: int
    parameters: tuple[int, int]  # of the target and of the draft


def _acceptance_table(report: DraftReport) -> str:
    rows = [
        "| temperature | accept_len | depth 1 | 2 | 3 | 4 | 5 | top-4, depth 1 | 2 | 3 | 4 | 5 |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for temperature, acceptance in report.acceptance.items():
        shares = [f"{share:.2f}" for share in (*acceptance.by_depth, *acceptance.top4_by_depth)]
        rows.append(f"| {temperature} | {acceptance.accept_len:.2f} | " + " | ".join(shares) + " |")
    return "\n".join(rows)


def _joined(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)


def _shape_table(facts: CardFacts) -> str:
    target, draft = facts.target, facts.draft.shape
    rows = [
        ("", "target", "draft"),
        ("---", "---", "---"),
        ("architecture", "`LlamaForCausalLM`, tied embeddings", "`LlamaForCausalLMEagle3` (SpecForge names)"),
        ("parameters", *(f"{count / 1e6:.2f} M" for count in facts.parameters)),
        ("layers", f"{target.layers}", "1"),
        ("hidden, intermediate", *(f"{x.hidden_size}, {x.intermediate_size}" for x in (target, draft))),
        ("heads, KV heads, head size", *(f"{x.heads}, {x.kv_heads}, {x.head_dim}" for x in (target, draft))),
        (
            "vocabulary",
            f"{target.vocab_size}",
            f"{draft.draft_vocab_size} (`d2t`, `t2d`): {facts.draft_report.coverage:.1%} of the text",
        ),
        ("weights", "bf16", "bf16"),
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _training_table(facts: CardFacts) -> str:
    target, draft = facts.target_report, facts.draft_report
    long, short = facts.draft.length, facts.draft.prompt_length + facts.draft.sample_length
    rows = [
        ("", "target", "draft"),
        ("---", "---", "---"),
        ("steps", f"{target.steps:,}", f"{draft.steps:,}"),
        ("tokens read", f"{target.tokens:,}", f"{draft.tokens:,}"),
        ("time on two shared cores", *(f"{report.seconds / 60:.0f} min" for report in (target, draft))),
        ("sequence lengths", f"{facts.target.length // 2}, {facts.target.length}", f"{short}, {long}"),
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def write_card(path: Path, facts: CardFacts) -> None:
    """Write the card as markdown with the metadata header that model hubs read."""
    target, draft = facts.target_report, facts.draft_report
    bits_per_byte = target.heldout_loss * facts.heldout_tokens / facts.heldout_bytes / math.log(2)
    path.write_text(
        f"""---
license: psf-2.0
library_name: transformers
tags: [eagle3, speculative-decoding, demo]
---

# Aerie demo pair

A small Llama that continues Python source, and an EAGLE-3 draft trained for it. The pair exists so that
serving, speculation and their tests run on a model that really predicts text. It is not an assistant.

{_shape_table(facts)}

## Data

The source of the CPython standard library (version {platform.python_version()}), as any installation carries it:
{facts.train_files} files with part of the library's own tests, {facts.train_tokens:,} tokens, and {facts.heldout_files}
files ({facts.heldout_tokens:,} tokens) held out whole by a hash of their path. A few percent of the training
text are chats made of a documented function's first docstring line and its source. The text is under the
PSF licence (Copyright (c) Python Software Foundation); this project produced the weights from it.

## Training

`aerie train` repeats everything on two CPU cores, without a network. Both runs follow the clock: the
learning rate decays to the end of the given time (Muon for matrices, AdamW for embeddings, head and
norms; float32).

{_training_table(facts)}

The draft learned by training-time test: {facts.draft.steps} unrolled steps of weight {facts.draft.step_decay:g}^i,
a loss between cross entropy and the accepted share, a quarter of the steps on real text, the others on
{draft.sampled_tokens:,} tokens of the target's own continuations (temperatures {_joined(facts.draft.temperatures)}).
Aux hidden states are the outputs of layers {_joined(facts.draft.shape.aux_layer_ids)} (counted from 0),
un-normed, low to high.

## Figures, on held-out files

Target: loss {target.heldout_loss:.3f} nats per token (perplexity {math.exp(target.heldout_loss):.1f}),
{bits_per_byte:.3f} bits per byte.

Draft: chain of 5 on held-out prompts (64 tokens, then 128 new tokens, end tokens ignored), choosing with
the sampler's own noise. A depth's share counts the cells that were reached; accept_len counts the bonus
token. Top-4 says how often the path's token was among the draft's best four.

{_acceptance_table(draft)}

## Limits

- Positions beyond {facts.target.length} were never trained, though the config allows 16384: text degrades there.
- The target writes plausible Python that is mostly wrong.
- The split follows the path: functions copied between files may have been seen.
- Acceptance is that of this text, and falls on other text.
""",
        encoding="utf-8",
    )
