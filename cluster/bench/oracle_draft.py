"""An oracle draft: its trees have any desired accept length, whatever the weights of the real draft are.

The real draft runs all its forwards and chooses a tree. The oracle replaces this tree by a tree of the same size: with
correct tokens along one path, as deep as the accept length requires, and wrong tokens elsewhere. The oracle works only
on the device, from tables made beforehand, so steps can be captured and never wait for the host.

Legend: R requests, N nodes, S depth, L tokens of a text.
"""

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from cluster.batch import Batch
from cluster.config.tree_shape import TreeShape
from cluster.sampling.sampling_inputs import PhaseSampling, SamplingInputs
from cluster.spec.draft import Draft
from cluster.spec.inputs import EagleDraftInput
from cluster.spec.tree import DraftTree, ancestors_of
from cluster.spec.verify import Accepted

# Size of the table of random numbers that round a mean depth up or down. It is prime, so any stride visits all numbers.
FRACTION_COUNT = 4093


class ExpectedTokens(Protocol):
    """Tells which tokens the target is going to choose."""

    def next_tokens(self, batch: Batch, bonus: Tensor, count: int) -> Tensor:
        """Return each decoding request's bonus token and the `count` tokens after it, `[R, count + 1]`."""
        ...


class CountingTokens:
    """The tokens of a target that always chooses the id after the last token's id, as targets of `random_models` do."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab

    def next_tokens(self, batch: Batch, bonus: Tensor, count: int) -> Tensor:
        """Return consecutive token ids from the bonus token's on, modulo the vocabulary size."""
        return (bonus[:, None] + torch.arange(count + 1, device=bonus.device)) % self._vocab


class RecordedTokens:
    """The tokens of `texts` `[n, L]`, prompts included. The request with seed i generates text i modulo n."""

    def __init__(self, texts: Tensor) -> None:
        self._texts = texts

    def next_tokens(self, batch: Batch, bonus: Tensor, count: int) -> Tensor:
        """Return the tokens at each request's position in its text. Beyond the text's end, the last token repeats."""
        texts, length = self._texts.shape
        text_index = batch.sampling.seeds[: batch.decodes].remainder(texts)
        positions = batch.seq_lens[:, None] + torch.arange(count + 1, device=bonus.device)
        return self._texts.index_select(0, text_index).gather(1, positions.clamp(max=length - 1))


@dataclass(frozen=True, slots=True)
class TreeTemplate:
    """A tree of N nodes: `parents` and `depths` `[N]`, `ancestors` `[N, N]`; `path` `[N]` marks the correct path."""

    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    path: Tensor


@cache
def tree_template(num_steps: int, nodes: int, device: torch.device) -> TreeTemplate:
    """Return a tree with one path of `num_steps` nodes below the root, or fewer if `nodes` is too small. The remaining
    nodes are spread evenly: they are children of the root and of the path's nodes, except the deepest.
    """
    deepest = min(num_steps, nodes - 1)
    parents = [0, *range(deepest), *((node % max(1, deepest)) for node in range(nodes - 1 - deepest))]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    parent_tensor = torch.tensor(parents, device=device)
    path = torch.arange(nodes, device=device) <= deepest
    return TreeTemplate(
        parent_tensor, torch.tensor(depths, device=device), ancestors_of(parent_tensor[None], deepest)[0], path
    )


class OracleDraft:
    """A `Draft` whose trees have an accept length of `accept_length` on average, bonus token included, if they are deep
    enough.

    If the target chooses other tokens than expected, as rounding in half precision may cause, it accepts fewer tokens.
    """

    def __init__(
        self, inner: Draft, expected: ExpectedTokens, accept_length: float, vocab: int, device: torch.device
    ) -> None:
        self._inner, self._expected, self._accepted_tokens, self._vocab = inner, expected, accept_length - 1, vocab
        self._fractions = torch.rand(FRACTION_COUNT, generator=torch.Generator().manual_seed(0)).to(device)

    def draft(
        self, batch: Batch, draft_input: EagleDraftInput, phase_sampling: PhaseSampling, shape: TreeShape
    ) -> DraftTree:
        """Run the real draft, and return the oracle's tree of the same size as the real tree."""
        tree = self._inner.draft(batch, draft_input, phase_sampling, shape)
        (requests, nodes), steps = tree.tokens.shape, shape.num_steps
        if not steps:
            return tree
        template_tree = tree_template(steps, nodes, tree.tokens.device)
        expected = self._expected.next_tokens(batch, draft_input.bonus, steps).index_select(1, template_tree.depths)
        fraction = self._fractions.index_select(0, (batch.seq_lens + 7 * batch.decode_rows) % FRACTION_COUNT)
        # The path is correct down to depth floor(fraction + a), where a is `_accepted_tokens`. Fractions are uniform in
        # [0, 1), so this depth is a on average.
        is_correct = template_tree.path & (template_tree.depths <= (fraction + self._accepted_tokens)[:, None])
        wrong_tokens = torch.where(tree.tokens == expected, (expected + 1) % self._vocab, tree.tokens)
        tokens = torch.where(is_correct, expected, wrong_tokens)
        shapes = (
            template_tree.parents.expand(requests, nodes),
            template_tree.depths.expand(requests, nodes),
            template_tree.ancestors.expand(requests, nodes, nodes),
        )
        return DraftTree(tokens, *shapes)

    def extend(
        self,
        batch: Batch,
        accepted: Accepted,
        target_hidden: list[Tensor],
        sampling_inputs: SamplingInputs,
        shape: TreeShape,
    ) -> EagleDraftInput:
        """Run the real draft's extend."""
        return self._inner.extend(batch, accepted, target_hidden, sampling_inputs, shape)
