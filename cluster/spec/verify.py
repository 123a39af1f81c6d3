"""Verify: find the path in each tree that plain decoding would have walked.

The target chooses a token at every node. A child is accepted if it is the token chosen at its parent, so the committed
tokens are exactly those of plain decoding, whatever the draft proposed (law 1 in docs/architecture.md).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.batch import with_prompts
from cluster.spec.row_budget import TargetRows
from cluster.spec.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Accepted:
    """The accepted path of each of R requests.

    `path` `[R, S + 1]`: node numbers from the root on, 0 beyond the path. `tokens` `[R, S + 1]`: the target's choice
    after each of these nodes. `accept_len` `[R]`: how many of `tokens` are committed, the bonus included, at least 1.
    `bonus` `[B]`: the last committed token of each of the R requests, then the first token after each finished prompt.
    `target_rows` says which nodes were rows of the target's forward. If it is None, all nodes were.
    """

    path: Tensor
    tokens: Tensor
    accept_len: Tensor
    bonus: Tensor
    target_rows: TargetRows | None = None

    def rows_of_path(self, nodes: int) -> Tensor:
        """Return the rows `[R, S + 1]` of the path in the target's forward. Each tree has `nodes` nodes."""
        return (self.target_rows or TargetRows(self.path.shape[0], nodes)).of(self.path)

    def without_decodes(self) -> "Accepted":
        """Return only what belongs to finished prompts."""
        r = self.accept_len.shape[0]
        return Accepted(self.path[:0], self.tokens[:0], self.accept_len[:0], self.bonus[r:])


Accept = Callable[[DraftTree, Tensor, Tensor, int], Accepted]
"""A function that returns what `accept` returns for the same arguments."""


def accept(tree: DraftTree, target_tokens: Tensor, first_tokens: Tensor, num_steps: int) -> Accepted:
    """Return the accepted paths. This is the reference implementation of `Accept`.

    `target_tokens` `[R, N]` are the tokens that the target chose after every node, `first_tokens` `[F]` those after
    each finished prompt. `num_steps` is S.
    """
    r, n = target_tokens.shape
    # is_expected[i] = (choice at parent(i) == token(i)). The root holds the bonus token, which is always expected.
    is_expected = target_tokens.gather(1, tree.parents) == tree.tokens
    is_expected[:, 0].fill_(True)
    # A node is on the path if it and all its ancestors are expected. Siblings hold different tokens, so at most one of
    # them is expected.
    on_path = (is_expected[:, None] | ~tree.ancestors).all(-1)
    # Padding nodes are not below the root, but could be expected by accident.
    if tree.padded:
        on_path.logical_and_(tree.ancestors[..., 0])
    # The path has the root and the accepted nodes. The committed tokens are those of the accepted nodes, and the bonus.
    # So there are as many committed tokens as nodes on the path.
    accept_len = on_path.sum(1)
    # path[depth] = node. Rejected nodes all go to one more column, S + 1, which is cut off; no host sync is needed.
    path = torch.zeros(r, num_steps + 2, dtype=torch.int64, device=target_tokens.device)
    nodes = torch.arange(n, device=target_tokens.device).expand(r, n)
    path.scatter_(1, torch.where(on_path, tree.depths, num_steps + 1), nodes)
    path = path[:, :-1]
    # The new bonus is the choice after the last node of the path; tokens beyond accept_len are not used.
    tokens = target_tokens.gather(1, path)
    last_tokens = tokens.gather(1, accept_len[:, None] - 1)[:, 0]
    return Accepted(path, tokens, accept_len, with_prompts(last_tokens, first_tokens))
