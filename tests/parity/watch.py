"""A checker that compares an engine's KV cells and draft trees with the dense reference, step by step."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from cluster.batch import Batch
from cluster.config.tree_shape import TreeShape
from cluster.engine import Engine, StepResult
from cluster.sampling.noise import Noise, noise_keys, token_hashes
from cluster.sampling.sampling_inputs import PhaseSampling
from cluster.sampling.torch_sampler import score_logits
from cluster.spec.inputs import EagleDraftInput
from cluster.spec.tree import DECAY, FLOOR, DraftTree
from tests.parity.drafts import Texts
from tests.parity.reference import DraftReference, TargetReference
from tests.support.late_device import owners
from tests.support.page_tables import held_slots

TOLERANCE = 1e-9


@dataclass
class ReferenceChecker:
    """Compares both KV pools and every drafted tree of a run with the reference. Call it after every step.

    `cells` and `trees` count what was compared. Differences are collected in `errors`. With `strict`, the first step
    with an error raises AssertionError.
    """

    target: TargetReference
    draft: DraftReference
    texts: Texts
    cells: int = 0
    trees: int = 0
    strict: bool = False
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._passes = {name: self.target.run(text) for name, text in self.texts.items()}
        self._fused = {name: self.draft.fuse(target_pass) for name, target_pass in self._passes.items()}
        self._kv = {name: self.draft.run(text[1:], self._fused[name][:-1])[2] for name, text in self.texts.items()}

    def attach(self, engine: Engine, trees: bool = True) -> None:
        """Read the KV pools of this engine. With `trees`, also check every tree that it drafts."""
        engine_draft = engine._parts.lockstep.step._draft
        step = engine._parts.lockstep.step
        self._pools = step._target.pools.other_pools[0], engine_draft._runner.pools.other_pools[0]
        if not trees:
            return

        class CheckedDraft:
            def draft(
                _, batch: Batch, draft_input: EagleDraftInput, phase_sampling: PhaseSampling, shape: TreeShape
            ) -> DraftTree:
                tree = engine_draft.draft(batch, draft_input, phase_sampling, shape)
                for i, row in enumerate(batch.decode_rows.tolist()):
                    self._check_tree(engine, owners(engine)[row], batch, draft_input, tree, i)
                return tree

            extend = staticmethod(engine_draft.extend)

        engine._parts.lockstep.step._draft = CheckedDraft()

    def __call__(self, engine: Engine, _: StepResult) -> None:
        """Compare the committed KV of every running request in both pools."""
        references = ([target_pass.kv for target_pass in self._passes.values()], list(self._kv.values()))
        names = list(self.texts)
        for sequence in engine._parts.scheduler.running:
            if (
                sequence.lease is None or sequence.committed == sequence.lease.cached_tokens
            ):  # the request has no row, or its first step may be under way
                continue
            text_index = names.index(sequence.request.request_id.split("/")[0])
            if sequence.tokens != self.texts[names[text_index]][: len(sequence.tokens)]:
                self.errors.append(f"tokens of {names[text_index]} are {sequence.tokens}")
            known_count = min(sequence.committed, len(self.texts[names[text_index]]) - 1)
            slots = held_slots(engine._parts.cache.table, sequence.lease.row, known_count)
            for pool_name, (pool, reference) in zip(
                ("target", "draft"), zip(self._pools, references, strict=True), strict=True
            ):
                for layer, cells in enumerate(reference[text_index]):
                    differences = (
                        (pool.kv[layer, slots] - cells[:known_count]).abs().amax((1, 2, 3))
                        if known_count
                        else torch.zeros(1)
                    )
                    if not bool((differences < TOLERANCE).all()):
                        first_wrong_token = (differences >= TOLERANCE).nonzero()[0].item()
                        self.errors.append(
                            f"{pool_name} KV of {names[text_index]}, layer {layer}, "
                            f"is wrong from token {first_wrong_token}"
                        )
            self.cells += known_count
        assert not (self.strict and self.errors), self.errors[0]

    def _check_tree(
        self, engine: Engine, request_id: str, batch: Batch, draft_input: EagleDraftInput, tree: DraftTree, i: int
    ) -> None:
        """Compare the draft input and the tree of request i with an independent EAGLE-2 expansion."""
        name, committed = request_id.split("/")[0], int(batch.seq_lens[i])
        text, shape = self.texts[name], engine._parts.resolved.shape
        if committed >= len(text):
            return
        expected = self._expected(engine, text, self._fused[name][:committed], committed, batch, i)
        self.trees += 1
        is_near = torch.allclose(draft_input.hidden[i], expected.hidden, atol=TOLERANCE, rtol=0)
        is_near = is_near and torch.allclose(
            draft_input.topk_logprobs[i], expected.topk_logprobs, atol=TOLERANCE, rtol=0
        )
        if not is_near or int(draft_input.bonus[i]) != text[committed]:
            self.errors.append(f"draft input of {name} at {committed} differs from the reference")
        got = (tree.tokens[i].tolist(), tree.parents[i].tolist(), tree.depths[i].tolist())
        if got != (expected.tokens, expected.parents, expected.depths):
            self.errors.append(
                f"tree of {name} at {committed} is {got}, not {expected.tokens, expected.parents, expected.depths}"
            )
        assert len(expected.tokens) == shape.num_draft_tokens

    def _expected(
        self, engine: Engine, text: list[int], fused: Tensor, committed: int, batch: Batch, i: int
    ) -> "Expected":
        shape = engine._parts.resolved.shape
        sampling = batch.sampling.narrow(i, i + 1)
        target_ids = torch.tensor(self.draft.target_ids)

        def children(tokens: list[int], hidden: Tensor) -> tuple[list[tuple[float, int]], Tensor]:
            """Return the topk proposals after the last of `tokens`, and the recurrent hidden state of that token."""
            logits, recurrent, _ = self.draft.run(tokens, hidden)
            last_logits = logits[None, -1:]
            if batch.sampling.any_random:
                keys = noise_keys(sampling.seeds, torch.tensor([[hidden.shape[0] + 1]]))
                last_logits = score_logits(
                    last_logits, sampling, Noise.of(keys, token_hashes(target_ids), last_logits.dtype)
                )
            top_logprobs = last_logits[0, 0].log_softmax(-1).topk(shape.topk)
            return [
                (p, int(target_ids[j]))
                for p, j in zip(top_logprobs.values.tolist(), top_logprobs.indices.tolist(), strict=True)
            ], recurrent[-1]

        first_proposals, hidden = children(text[1 : committed + 1], fused)
        return expand(
            shape.topk,
            shape.num_steps,
            shape.num_draft_tokens,
            text[: committed + 1],
            fused,
            first_proposals,
            hidden,
            children,
        )


@dataclass(frozen=True)
class Expected:
    """The draft input (`hidden`, `topk_logprobs`) and the tree that an engine should have for one request."""

    hidden: Tensor
    topk_logprobs: Tensor
    tokens: list[int]
    parents: list[int]
    depths: list[int]


def expand(topk, steps, nodes, known_tokens, fused_hidden, first_proposals, hidden, children) -> Expected:  # type: ignore[no-untyped-def]
    """Expand the tree of one request as EAGLE-2 does, one node at a time. The best candidates become the tree.

    `known_tokens` are the committed tokens and the bonus token. `children(tokens, hidden)` returns the proposals after
    the last of `tokens`.
    """

    def cost(p: float) -> float:
        return max(FLOOR, p) - DECAY

    candidates: list[tuple[float, int, int, int]] = []  # score, token, parent (-1: the root), depth
    candidate_rows: dict[int, tuple[list[int], Tensor]] = {}  # by candidate: tokens and hidden states of its row
    for p, token in first_proposals:
        candidate_rows[len(candidates)] = ([*known_tokens[1:], token], torch.cat([fused_hidden, hidden[None]]))
        candidates.append((cost(p), token, -1, 1))
    frontier = list(range(topk))
    for depth in range(2, steps + 1):
        new_candidates = []
        for parent in frontier:
            tokens, hidden_states = candidate_rows[parent]
            proposals, next_hidden = children(tokens, hidden_states)
            for p, token in proposals:
                candidate_rows[len(candidates)] = ([*tokens, token], torch.cat([hidden_states, next_hidden[None]]))
                new_candidates.append(len(candidates))
                candidates.append((candidates[parent][0] + cost(p), token, parent, depth))
        frontier = sorted(new_candidates, key=lambda c: -candidates[c][0])[:topk]
    chosen_candidates = sorted(sorted(range(len(candidates)), key=lambda c: -candidates[c][0])[: nodes - 1])
    node_numbers = {-1: 0} | {c: i for i, c in enumerate(chosen_candidates, start=1)}
    return Expected(
        hidden=hidden,
        topk_logprobs=torch.tensor([p for p, _ in first_proposals], dtype=torch.float64),
        tokens=[known_tokens[-1], *(candidates[c][1] for c in chosen_candidates)],
        parents=[0, *(node_numbers[candidates[c][2]] for c in chosen_candidates)],
        depths=[0, *(candidates[c][3] for c in chosen_candidates)],
    )
