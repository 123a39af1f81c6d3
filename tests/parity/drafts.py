"""Drafts that know the true text of each request, so that every accept length occurs. A random model rarely proposes
true tokens.

A test attaches such a draft to its engine with `attach`. The draft then sees which request holds which table row.
"""

from dataclasses import replace

import torch
from torch import Tensor

from cluster.batch import Batch
from cluster.config.tree_shape import TreeShape
from cluster.engine import Engine
from cluster.sampling.sampling_inputs import PhaseSampling, SamplingInputs
from cluster.spec.draft import CanRest, Draft
from cluster.spec.inputs import EagleDraftInput
from cluster.spec.tree import DraftTree, ancestors_of
from cluster.spec.verify import Accepted
from tests.support.late_device import owners

Texts = dict[str, list[int]]
"""Full texts (prompt tokens, then output tokens). The key is the part of the request id before its first `/`."""


class _TrueTextDraft:
    """Base of the drafts: finds the true text of a table row through the attached engine. With probability `rate` it
    decides to use a true token.
    """

    def __init__(self, true_texts: Texts, rate: float) -> None:
        self.engine: Engine | None = None
        self._true_texts, self._rate = true_texts, rate
        self._random = torch.Generator().manual_seed(7)

    def attach(self, engine: Engine) -> None:
        self.engine = engine

    def _true_text(self, row: int) -> list[int]:
        assert self.engine is not None, "the draft is not attached to an engine"
        return self._true_texts[owners(self.engine)[row].split("/")[0]]

    def _picks_true_token(self) -> bool:
        return float(torch.rand(1, generator=self._random)) < self._rate

    def _random_below(self, bound: int) -> int:
        return int(torch.randint(bound, (1,), generator=self._random))


class OracleDraft(_TrueTextDraft):
    """A draft without a model. It drafts random trees (chains if topk is 1); each true token is in them with
    probability `rate`.
    """

    def __init__(self, shape: TreeShape, true_texts: Texts, rate: float, vocab: int, hidden: int) -> None:
        """`hidden` is the size of the hidden states in the draft input; this draft fills them with zeros."""
        super().__init__(true_texts, rate)
        self._shape, self._vocab, self._hidden = shape, vocab, hidden

    def draft(
        self, batch: Batch, draft_input: EagleDraftInput, phase_sampling: PhaseSampling, shape: TreeShape
    ) -> DraftTree:
        self._shape = shape
        node_count, request_count = shape.drafted_nodes, batch.decodes
        tokens = torch.zeros(request_count, node_count, dtype=torch.int64)
        parents, depths = torch.zeros_like(tokens), torch.zeros_like(tokens)
        tokens[:, 0] = draft_input.bonus
        for i in range(request_count):
            true_rest = self._true_text(int(batch.rows[i]))[int(batch.seq_lens[i]) + 1 :]
            self._grow(tokens[i], parents[i], depths[i], true_rest)
        # The scores are random and fall along every path, so a step may select any part of a tree.
        scores = torch.zeros(tokens.shape, dtype=torch.float64)
        steps = torch.rand(tokens.shape, generator=self._random, dtype=torch.float64) + 0.01
        for j in range(1, node_count):
            scores[:, j] = scores.gather(1, parents[:, j : j + 1])[:, 0] - steps[:, j]
        return DraftTree(tokens, parents, depths, ancestors_of(parents, self._shape.num_steps), scores=scores)

    def _grow(self, tokens: Tensor, parents: Tensor, depths: Tensor, true_rest: list[int]) -> None:
        """Fill the tree of one request. `true_rest` are the true tokens after its bonus token."""
        max_depth, right_node = self._shape.num_steps, 0  # the deepest node of the true path is at first the root
        used_tokens: dict[int, set[int]] = {}
        for j in range(1, tokens.shape[0]):
            possible_parents = [p for p in range(j) if int(depths[p]) < max_depth]
            parent = j - 1 if self._shape.topk == 1 else possible_parents[self._random_below(len(possible_parents))]
            token, depth = self._random_below(self._vocab), int(depths[right_node])
            may_place = depth < min(max_depth, len(true_rest)) and (self._shape.topk > 1 or right_node == j - 1)
            if may_place and true_rest[depth] not in used_tokens.get(right_node, ()) and self._picks_true_token():
                parent, token, right_node = right_node, true_rest[depth], j
            while token in used_tokens.setdefault(parent, set()):
                token = (token + 1) % self._vocab
            used_tokens[parent].add(token)
            depth = int(depths[parent])
            if parent == right_node and depth < len(true_rest) and token == true_rest[depth]:
                right_node = j
            tokens[j], parents[j], depths[j] = token, parent, depth + 1

    def extend(
        self,
        batch: Batch,
        accepted: Accepted,
        target_hidden: list[Tensor],
        sampling_inputs: SamplingInputs,
        shape: TreeShape,
    ) -> EagleDraftInput:
        bonus, topk = accepted.bonus, self._shape.topk
        hidden = target_hidden[0].new_zeros(bonus.shape[0], self._hidden)
        return EagleDraftInput(
            hidden.new_zeros(bonus.shape[0], topk), bonus.new_zeros(bonus.shape[0], topk), hidden, bonus
        )


class CorrectedDraft(_TrueTextDraft):
    """A real draft whose finished trees are corrected: each level of the tree gets the true token with probability
    `rate`.

    The draft forwards, the extend phase and the draft's KV stay the real ones.
    """

    def __init__(self, inner: Draft, true_texts: Texts, rate: float) -> None:
        super().__init__(true_texts, rate)
        self._inner = inner

    def draft(
        self, batch: Batch, draft_input: EagleDraftInput, phase_sampling: PhaseSampling, shape: TreeShape
    ) -> DraftTree:
        tree = self._inner.draft(batch, draft_input, phase_sampling, shape)
        tokens = tree.tokens.clone()
        for i in range(batch.decodes):
            true_rest = self._true_text(int(batch.rows[i]))[int(batch.seq_lens[i]) + 1 :]
            node = 0
            for true_token in true_rest:
                children = [j for j in range(1, tokens.shape[1]) if int(tree.parents[i, j]) == node]
                if not children:
                    break
                right_children = [j for j in children if int(tokens[i, j]) == true_token]
                if not right_children:
                    if not self._picks_true_token():
                        break
                    right_children = [children[self._random_below(len(children))]]
                    tokens[i, right_children[0]] = true_token
                node = right_children[0]
        return replace(tree, tokens=tokens)

    def extend(
        self,
        batch: Batch,
        accepted: Accepted,
        target_hidden: list[Tensor],
        sampling_inputs: SamplingInputs,
        shape: TreeShape,
    ) -> EagleDraftInput:
        return self._inner.extend(batch, accepted, target_hidden, sampling_inputs, shape)

    def rest(self, batch: Batch, accepted: Accepted, target_hidden: list[Tensor]) -> None:
        assert isinstance(self._inner, CanRest)
        self._inner.rest(batch, accepted, target_hidden)


def correct(engine: Engine, true_texts: Texts, rate: float) -> None:
    """Wrap the engine's draft into a `CorrectedDraft`."""
    draft = CorrectedDraft(engine._parts.lockstep.step._draft, true_texts, rate)
    draft.attach(engine)
    engine._parts.lockstep.step._draft = draft
