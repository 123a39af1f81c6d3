"""The chance that the target accepts a drafted node, learned from what it has accepted (adaptive trees).

The probability that the draft gives to a token is not this chance. A greedy target takes its likeliest token. So the
draft's likeliest token is accepted far more often than its probability says, and the draft's second token is not. For
example, with the demo pair of models, tokens of draft probability 0.15 are accepted with a chance of 0.67 if they are
the draft's likeliest, and of 0.14 if they are its second. A tree that is built by probabilities therefore has siblings
where deeper levels would help more. So chances are learned separately by the class of the request (greedy, or sampled),
by whether the node is the draft's likeliest after its parent, and by the draft's probability.

Legend: R requests, n nodes of a tree, K topk, B points of a curve.
"""

import torch
from torch import Tensor

from cluster.spec.tree import NO_TOKEN, DraftTree
from cluster.spec.verify import Accepted

POINTS = 17
"""B: a curve has points where the square root of the probability is 0, 1/16, .. 1. Between two points, the logarithm of
the chance is interpolated linearly along this square root.
"""
PRIOR = 8.0
"""Before anything was learned, the chance is the draft's probability, or the square root of the probability for the
likeliest token of a greedy request. At each point of a curve, this prior weighs as much as `PRIOR` counted nodes.
"""
MEMORY = 8192.0
"""When this many trees were counted after a node, the weight of the node has fallen to 1/e."""
LEAST = 1e-4
"""A chance is never lower, so that its logarithm is finite."""


class NodeChances:
    """Curves from a draft's probability to the chance of acceptance, on the device. All ranks of a group have the same
    curves, because they count the same results.
    """

    def __init__(self, device: torch.device) -> None:
        # Counted nodes and, of these, accepted nodes, by [0 greedy or 1 sampled, 0 likeliest or 1 not, point].
        self.trials = torch.zeros(2, 2, POINTS, device=device)
        self.hits = torch.zeros(2, 2, POINTS, device=device)
        roots = torch.arange(POINTS, device=device) / (POINTS - 1)
        self._prior = PRIOR * roots.square().repeat(2, 2, 1)
        self._prior[0, 0] = PRIOR * roots

    def forget(self) -> None:
        """Forget all that was learned."""
        self.trials.zero_()
        self.hits.zero_()

    def log_chances(self, log_probabilities: Tensor, sampled: Tensor) -> Tensor:
        """Return the logarithms of the chances that nodes are accepted if their parents are, `[R, .., K]`.
        `log_probabilities` `[R, .., K]` are those of the K tokens after each parent, the likeliest first. `sampled`
        `[R]` says which requests are sampled.
        """
        curves = ((self.hits + self._prior) / (self.trials + PRIOR)).clamp_(min=LEAST).log_()
        curves = curves.to(log_probabilities.dtype).view(-1)
        place = _places(log_probabilities).clamp_(max=POINTS - 1 - 1e-3)
        lower = place.long()
        is_likeliest = torch.arange(log_probabilities.shape[-1], device=sampled.device) == 0
        index = _curves(sampled, is_likeliest, log_probabilities.dim()) * POINTS + lower
        return curves[index].lerp(curves[index + 1], place - lower)

    def count(self, tree: DraftTree, accepted: Accepted, sampled: Tensor, limits: Tensor) -> None:
        """Learn from verified trees. `limits` `[R]` are the `draft_limits` of `SamplingBatch`: requests whose limit is
        0, such as padding, do not count. Masked nodes do not count, and neither do nodes that the draft did not propose
        (those without an entry in `tree.proposed`). If `tree.proposed` is None, nothing is learned.
        """
        if tree.proposed is None:
            return
        # The path is padded with 0, the root, which is on the path anyway.
        on_path = torch.zeros_like(tree.parents).scatter_(1, accepted.path, 1)
        drafted = tree.proposed.log_probabilities.shape[1]
        is_counted = (tree.tokens[:, :drafted] != NO_TOKEN) & (limits > 0)[:, None]
        is_tried = on_path.gather(1, tree.parents[:, :drafted]) * is_counted
        is_tried[:, 0].fill_(0)
        place = _places(tree.proposed.log_probabilities).round_().long()
        index = (_curves(sampled, tree.proposed.is_likeliest, 2) * POINTS + place).view(-1)
        kept = 1 - sampled.shape[0] / MEMORY
        for counts, new in ((self.trials, is_tried), (self.hits, is_tried * on_path[:, :drafted])):
            counts.mul_(kept).view(-1).index_add_(0, index, new.view(-1).to(counts.dtype))


def _places(log_probabilities: Tensor) -> Tensor:
    """Return the places of log-probabilities on the curves, real numbers from 0 to B - 1: the square root of the
    probability, times B - 1. NaN counts as a probability of 0.
    """
    return log_probabilities.nan_to_num(-100.0, 0.0).clamp_(max=0.0).mul_(0.5).exp_().mul_(POINTS - 1)


def _curves(sampled: Tensor, is_likeliest: Tensor, dims: int) -> Tensor:
    """Return the number of the curve of each node: twice the class, plus 1 for a node that is not the likeliest. The
    result can be broadcast to `dims` dimensions.
    """
    return 2 * sampled.long().view(-1, *[1] * (dims - 1)) + (~is_likeliest).long()
