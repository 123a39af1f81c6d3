"""Checks of an engine's memory and trees against the dense reference, step by step."""

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
from tests.late import owners
from tests.parity.drafts import Texts
from tests.parity.reference import DraftReference, TargetReference
from tests.tables import held_slots

NEAR = 1e-9


@dataclass
class Watch:
    """Compares both pools and every drafted tree of a run with the reference. Call it after every step.

    `strict` raises at the first step with an error; otherwise `errors` are collected.
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
        self._fused = {name: self.draft.fuse(one) for name, one in self._passes.items()}
        self._kv = {name: self.draft.run(text[1:], self._fused[name][:-1])[2] for name, text in self.texts.items()}

    def attach(self, engine: Engine, trees: bool = True) -> None:
        """Watch the engine's pools, and every tree that it drafts."""
        inner = engine._parts.lockstep.step._draft
        self._pools = (engine._parts.lockstep.step._target.pool, inner._runner.pool)
        if not trees:
            return

        class Watched:
            def draft(_, batch: Batch, carried: EagleDraftInput, drawing: PhaseSampling, shape: TreeShape) -> DraftTree:
                tree = inner.draft(batch, carried, drawing, shape)
                for i, row in enumerate(batch.decode_rows.tolist()):
                    self._look(engine, owners(engine)[row], batch, carried, tree, i)
                return tree

            extend = staticmethod(inner.extend)

        engine._parts.lockstep.step._draft = Watched()

    def __call__(self, engine: Engine, _: StepResult) -> None:
        """Compare the committed KV of every running request in both pools."""
        references = ([one.kv for one in self._passes.values()], list(self._kv.values()))
        names = list(self.texts)
        for sequence in engine._parts.scheduler.running:
            if (
                sequence.lease is None or sequence.committed == sequence.lease.cached_tokens
            ):  # its first step may be under way
                continue
            at = names.index(sequence.request.request_id.split("/")[0])
            if sequence.tokens != self.texts[names[at]][: len(sequence.tokens)]:
                self.errors.append(f"tokens of {names[at]} are {sequence.tokens}")
            known = min(sequence.committed, len(self.texts[names[at]]) - 1)
            slots = held_slots(engine._parts.cache.table, sequence.lease.row, known)
            for what, (pool, reference) in zip(
                ("target", "draft"), zip(self._pools, references, strict=True), strict=True
            ):
                for layer, cells in enumerate(reference[at]):
                    off = (pool.kv[layer, slots] - cells[:known]).abs().amax((1, 2, 3)) if known else torch.zeros(1)
                    if not bool((off < NEAR).all()):
                        where = (off >= NEAR).nonzero()[0].item()
                        self.errors.append(f"{what} KV of {names[at]}, layer {layer}, is wrong from token {where}")
            self.cells += known
        assert not (self.strict and self.errors), self.errors[0]

    def _look(
        self, engine: Engine, request_id: str, batch: Batch, carried: EagleDraftInput, tree: DraftTree, i: int
    ) -> None:
        """Compare one request's carriers and tree with an independent EAGLE-2 expansion."""
        name, at = request_id.split("/")[0], int(batch.seq_lens[i])
        text, shape = self.texts[name], engine._parts.resolved.shape
        if at >= len(text):
            return
        wanted = self._expected(engine, text, self._fused[name][:at], at, batch, i)
        self.trees += 1
        near = torch.allclose(carried.hidden[i], wanted.hidden, atol=NEAR, rtol=0)
        near = near and torch.allclose(carried.topk_logprobs[i], wanted.topk_logprobs, atol=NEAR, rtol=0)
        if not near or int(carried.bonus[i]) != text[at]:
            self.errors.append(f"carriers of {name} at {at} differ from the reference")
        got = (tree.tokens[i].tolist(), tree.parents[i].tolist(), tree.depths[i].tolist())
        if got != (wanted.tokens, wanted.parents, wanted.depths):
            self.errors.append(f"tree of {name} at {at} is {got}, not {wanted.tokens, wanted.parents, wanted.depths}")
        assert len(wanted.tokens) == shape.num_draft_tokens

    def _expected(self, engine: Engine, text: list[int], fused: Tensor, at: int, batch: Batch, i: int) -> "Expected":
        shape = engine._parts.resolved.shape
        sampling = batch.sampling.narrow(i, i + 1)
        ids = torch.tensor(self.draft.target_ids)

        def children(tokens: list[int], hidden: Tensor) -> tuple[list[tuple[float, int]], Tensor]:
            """The topk proposals after the last of `tokens`, and its recurrent hidden."""
            logits, recurrent, _ = self.draft.run(tokens, hidden)
            line = logits[None, -1:]
            if batch.sampling.any_random:
                keys = noise_keys(sampling.seeds, torch.tensor([[hidden.shape[0] + 1]]))
                line = score_logits(line, sampling, Noise.of(keys, token_hashes(ids), line.dtype))
            best = line[0, 0].log_softmax(-1).topk(shape.topk)
            return [
                (p, int(ids[j])) for p, j in zip(best.values.tolist(), best.indices.tolist(), strict=True)
            ], recurrent[-1]

        first, hidden = children(text[1 : at + 1], fused)
        return expand(
            shape.topk, shape.num_steps, shape.num_draft_tokens, text[: at + 1], fused, first, hidden, children
        )


@dataclass(frozen=True)
class Expected:
    """The carriers and the tree that an engine should have."""

    hidden: Tensor
    topk_logprobs: Tensor
    tokens: list[int]
    parents: list[int]
    depths: list[int]


def expand(topk, steps, nodes, known, fused, first, hidden, children) -> Expected:  # type: ignore[no-untyped-def]
    """EAGLE-2 for one request, one node at a time: a pool of candidates, of which the best ones become the tree.

    `known` are the committed tokens and the bonus; `children(tokens, hidden)` proposes after a row.
    """

    def cost(p: float) -> float:
        return max(FLOOR, p) - DECAY

    pool: list[tuple[float, int, int, int]] = []  # score, token, parent (-1 the root), depth
    rows: dict[int, tuple[list[int], Tensor]] = {}  # hidden that a candidate's own row starts from, and its tokens
    for p, token in first:
        rows[len(pool)] = ([*known[1:], token], torch.cat([fused, hidden[None]]))
        pool.append((cost(p), token, -1, 1))
    frontier = list(range(topk))
    for depth in range(2, steps + 1):
        grown = []
        for parent in frontier:
            tokens, state = rows[parent]
            proposals, after = children(tokens, state)
            for p, token in proposals:
                rows[len(pool)] = ([*tokens, token], torch.cat([state, after[None]]))
                grown.append(len(pool))
                pool.append((pool[parent][0] + cost(p), token, parent, depth))
        frontier = sorted(grown, key=lambda c: -pool[c][0])[:topk]
    chosen = sorted(sorted(range(len(pool)), key=lambda c: -pool[c][0])[: nodes - 1])
    number = {-1: 0} | {c: i for i, c in enumerate(chosen, start=1)}
    return Expected(
        hidden=hidden,
        topk_logprobs=torch.tensor([p for p, _ in first], dtype=torch.float64),
        tokens=[known[-1], *(pool[c][1] for c in chosen)],
        parents=[0, *(number[pool[c][2]] for c in chosen)],
        depths=[0, *(pool[c][3] for c in chosen)],
    )
