"""Verify: the target's own choice at every node, and the path that plain decoding would have walked.

A child is accepted when it is the token that the target chose at its parent, so the committed tokens are exactly those
of plain decoding whatever the draft proposed (law 1).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.batch import SamplingBatch
from cluster.forward.sampler import scores
from cluster.spec.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Accepted:
    """`path` `[R, S + 1]` nodes of the accepted path from the root (0 beyond it), `tokens` `[R, S + 1]` the target's
    choice after each, `accept_len` `[R]` how many count (bonus included, >= 1); `bonus` `[B]` the last that counts,
    then the tokens after finished prompts.
    """

    path: Tensor
    tokens: Tensor
    accept_len: Tensor
    bonus: Tensor


def best(ranked: Tensor) -> tuple[Tensor, Tensor]:
    """The token of the highest score in `[.., V]`, and that score, `[..]` each.

    NaN and +inf win the argmax, so the score is not finite if any logit was one of them: one number stands for all.
    """
    chosen = ranked.argmax(-1)
    return chosen, ranked.gather(-1, chosen[..., None])[..., 0]


def choose(logits: Tensor, depths: Tensor, sampling: SamplingBatch, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """The target's token after every node and its score, `[R, N]` each, from logits `[R, N, V]`.

    `noise` `[R, n, V]` belongs to token positions seq_len + 1 .. seq_len + n; nodes of one depth share a position.
    """
    if noise is not None:
        r, n, vocab = noise.shape
        first = torch.arange(r, device=noise.device)[:, None] * n
        noise = noise.view(r * n, vocab).index_select(0, (first + depths).view(-1)).view(logits.shape)
    return best(scores(logits, sampling, noise))


def accept(tree: DraftTree, chosen: Tensor, first: Tensor, num_steps: int) -> Accepted:
    """The accepted path, given the target's choice after every node `[R, N]` and after finished prompts `[F]`."""
    r, n = chosen.shape
    wanted = chosen.gather(1, tree.parents) == tree.tokens
    wanted[:, 0] = True
    on_path = (wanted[:, None] | ~tree.ancestors).all(-1)
    accept_len = on_path.sum(1)
    path = torch.zeros(r, num_steps + 2, dtype=torch.int64, device=chosen.device)
    nodes = torch.arange(n, device=chosen.device).expand(r, n)
    path.scatter_(1, torch.where(on_path, tree.depths, num_steps + 1), nodes)
    path = path[:, :-1]
    tokens = chosen.gather(1, path)
    last = tokens.gather(1, accept_len[:, None] - 1)[:, 0]
    return Accepted(path, tokens, accept_len, torch.cat([last, first]))
