"""Verify: the target's own choice at every node, and the path that plain decoding would have walked.

A child is accepted when it is the token that the target chose at its parent, so the committed tokens are exactly those
of plain decoding whatever the draft proposed (law 1).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.batch import with_prompts
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


Accept = Callable[[DraftTree, Tensor, Tensor, int], Accepted]
"""What `accept` does, or equals it."""


def accept(tree: DraftTree, chosen: Tensor, first: Tensor, num_steps: int) -> Accepted:
    """The accepted path, given the target's choice after every node `[R, N]` and after finished prompts `[F]`."""
    r, n = chosen.shape
    wanted = chosen.gather(1, tree.parents) == tree.tokens
    wanted[:, 0].fill_(True)
    on_path = (wanted[:, None] | ~tree.ancestors).all(-1)
    if tree.padded:
        on_path.logical_and_(tree.ancestors[..., 0])
    accept_len = on_path.sum(1)
    path = torch.zeros(r, num_steps + 2, dtype=torch.int64, device=chosen.device)
    nodes = torch.arange(n, device=chosen.device).expand(r, n)
    path.scatter_(1, torch.where(on_path, tree.depths, num_steps + 1), nodes)
    path = path[:, :-1]
    tokens = chosen.gather(1, path)
    last = tokens.gather(1, accept_len[:, None] - 1)[:, 0]
    return Accepted(path, tokens, accept_len, with_prompts(last, first))
