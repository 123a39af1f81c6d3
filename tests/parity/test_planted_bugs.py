"""Tests of the checks in `checks.py`: each planted bug makes a check fail, and without a bug every check passes."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import cluster.arch.draft.eagle3
import cluster.engine.backends
import cluster.engine.committer
import cluster.kv.radix
import cluster.models.draft
import cluster.sampling.noise
import cluster.spec.draft
import cluster.spec.step
import cluster.spec.verify
from cluster.attention.cells import RequestCells
from cluster.engine.assembler import Assembler
from cluster.engine.decode import DecodeScheduler
from cluster.engine.finish import Cut, FinishCheck
from cluster.engine.scheduler import Scheduler
from cluster.kernels.torch_kernels import TorchKernels
from cluster.kv.cache import KVCache
from cluster.kv.pages import PageAllocator
from cluster.kv.radix import RadixTree
from cluster.models.eagle3 import Eagle3Draft
from cluster.models.runner import DraftRunner
from cluster.sampling.parameters import SamplingTable
from cluster.spec.inputs import EagleDraftInput
from cluster.spec.propose import CoupledRanking
from cluster.spec.result import StepOutput
from cluster.spec.step import Step
from cluster.spec.verify import Accepted
from tests.parity.checks import first_failure, plain, short_plain_completions, texts
from tests.support.slow_cases import every_nth_fast

Patch = pytest.MonkeyPatch


def wrap(patch: Patch, owner: object, name: str, make: Callable[[Callable[..., object]], object]) -> None:
    """Replace `owner.name` by the result of `make(owner.name)`."""
    patch.setattr(owner, name, make(getattr(owner, name)))


BUGS: dict[str, Callable[[Patch], None]] = {}


def bug(name: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def register(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        assert name not in BUGS, "two bugs have the same name, so the first one would not be planted"
        BUGS[name] = plant
        return plant

    return register


def extend_input_bug(patch: Patch, alter: Callable[..., tuple[object, ...]]) -> None:
    wrap(patch, cluster.spec.draft, "extend_input", lambda orig: lambda *inputs: orig(*alter(*inputs[:4]), *inputs[4:]))


@bug("mask rows of two nodes are swapped")
def _(patch: Patch) -> None:
    wrap(patch, cluster.spec.step, "pack_bits", lambda orig: lambda seen: orig(seen.roll(1, 1)))


@bug("every node sees the whole tree")
def _(patch: Patch) -> None:
    wrap(patch, cluster.spec.step, "pack_bits", lambda orig: lambda seen: orig(torch.ones_like(seen)))


@bug("the accepted path is read with the wrong stride")
def _(patch: Patch) -> None:
    def alter(batch, accepted, features, shape):  # type: ignore[no-untyped-def]
        return batch, accepted, features, shape.model_copy(update={"num_draft_tokens": shape.num_draft_tokens - 1})

    extend_input_bug(patch, alter)


@bug("accepted KV is not moved")
def _(patch: Patch) -> None:
    patch.setattr(cluster.spec.step, "compact", lambda *_: None)


@bug("accepted KV is moved from the neighbouring node")
def _(patch: Patch) -> None:
    wrap(
        patch,
        cluster.spec.step,
        "compact",
        lambda orig: lambda pool, window, path: orig(pool, window, torch.where(path > 1, path - 1, path)),
    )


@bug("one aux hidden state stands for all three")
def _(patch: Patch) -> None:
    extend_input_bug(patch, lambda b, a, features, s: (b, a, features[:1] * len(features), s))


@bug("aux hidden states are concatenated high to low")
def _(patch: Patch) -> None:
    extend_input_bug(patch, lambda b, a, features, s: (b, a, features[::-1], s))


@bug("aux layer ids are read one boundary too early")
def _(patch: Patch) -> None:
    def make(orig):  # type: ignore[no-untyped-def]
        return lambda *inputs: tuple(boundary - 1 for boundary in orig(*inputs))

    wrap(patch, cluster.arch.draft.eagle3, "aux_boundaries", make)


@bug("prompt ids are not rotated by one")
def _(patch: Patch) -> None:
    def alter(batch, accepted, features, shape):  # type: ignore[no-untyped-def]
        prompt = replace(batch.prompt, next_ids=batch.prompt.token_ids)
        return replace(batch, prompt=prompt), accepted, features, shape

    extend_input_bug(patch, alter)


@bug("the last row of a chunk does not know the next chunk's first token")
def _(patch: Patch) -> None:
    def alter(batch, accepted, features, shape):  # type: ignore[no-untyped-def]
        ids = batch.prompt.next_ids.clone()
        ids[-1:] = 0
        return replace(batch, prompt=replace(batch.prompt, next_ids=ids)), accepted, features, shape

    extend_input_bug(patch, alter)


@bug("the row proposed from is the last one, accepted or not")
def _(patch: Patch) -> None:
    def make(orig):  # type: ignore[no-untyped-def]
        def wrong(batch, accepted, features, shape, draft):  # type: ignore[no-untyped-def]
            inputs, r, width = orig(batch, accepted, features, shape, draft), batch.decodes, shape.num_steps + 1
            last = torch.arange(r) * width + width - 1
            return replace(inputs, select=torch.cat([last, inputs.select[r:]]))

        return wrong

    wrap(patch, cluster.spec.draft, "extend_input", make)


@bug("a page is freed twice")
def _(patch: Patch) -> None:
    wrap(patch, PageAllocator, "release", lambda orig: lambda self, pages: orig(self, [*pages, *pages[-1:]]))


@bug("a page is not freed")
def _(patch: Patch) -> None:
    wrap(patch, PageAllocator, "release", lambda orig: lambda self, pages: orig(self, pages[:-1]))


@bug("a closed request's cached pages stay locked")
def _(patch: Patch) -> None:
    patch.setattr(RadixTree, "unlock", lambda self, path: None)


@bug("pages are cached as if a page more were committed")
def _(patch: Patch) -> None:
    wrap(patch, KVCache, "close", lambda orig: lambda self, lease, tokens, n: orig(self, lease, tokens, n + 4))


@bug("pages are shared as if a page more were committed")
def _(patch: Patch) -> None:
    wrap(patch, KVCache, "publish", lambda orig: lambda self, lease, tokens, n: orig(self, lease, tokens, n + 4))


@bug("a page is replaced by the tree's page, but not in the page table")
def _(patch: Patch) -> None:
    wrap(patch, KVCache, "_move_to_tree", lambda orig: lambda self, *inputs: (orig(self, *inputs)[0], []))


@bug("shared cells are not copied")
def _(patch: Patch) -> None:
    def make(orig):  # type: ignore[no-untyped-def]
        return lambda self, order, forced: orig(self, order._replace(copies=()), forced)

    wrap(patch, Assembler, "send", make)


@bug("shared cells are copied into the target's pool only")
def _(patch: Patch) -> None:
    def make(orig):  # type: ignore[no-untyped-def]
        return lambda self, *inputs: orig(self, *inputs[:2], inputs[2][:1], *inputs[3:])

    wrap(patch, Assembler, "__init__", make)


@bug("a cell counts as shared although its next token differs")
def _(patch: Patch) -> None:
    wrap(patch, cluster.kv.radix, "common_prefix_length", lambda orig: lambda *two: min(orig(*two) + 1, 4))


@bug("positions inside the tree are off by one")
def _(patch: Patch) -> None:
    def make(orig):  # type: ignore[no-untyped-def]
        return lambda self, batch, tree, rows, chain: orig(
            self, batch, replace(tree, depths=tree.depths + (tree.depths > 0).long()), rows, chain
        )

    wrap(patch, Step, "_forward", make)


class ShiftedRunner:
    """A draft runner that computes its rows as if they were at the next position."""

    def __init__(self, runner: DraftRunner) -> None:
        self._runner, self.logits = runner, runner.logits

    def forward(self, token_ids, positions, *rest):  # type: ignore[no-untyped-def]
        return self._runner.forward(token_ids, positions + 1, *rest)


@bug("positions of the draft's levels are off by one")
def _(patch: Patch) -> None:
    def make(orig):  # type: ignore[no-untyped-def]
        return lambda runner, *rest: orig(ShiftedRunner(runner), *rest)

    wrap(patch, cluster.spec.draft, "run_level", make)


@bug("the draft reads another request's draft input")
def _(patch: Patch) -> None:
    wrap(patch, EagleDraftInput, "take", lambda orig: lambda self, rows: orig(self, rows.flip(0)))


@bug("the hidden states of the draft input are one step old")
def _(patch: Patch) -> None:
    def stale(self: EagleDraftInput, rows: torch.Tensor, other: EagleDraftInput) -> None:
        orig(self, rows, replace(other, hidden=self.hidden[rows]))

    orig = EagleDraftInput.put
    patch.setattr(EagleDraftInput, "put", stale)


@bug("noise is keyed to the position before")
def _(patch: Patch) -> None:
    wrap(patch, cluster.sampling.noise, "noise_keys", lambda orig: lambda seeds, at: orig(seeds, at - 1))


@bug("the draft ranks without the target's noise")
def _(patch: Patch) -> None:
    def make(orig):  # type: ignore[no-untyped-def]
        return lambda self, columns, draw: orig(self, columns, replace(draw, noise=None))

    wrap(patch, CoupledRanking, "propose", make)


@bug("a true token under a rejected parent is accepted")
def _(patch: Patch) -> None:
    def make(orig):  # type: ignore[no-untyped-def]
        def wrong(tree, chosen, first, num_steps) -> Accepted:  # type: ignore[no-untyped-def]
            own = torch.eye(tree.tokens.shape[1], dtype=torch.bool).expand_as(tree.ancestors)
            return orig(replace(tree, ancestors=own), chosen, first, num_steps)

        return wrong

    wrap(patch, cluster.spec.verify, "accept", make)


@bug("the draft vocabulary map is read as target ids, not as offsets")
def _(patch: Patch) -> None:
    def absolute(spec, checkpoint, device) -> torch.Tensor:  # type: ignore[no-untyped-def]
        checkpoint.mark_name_used("t2d")
        return checkpoint.tensor("d2t").long()

    patch.setattr(cluster.models.draft, "vocabulary_map", absolute)


@bug("one token too few is committed")
def _(patch: Patch) -> None:
    def make(orig):  # type: ignore[no-untyped-def]
        return lambda self, at: [max(1, n - 1) if i == 1 else n for i, n in enumerate(orig(self, at))]

    wrap(patch, StepOutput, "decode_result", make)


@bug("a run is not cut where the request ends")
def _(patch: Patch) -> None:
    def make(orig):  # type: ignore[no-untyped-def]
        def whole(self, run, room) -> Cut:  # type: ignore[no-untyped-def]
            return orig(self, run, room)._replace(token_count=len(run))

        return whole

    wrap(patch, FinishCheck, "cut", make)


@bug("the key of a cached page has only the page's own tokens")
def _(patch: Patch) -> None:
    def make(orig):  # type: ignore[no-untyped-def]
        return lambda self, *inputs: (key[:-1] for key in orig(self, *inputs))

    wrap(patch, RadixTree, "_keys", make)


@bug("a retracted request sends its last token again")
def _(patch: Patch) -> None:
    def make(orig):  # type: ignore[no-untyped-def]
        def forgetful(self, sequence) -> None:  # type: ignore[no-untyped-def]
            orig(self, sequence)
            sequence.tokens.pop()

        return forgetful

    wrap(patch, DecodeScheduler, "_retract", make)


@bug("the window is four slots too small")
def _(patch: Patch) -> None:
    def make(orig):  # type: ignore[no-untyped-def]
        return lambda self, config, cache, window, *rest: orig(self, config, cache, window - 4, *rest)

    wrap(patch, Scheduler, "__init__", make)


@bug("the recurrent state is normed")
def _(patch: Patch) -> None:
    def make(orig):  # type: ignore[no-untyped-def]
        return lambda self, *inputs: (orig(self, *inputs)[0],) * 2

    wrap(patch, Eagle3Draft, "forward", make)


@bug("sampling parameters are written to the neighbouring row")
def _(patch: Patch) -> None:
    def swapped(orig):  # type: ignore[no-untyped-def]
        return lambda self, sent: orig(self, {**sent, "sampling rows": sent["sampling rows"] ^ 1})

    wrap(patch, SamplingTable, "put", swapped)


@bug("rope pairs are interleaved")
def _(patch: Patch) -> None:
    def interleaved(self, heads, angles, norms=None) -> None:  # type: ignore[no-untyped-def]
        half = heads.shape[-1] // 2
        permutation = torch.stack([torch.arange(half), torch.arange(half) + half], 1).view(-1)
        permuted = heads[..., permutation.argsort()].contiguous()
        orig(self, permuted, angles, norms)
        heads.copy_(permuted[..., permutation])

    orig = TorchKernels.rotate
    patch.setattr(TorchKernels, "rotate", interleaved)


@bug("attention leaves out the last committed token")
def _(patch: Patch) -> None:
    patch.setattr(
        RequestCells, "is_padding", property(lambda self: torch.arange(self.longest) >= self.lens[:, None] - 1)
    )


@bug("a request reads the sink page beyond its own tokens")
def _(patch: Patch) -> None:
    def make(orig):  # type: ignore[no-untyped-def]
        def sunk(self, width):  # type: ignore[no-untyped-def]
            return orig(self, width).masked_fill(torch.nn.functional.pad(self.is_padding, (0, width)), 0)

        return sunk

    wrap(patch, RequestCells, "slots", make)


@bug("a short chunk reads cells beyond its own rows that were never written")
def _(patch: Patch) -> None:
    def make(orig):  # type: ignore[no-untyped-def]
        return lambda self, table, rows, lens, longest, more, written=None: orig(self, table, rows, lens, longest, more)

    wrap(patch, RequestCells, "__init__", make)


@bug("log-probabilities are those of the next token")
def _(patch: Patch) -> None:
    wrap(
        patch,
        cluster.engine.committer,
        "_token_logprobs",
        lambda orig: lambda stepped, row, *rest: orig(stepped, max(0, row - 1), *rest),
    )


@pytest.fixture(autouse=True)
def use_torch_kernels(monkeypatch: Patch) -> None:
    """Use the torch kernels instead of the C kernels: the bugs are planted in the torch kernels."""
    monkeypatch.setattr(cluster.engine.backends, "library", lambda: None)


def test_every_check_passes_without_a_planted_bug() -> None:
    assert first_failure() is None


@pytest.mark.parametrize("name", every_nth_fast(2, BUGS))
def test_planted_bug_is_caught(name: str, monkeypatch: Patch) -> None:
    plain(), texts(), short_plain_completions()  # compute the oracles before the bug is planted
    BUGS[name](monkeypatch)
    assert first_failure() is not None
