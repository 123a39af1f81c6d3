"""Looked-up tokens in a draft's tree: if the last tokens of a request occur earlier in the request, the tokens that
followed them there become one more branch of the tree.

The draft proposes likely tokens. Looked-up tokens are right where a text repeats itself, which a draft cannot see. As
long as both propose the same tokens, the branch shares the nodes of the drafted tree. (TensorRT-LLM's suffix automaton
replaces the draft's tokens instead.)

Legend: R requests, n nodes of each drafted tree, L looked-up tokens of each request.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.batch import Batch
from cluster.spec.token_history import LONGEST_MATCH, Continuations, TokenHistory
from cluster.spec.tree import DraftTree, chain_scores
from cluster.spec.verify import Accepted

PRIOR = 8.0
"""Before anything was learned, the chance after a match of m tokens is m / (m + 1). That is the rule of succession for
m - 1 successes in m - 1 trials: each token of the match, but the first, was predicted rightly. For each length of the
match, this prior weighs as much as `PRIOR` counted tokens.
"""
MEMORY = 4096.0
"""When this many branches were counted after a token, the weight of the token has fallen to 1/e."""


class LookupChances:
    """The chances that the target chooses looked-up tokens, by the length of the match before a token, on the device.
    All ranks of a group have the same chances, because they count the same results.
    """

    def __init__(self, device: torch.device) -> None:
        self.trials = torch.zeros(LONGEST_MATCH + 1, device=device)
        self.hits = torch.zeros(LONGEST_MATCH + 1, device=device)
        lengths = torch.arange(LONGEST_MATCH + 1, device=device)
        self._prior = PRIOR * lengths / (lengths + 1)

    def forget(self) -> None:
        """Forget all that was learned."""
        self.trials.zero_()
        self.hits.zero_()

    def log_chances(self, matched: Tensor, count: int) -> Tensor:
        """Return the logarithms of the chances of `count` looked-up tokens, each if the token before it is right,
        `[R, count]`. `matched` `[R]` are the lengths of the matches.
        """
        chances = ((self.hits + self._prior) / (self.trials + PRIOR)).clamp_(min=1e-6).log_()
        return chances[_match_lengths(matched, count)]

    def count(self, matched: Tensor, agreeing: Tensor, accept_len: Tensor, limits: Tensor) -> None:
        """Learn from looked-up tokens of which the first `agreeing` `[R]` were committed. `accept_len` `[R]` tokens
        were committed in all, so nothing is known of looked-up tokens after these. `limits` `[R]` are the
        `draft_limits` of `SamplingBatch`: requests whose limit is 0, such as padding, do not count.
        """
        lengths = _match_lengths(matched, LONGEST_MATCH)
        numbers = torch.arange(1, LONGEST_MATCH + 1, device=matched.device)
        is_known = (numbers <= torch.minimum(agreeing + 1, accept_len)[:, None]) & (limits > 0)[:, None]
        is_tried = (is_known & (matched > 0)[:, None]).to(self.trials.dtype)
        is_hit = is_tried * (numbers <= agreeing[:, None])
        kept = 1 - matched.shape[0] / MEMORY
        for counts, new in ((self.trials, is_tried), (self.hits, is_hit)):
            counts.mul_(kept).index_add_(0, lengths.view(-1), new.view(-1))


def _match_lengths(matched: Tensor, count: int) -> Tensor:
    """Return the length of the match before each of `count` looked-up tokens, `[R, count]`, at most `LONGEST_MATCH`.
    Before the first token it is `matched` `[R]`. Each looked-up token, if it is right, lengthens the match by one.
    """
    return (matched[:, None] + torch.arange(count, device=matched.device)).clamp_(max=LONGEST_MATCH)


AddLookedUp = Callable[[DraftTree, Continuations, Tensor], DraftTree]
"""Adds looked-up tokens to drafted trees; see `add_looked_up`."""


class TreeLookup:
    """Looks up L tokens of each request in `history`, and adds them to drafted trees by their learned `chances`."""

    def __init__(self, history: TokenHistory, chances: LookupChances, count: int, add: AddLookedUp) -> None:
        """`count` is L."""
        self.history, self.chances, self._count, self._add = history, chances, count, add

    def find(self, batch: Batch) -> Continuations:
        """Return, for each decoding request, L tokens that may follow its bonus token."""
        return self.history.continuations(batch.decode_rows, batch.seq_lens, self._count)

    def add_to(self, tree: DraftTree, found: Continuations) -> DraftTree:
        """Return the drafted trees with the looked-up tokens `found` as one more branch; see `add_looked_up`."""
        return self._add(tree, found, self.chances.log_chances(found.matched, self._count))


def add_looked_up(tree: DraftTree, found: Continuations, log_chances: Tensor) -> DraftTree:
    """Return trees `[R, n + L]`: the drafted trees, and the looked-up tokens as a branch from the root.

    A looked-up token that the draft proposed at the same place of the tree gets no second node: its place among the L
    last nodes is padding. The places of requests without a match are padding, too. A node that draft and lookup both
    propose has the better one of its two scores. `log_chances` `[R, L]` are the logarithms of the chances of the
    looked-up tokens, each if the token before it is right.
    """
    nodes, count, device = tree.tokens.shape[1], found.tokens.shape[1], tree.tokens.device
    numbers, has_match = torch.arange(1, count + 1, device=device), (found.matched > 0)[:, None]
    # `shared` `[R, n]`: the drafted nodes whose path is the beginning of the looked-up text, the root included.
    is_equal = found.tokens.gather(1, (tree.depths - 1).clamp(min=0)) == tree.tokens
    is_equal[:, 0].fill_(True)
    shared = (is_equal[:, None] | ~tree.ancestors).all(-1) & has_match
    shared_depths = shared * tree.depths
    last_shared = shared_depths.max(1)
    is_new = (numbers > last_shared.values[:, None]) & has_match
    # The first new node follows the last shared node; every other new node follows the new node before it.
    own = nodes - 1 + numbers
    parents = torch.where(numbers == last_shared.values[:, None] + 1, last_shared.indices[:, None], own - 1)
    left = shared[:, None] & is_new[..., None]
    right = torch.eye(count, dtype=torch.bool, device=device) | (
        is_new[:, None] & is_new[..., None] & (numbers <= numbers[:, None])
    )
    ancestors = torch.cat([F.pad(tree.ancestors, (0, count)), torch.cat([left, right], 2)], 1)
    return replace(
        tree,
        tokens=torch.cat([tree.tokens, torch.where(is_new, found.tokens, 0)], 1),
        parents=torch.cat([tree.parents, torch.where(is_new, parents, own)], 1),
        depths=torch.cat([tree.depths, torch.where(is_new, numbers, 0)], 1),
        ancestors=ancestors,
        padded=True,
        scores=None if tree.scores is None else _joined_scores(tree, shared_depths, is_new, log_chances),
    )


def _joined_scores(tree: DraftTree, shared_depths: Tensor, is_new: Tensor, log_chances: Tensor) -> Tensor:
    """Return the scores `[R, n + L]` of the nodes; the scores of padding among the L last nodes are minus infinity.
    `shared_depths` `[R, n]` are the depths of the drafted nodes that the looked-up branch shares, and 0 for others.
    """
    assert tree.scores is not None, "the caller has checked"
    looked_up = chain_scores(log_chances.to(tree.scores.dtype))  # `[R, L + 1]`, 0 for the root
    shared = torch.where(shared_depths > 0, looked_up.gather(1, shared_depths), float("-inf"))
    new = torch.where(is_new, looked_up[:, 1:], float("-inf"))
    return torch.cat([torch.maximum(tree.scores, shared), new], 1)


def count_agreeing(found: Continuations, accepted: Accepted) -> Tensor:
    """Return how many looked-up tokens of each request, from the first on without a gap, equal the tokens that the step
    committed, `[R]`. It is 0 without a match, and at most the number of committed tokens.
    """
    count = min(found.tokens.shape[1], accepted.tokens.shape[1])
    numbers = torch.arange(1, count + 1, device=found.tokens.device)
    is_equal = found.tokens[:, :count] == accepted.tokens[:, :count]
    is_equal &= (numbers <= accepted.accept_len[:, None]) & (found.matched > 0)[:, None]
    return is_equal.cumprod(1).sum(1)
