"""Drafts that know the true text: they make every accept length occur, whatever a random model would propose.

A test ties one to its engine with `tie`, so that it can see which request sits on which table row.
"""

import torch
from torch import Tensor

from cluster.batch import Batch
from cluster.config.tree_shape import TreeShape
from cluster.engine import Engine
from cluster.sampling.sampling_inputs import PhaseSampling, SamplingInputs
from cluster.spec.draft import Draft
from cluster.spec.inputs import EagleDraftInput
from cluster.spec.tree import DraftTree, ancestors_of
from cluster.spec.verify import Accepted
from tests.late import owners

Texts = dict[str, list[int]]
"""Whole texts, prompt included, by the request id up to its first `/`."""


class _Knowing:
    """Looks the truth up by table row, through the engine that the draft is tied to."""

    def __init__(self, truth: Texts, rate: float) -> None:
        self.engine: Engine | None = None
        self._truth, self._rate = truth, rate
        self._random = torch.Generator().manual_seed(7)

    def tie(self, engine: Engine) -> None:
        self.engine = engine

    def _text(self, row: int) -> list[int]:
        assert self.engine is not None, "tie the draft to its engine first"
        return self._truth[owners(self.engine)[row].split("/")[0]]

    def _lucky(self) -> bool:
        return float(torch.rand(1, generator=self._random)) < self._rate

    def _below(self, bound: int) -> int:
        return int(torch.randint(bound, (1,), generator=self._random))


class OracleDraft(_Knowing):
    """Random trees (chains at topk 1) in which each right token is present with probability `rate`."""

    def __init__(self, shape: TreeShape, truth: Texts, rate: float, vocab: int, hidden: int) -> None:
        """`hidden` is the width of the carriers, which this draft leaves zero."""
        super().__init__(truth, rate)
        self._shape, self._vocab, self._hidden = shape, vocab, hidden

    def draft(self, batch: Batch, carried: EagleDraftInput, drawing: PhaseSampling, shape: TreeShape) -> DraftTree:
        self._shape = shape
        n, r = shape.num_draft_tokens, batch.decodes
        tokens = torch.zeros(r, n, dtype=torch.int64)
        parents, depths = torch.zeros_like(tokens), torch.zeros_like(tokens)
        tokens[:, 0] = carried.bonus
        for i in range(r):
            rest = self._text(int(batch.rows[i]))[int(batch.seq_lens[i]) + 1 :]
            self._grow(tokens[i], parents[i], depths[i], rest)
        return DraftTree(tokens, parents, depths, ancestors_of(parents, self._shape.num_steps))

    def _grow(self, tokens: Tensor, parents: Tensor, depths: Tensor, rest: list[int]) -> None:
        """Fill one request's tree; `rest` are the true tokens after its bonus."""
        steps, right = self._shape.num_steps, 0  # `right`: the deepest node on the true path
        used: dict[int, set[int]] = {}
        for j in range(1, tokens.shape[0]):
            shallow = [p for p in range(j) if int(depths[p]) < steps]
            parent = j - 1 if self._shape.topk == 1 else shallow[self._below(len(shallow))]
            token, depth = self._below(self._vocab), int(depths[right])
            may = depth < min(steps, len(rest)) and (self._shape.topk > 1 or right == j - 1)
            if may and rest[depth] not in used.get(right, ()) and self._lucky():
                parent, token, right = right, rest[depth], j
            while token in used.setdefault(parent, set()):
                token = (token + 1) % self._vocab
            used[parent].add(token)
            depth = int(depths[parent])
            if parent == right and depth < len(rest) and token == rest[depth]:
                right = j
            tokens[j], parents[j], depths[j] = token, parent, depth + 1

    def extend(
        self, batch: Batch, accepted: Accepted, features: list[Tensor], draw: SamplingInputs, shape: TreeShape
    ) -> EagleDraftInput:
        bonus, k = accepted.bonus, self._shape.topk
        hidden = features[0].new_zeros(bonus.shape[0], self._hidden)
        return EagleDraftInput(hidden.new_zeros(bonus.shape[0], k), bonus.new_zeros(bonus.shape[0], k), hidden, bonus)


class CorrectedDraft(_Knowing):
    """A real draft whose trees get the right tokens with probability `rate` per level.

    Draft forwards, extend and its KV are the real ones; only the tokens of the finished tree are changed.
    """

    def __init__(self, inner: Draft, truth: Texts, rate: float) -> None:
        super().__init__(truth, rate)
        self._inner = inner

    def draft(self, batch: Batch, carried: EagleDraftInput, drawing: PhaseSampling, shape: TreeShape) -> DraftTree:
        tree = self._inner.draft(batch, carried, drawing, shape)
        tokens = tree.tokens.clone()
        for i in range(batch.decodes):
            rest = self._text(int(batch.rows[i]))[int(batch.seq_lens[i]) + 1 :]
            node = 0
            for wanted in rest:
                children = [j for j in range(1, tokens.shape[1]) if int(tree.parents[i, j]) == node]
                if not children:
                    break
                right = [j for j in children if int(tokens[i, j]) == wanted]
                if not right:
                    if not self._lucky():
                        break
                    right = [children[self._below(len(children))]]
                    tokens[i, right[0]] = wanted
                node = right[0]
        return DraftTree(tokens, tree.parents, tree.depths, tree.ancestors)

    def extend(
        self, batch: Batch, accepted: Accepted, features: list[Tensor], draw: SamplingInputs, shape: TreeShape
    ) -> EagleDraftInput:
        return self._inner.extend(batch, accepted, features, draw, shape)


def correct(engine: Engine, truth: Texts, rate: float) -> None:
    """Put a `CorrectedDraft` around the engine's own draft."""
    draft = CorrectedDraft(engine._parts.lockstep.step._draft, truth, rate)
    draft.tie(engine)
    engine._parts.lockstep.step._draft = draft
