"""Measure a draft's accept length on text that the target generated, without an engine.

The text is the output of plain decoding, so a draft token is accepted if it equals the text's token at its position. At
a temperature above 0, the draft ranks its tokens with the same Gumbel noise with which the text was sampled.
"""

from dataclasses import dataclass

import torch
from transformers import LlamaForCausalLM

from cluster.train.eagle3 import Eagle3TrainingDraft
from cluster.train.samples import continue_rows, features, gumbel


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of chains. `accept_len` is the mean number of tokens that a chain commits, bonus token included.
    `by_depth` has a share for each depth: of the chains whose earlier tokens were all accepted, the share whose token
    at this depth was accepted too.
    """

    accept_len: float
    by_depth: tuple[float, ...]
    top4_by_depth: tuple[
        float, ...
    ]  # as `by_depth`, but it is enough that the text's token is among the draft's best four

    def __str__(self) -> str:
        depths = " ".join(f"{share:.2f}" for share in self.by_depth)
        top4 = " ".join(f"{share:.2f}" for share in self.top4_by_depth)
        return f"accept_len {self.accept_len:.3f} by depth [{depths}] top-4 [{top4}]"


class AcceptanceProbe:
    """The target's continuations of held-out prompts at one temperature, on which drafts are measured."""

    def __init__(
        self,
        target: LlamaForCausalLM,
        prompts: torch.Tensor,
        count: int,
        temperature: float,
        aux_layer_ids: tuple[int, ...],
        *,
        seed: int = 7,
    ) -> None:
        rows, self.start = prompts.shape
        self.temperature = temperature
        self.ids = continue_rows(target, prompts, count, torch.full((rows,), temperature), seed)
        self.aux_hidden, _ = features(target, self.ids, aux_layer_ids)
        self.embedding = target.model.embed_tokens.weight
        vocab_size = int(target.config.vocab_size)
        self.noise = torch.stack(
            [gumbel(rows, vocab_size, seed, position) for position in range(self.ids.shape[1])], dim=1
        )

    @torch.no_grad()
    def measure(self, draft: Eagle3TrainingDraft, steps: int = 5) -> Acceptance:
        """Return the acceptance of chains of `steps` tokens. In every row, drafting starts at the end of the prompt."""
        length = self.ids.shape[1] - 1 - steps
        embeddings = self.embedding[self.ids[:, 1 : length + steps]]
        vocab_ids = draft.draft_vocab_ids
        top1_matches: list[torch.Tensor] = []
        top4_matches: list[torch.Tensor] = []
        for step, logits in enumerate(draft.unroll(self.aux_hidden[:, :length], embeddings, steps)):
            shift = 2 + step  # step i at cell t predicts token t + 2 + i
            scores = logits + self.temperature * self.noise[:, shift : shift + length, vocab_ids]
            top4_tokens = vocab_ids[scores.topk(4, dim=-1).indices]
            text_tokens = self.ids[:, shift : shift + length, None]
            top1_matches.append(top4_tokens[..., 0] == text_tokens[..., 0])
            top4_matches.append((top4_tokens == text_tokens).any(-1))
        accepted = torch.stack(top1_matches, dim=-1)
        return self._walk(accepted, torch.stack(top4_matches, dim=-1))

    def _walk(self, accepted: torch.Tensor, top4_matches: torch.Tensor) -> Acceptance:
        """Return the acceptance of the chains that decoding would draft. The first chain of a row follows its first new
        token; each later chain follows the tokens of the chain before it. `accepted` [B, T cells, S steps] says whether
        the best token of a step equals the text, `top4_matches` whether one of the best four does.
        """
        steps = accepted.shape[-1]
        accepted_lengths = accepted.long().cumprod(-1).sum(-1)  # accepted tokens of a chain that starts at each cell
        reached_counts, top1_counts, top4_counts = [0] * steps, [0] * steps, [0] * steps
        chains = num_tokens = 0
        for row in range(len(accepted_lengths)):
            cell = self.start - 1
            while cell < accepted_lengths.shape[1]:
                accepted_length = int(accepted_lengths[row, cell])
                for depth in range(min(accepted_length + 1, steps)):
                    reached_counts[depth] += 1
                    top1_counts[depth] += depth < accepted_length
                    top4_counts[depth] += bool(top4_matches[row, cell, depth])
                chains += 1
                num_tokens += accepted_length + 1
                cell += accepted_length + 1  # the accepted tokens and the bonus token
        return Acceptance(
            num_tokens / max(chains, 1),
            tuple(a / max(b, 1) for a, b in zip(top1_counts, reached_counts, strict=True)),
            tuple(a / max(b, 1) for a, b in zip(top4_counts, reached_counts, strict=True)),
        )
