"""Synthetic acceptance for load tests (`synthetic_acceptance`): how many drafted tokens are accepted follows a given
curve, whatever draft and target say. The output is then NOT that of the model; its speed is that of a draft with this
acceptance. SGLang simulates accept lengths in the same way (`SGLANG_SIMULATE_ACC_LEN`).

Legend: R requests, S depth.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.batch import with_prompts
from cluster.sampling.noise import noise_keys
from cluster.spec.tree import NO_TOKEN, DraftTree
from cluster.spec.verify import Accepted

MAX_DEPTH = 128  # deeper than any tree, so that different calls draw different random numbers


class SyntheticAccept:
    """An `Accept` whose path goes on from depth d - 1 to depth d with the probability `chances[d - 1]`. It goes to the
    child with the deepest subtree, and ends at a node without children.
    """

    def __init__(self, chances: Sequence[float], device: torch.device) -> None:
        """Nodes deeper than `len(chances)` are never accepted."""
        self._chances = torch.tensor([*chances, *[0.0] * MAX_DEPTH], dtype=torch.float64, device=device)
        self._calls = torch.zeros(1, dtype=torch.int64, device=device)

    def __call__(self, tree: DraftTree, target_tokens: Tensor, first_tokens: Tensor, num_steps: int) -> Accepted:
        """Return the accepted paths; arguments and result as in `verify.accept`."""
        (requests, nodes), device = target_tokens.shape, target_tokens.device
        wanted = self._wanted_depths(requests, num_steps)
        is_node = (tree.tokens != NO_TOKEN) & (tree.parents != torch.arange(nodes, device=device))
        path = torch.zeros(requests, num_steps + 1, dtype=torch.int64, device=device)
        # The depth that the subtree below a node reaches. Entry (i, j) of `ancestors`: node i is in the subtree of j.
        reach = (tree.ancestors & is_node[..., None]).mul(tree.depths[..., None]).amax(1)
        node = path[:, 0].clone()
        continues = torch.ones_like(node, dtype=torch.bool)
        for depth in range(1, num_steps + 1):
            is_child = is_node & (tree.parents == node[:, None])
            continues = continues & is_child.any(1) & (wanted >= depth)
            node = torch.where(continues, torch.where(is_child, reach, 0).argmax(1), node)
            path[:, depth] = torch.where(continues, node, 0)
        accept_len = (path > 0).sum(1) + 1
        # The committed tokens are those of the accepted nodes, and the target's choice after the last node.
        drafted = torch.cat([tree.tokens.gather(1, path[:, 1:]), target_tokens[:, :1]], 1)
        is_drafted = torch.arange(num_steps + 1, device=device) < accept_len[:, None] - 1
        tokens = torch.where(is_drafted, drafted, target_tokens.gather(1, path))
        last_tokens = tokens.gather(1, accept_len[:, None] - 1)[:, 0]
        return Accepted(path, tokens, accept_len, with_prompts(last_tokens, first_tokens))

    def _wanted_depths(self, requests: int, num_steps: int) -> Tensor:
        """Return how deep the path of each request may be, `[R]`. All ranks of a group draw the same random numbers."""
        self._calls.add_(1)
        device = self._calls.device
        positions = self._calls * MAX_DEPTH + torch.arange(num_steps, device=device)
        keys = noise_keys(torch.arange(requests, device=device), positions.expand(requests, -1))
        uniform = (keys >> 11).bitwise_and_((1 << 53) - 1).double() * 2.0**-53
        return (uniform < self._chances[:num_steps]).cumprod(1).sum(1)
