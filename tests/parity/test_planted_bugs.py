"""The suite's own proof: each planted bug is caught, and without one every check passes."""

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
from tests.parity.checks import caught, plain, short_alone, texts

Patch = pytest.MonkeyPatch


def changed(patch: Patch, owner: object, name: str, make: Callable[[Callable[..., object]], object]) -> None:
    """Replace `owner.name` by what `make` makes of it."""
    patch.setattr(owner, name, make(getattr(owner, name)))


BUGS: dict[str, Callable[[Patch], None]] = {}


def bug(name: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def put(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        BUGS[name] = plant
        return plant

    return put


def extend_input_bug(patch: Patch, turn: Callable[..., tuple[object, ...]]) -> None:
    changed(patch, cluster.spec.draft, "extend_input", lambda true: lambda *given: true(*turn(*given[:4]), *given[4:]))


@bug("mask rows of two nodes are swapped")
def _(patch: Patch) -> None:
    changed(patch, cluster.spec.step, "pack_bits", lambda true: lambda seen: true(seen.roll(1, 1)))


@bug("every node sees the whole tree")
def _(patch: Patch) -> None:
    changed(patch, cluster.spec.step, "pack_bits", lambda true: lambda seen: true(torch.ones_like(seen)))


@bug("the accepted path is read with the wrong stride")
def _(patch: Patch) -> None:
    def turn(batch, accepted, features, shape):  # type: ignore[no-untyped-def]
        return batch, accepted, features, shape.model_copy(update={"num_draft_tokens": shape.num_draft_tokens - 1})

    extend_input_bug(patch, turn)


@bug("accepted KV is not moved")
def _(patch: Patch) -> None:
    patch.setattr(cluster.spec.step, "compact", lambda *_: None)


@bug("accepted KV is moved from the neighbouring node")
def _(patch: Patch) -> None:
    changed(
        patch,
        cluster.spec.step,
        "compact",
        lambda true: lambda pool, window, path: true(pool, window, torch.where(path > 1, path - 1, path)),
    )


@bug("one aux hidden state stands for all three")
def _(patch: Patch) -> None:
    extend_input_bug(patch, lambda b, a, features, s: (b, a, features[:1] * len(features), s))


@bug("aux hidden states are concatenated high to low")
def _(patch: Patch) -> None:
    extend_input_bug(patch, lambda b, a, features, s: (b, a, features[::-1], s))


@bug("aux layer ids are read one boundary too early")
def _(patch: Patch) -> None:
    def make(true):  # type: ignore[no-untyped-def]
        return lambda *given: tuple(boundary - 1 for boundary in true(*given))

    changed(patch, cluster.arch.draft.eagle3, "aux_boundaries", make)


@bug("prompt ids are not rotated by one")
def _(patch: Patch) -> None:
    def turn(batch, accepted, features, shape):  # type: ignore[no-untyped-def]
        prompt = replace(batch.prompt, next_ids=batch.prompt.token_ids)
        return replace(batch, prompt=prompt), accepted, features, shape

    extend_input_bug(patch, turn)


@bug("the last row of a chunk does not know the next chunk's first token")
def _(patch: Patch) -> None:
    def turn(batch, accepted, features, shape):  # type: ignore[no-untyped-def]
        ids = batch.prompt.next_ids.clone()
        ids[-1:] = 0
        return replace(batch, prompt=replace(batch.prompt, next_ids=ids)), accepted, features, shape

    extend_input_bug(patch, turn)


@bug("the row proposed from is the last one, accepted or not")
def _(patch: Patch) -> None:
    def make(true):  # type: ignore[no-untyped-def]
        def wrong(batch, accepted, features, shape, draft):  # type: ignore[no-untyped-def]
            given, r, width = true(batch, accepted, features, shape, draft), batch.decodes, shape.num_steps + 1
            last = torch.arange(r) * width + width - 1
            return replace(given, select=torch.cat([last, given.select[r:]]))

        return wrong

    changed(patch, cluster.spec.draft, "extend_input", make)


@bug("a page is freed twice")
def _(patch: Patch) -> None:
    changed(patch, PageAllocator, "release", lambda true: lambda self, pages: true(self, [*pages, *pages[-1:]]))


@bug("a page is not freed")
def _(patch: Patch) -> None:
    changed(patch, PageAllocator, "release", lambda true: lambda self, pages: true(self, pages[:-1]))


@bug("a closed request's cached pages stay locked")
def _(patch: Patch) -> None:
    patch.setattr(RadixTree, "unlock", lambda self, path: None)


@bug("pages are cached as if a page more were committed")
def _(patch: Patch) -> None:
    changed(patch, KVCache, "close", lambda true: lambda self, lease, tokens, n: true(self, lease, tokens, n + 4))


@bug("pages are shared as if a page more were committed")
def _(patch: Patch) -> None:
    changed(patch, KVCache, "publish", lambda true: lambda self, lease, tokens, n: true(self, lease, tokens, n + 4))


@bug("a page is swapped for the tree's without telling the slot table")
def _(patch: Patch) -> None:
    changed(patch, KVCache, "_move_to_tree", lambda true: lambda self, *given: (true(self, *given)[0], []))


@bug("shared cells are not copied")
def _(patch: Patch) -> None:
    def make(true):  # type: ignore[no-untyped-def]
        return lambda self, order, forced: true(self, order._replace(copies=()), forced)

    changed(patch, Assembler, "send", make)


@bug("shared cells are copied into the target's pool only")
def _(patch: Patch) -> None:
    def make(true):  # type: ignore[no-untyped-def]
        return lambda self, *given: true(self, *given[:2], given[2][:1], *given[3:])

    changed(patch, Assembler, "__init__", make)


@bug("a cell is taken for shared whose next token is another one")
def _(patch: Patch) -> None:
    changed(patch, cluster.kv.radix, "common_prefix_length", lambda true: lambda *two: min(true(*two) + 1, 4))


@bug("positions inside the tree are off by one")
def _(patch: Patch) -> None:
    def make(true):  # type: ignore[no-untyped-def]
        return lambda self, batch, tree, chain: true(
            self, batch, replace(tree, depths=tree.depths + (tree.depths > 0).long()), chain
        )

    changed(patch, Step, "_forward", make)


class Ahead:
    """A draft runner whose rows are taken for those of the next position."""

    def __init__(self, runner: DraftRunner) -> None:
        self._runner, self.logits = runner, runner.logits

    def forward(self, token_ids, positions, *rest):  # type: ignore[no-untyped-def]
        return self._runner.forward(token_ids, positions + 1, *rest)


@bug("positions of the draft's levels are off by one")
def _(patch: Patch) -> None:
    def make(true):  # type: ignore[no-untyped-def]
        return lambda runner, *rest: true(Ahead(runner), *rest)

    changed(patch, cluster.spec.draft, "run_level", make)


@bug("the draft reads another request's carriers")
def _(patch: Patch) -> None:
    changed(patch, EagleDraftInput, "take", lambda true: lambda self, rows: true(self, rows.flip(0)))


@bug("carried hidden is one step old")
def _(patch: Patch) -> None:
    def stale(self: EagleDraftInput, rows: torch.Tensor, other: EagleDraftInput) -> None:
        true(self, rows, replace(other, hidden=self.hidden[rows]))

    true = EagleDraftInput.put
    patch.setattr(EagleDraftInput, "put", stale)


@bug("noise is keyed to the position before")
def _(patch: Patch) -> None:
    changed(patch, cluster.sampling.noise, "noise_keys", lambda true: lambda seeds, at: true(seeds, at - 1))


@bug("the draft ranks without the target's noise")
def _(patch: Patch) -> None:
    def make(true):  # type: ignore[no-untyped-def]
        return lambda self, columns, draw: true(self, columns, replace(draw, noise=None))

    changed(patch, CoupledRanking, "propose", make)


@bug("a right token under a rejected parent is accepted")
def _(patch: Patch) -> None:
    def make(true):  # type: ignore[no-untyped-def]
        def wrong(tree, chosen, first, num_steps) -> Accepted:  # type: ignore[no-untyped-def]
            own = torch.eye(tree.tokens.shape[1], dtype=torch.bool).expand_as(tree.ancestors)
            return true(replace(tree, ancestors=own), chosen, first, num_steps)

        return wrong

    changed(patch, cluster.spec.verify, "accept", make)


@bug("the draft vocabulary map is read as target ids, not as offsets")
def _(patch: Patch) -> None:
    def absolute(spec, checkpoint, device) -> torch.Tensor:  # type: ignore[no-untyped-def]
        checkpoint.mark_name_used("t2d")
        return checkpoint.tensor("d2t").long()

    patch.setattr(cluster.models.draft, "vocabulary_map", absolute)


@bug("one token too few is committed")
def _(patch: Patch) -> None:
    def make(true):  # type: ignore[no-untyped-def]
        return lambda self, at: [max(1, n - 1) if i == 1 else n for i, n in enumerate(true(self, at))]

    changed(patch, StepOutput, "decode_result", make)


@bug("a run is not cut where the request ends")
def _(patch: Patch) -> None:
    def make(true):  # type: ignore[no-untyped-def]
        def whole(self, run, room) -> Cut:  # type: ignore[no-untyped-def]
            return true(self, run, room)._replace(token_count=len(run))

        return whole

    changed(patch, FinishCheck, "cut", make)


@bug("a cached page is known by its own tokens alone")
def _(patch: Patch) -> None:
    def make(true):  # type: ignore[no-untyped-def]
        return lambda self, *given: (key[:-1] for key in true(self, *given))

    changed(patch, RadixTree, "_keys", make)


@bug("a retracted request sends its last token again")
def _(patch: Patch) -> None:
    def make(true):  # type: ignore[no-untyped-def]
        def forgetful(self, sequence) -> None:  # type: ignore[no-untyped-def]
            true(self, sequence)
            sequence.tokens.pop()

        return forgetful

    changed(patch, DecodeScheduler, "_retract", make)


@bug("the window is four slots too small")
def _(patch: Patch) -> None:
    def make(true):  # type: ignore[no-untyped-def]
        return lambda self, config, cache, window, *rest: true(self, config, cache, window - 4, *rest)

    changed(patch, Scheduler, "__init__", make)


@bug("the recurrent state is normed")
def _(patch: Patch) -> None:
    def make(true):  # type: ignore[no-untyped-def]
        return lambda self, *given: (true(self, *given)[0],) * 2

    changed(patch, Eagle3Draft, "forward", make)


@bug("sampling parameters land on the neighbouring row")
def _(patch: Patch) -> None:
    def swapped(true):  # type: ignore[no-untyped-def]
        return lambda self, sent: true(self, {**sent, "sampling rows": sent["sampling rows"] ^ 1})

    changed(patch, SamplingTable, "put", swapped)


@bug("rope pairs are interleaved")
def _(patch: Patch) -> None:
    def interleaved(self, heads, angles, norms=None) -> None:  # type: ignore[no-untyped-def]
        half = heads.shape[-1] // 2
        order = torch.stack([torch.arange(half), torch.arange(half) + half], 1).view(-1)
        turned = heads[..., order.argsort()].contiguous()
        true(self, turned, angles, norms)
        heads.copy_(turned[..., order])

    true = TorchKernels.rotate
    patch.setattr(TorchKernels, "rotate", interleaved)


@bug("the last committed token is not seen")
def _(patch: Patch) -> None:
    patch.setattr(
        RequestCells, "is_padding", property(lambda self: torch.arange(self.longest) >= self.lens[:, None] - 1)
    )


@bug("beyond its own tokens a request reads the sink")
def _(patch: Patch) -> None:
    def make(true):  # type: ignore[no-untyped-def]
        def sunk(self, width):  # type: ignore[no-untyped-def]
            return true(self, width).masked_fill(torch.nn.functional.pad(self.is_padding, (0, width)), 0)

        return sunk

    changed(patch, RequestCells, "slots", make)


@bug("beyond its own rows a short chunk reads what nobody wrote")
def _(patch: Patch) -> None:
    def make(true):  # type: ignore[no-untyped-def]
        return lambda self, table, rows, lens, longest, more, written=None: true(self, table, rows, lens, longest, more)

    changed(patch, RequestCells, "__init__", make)


@bug("log-probabilities are those of the next token")
def _(patch: Patch) -> None:
    changed(
        patch,
        cluster.engine.committer,
        "_token_logprobs",
        lambda true: lambda stepped, row, *rest: true(stepped, max(0, row - 1), *rest),
    )


@pytest.fixture(autouse=True)
def twins(monkeypatch: Patch) -> None:
    """Bugs are planted in the twins of the kernels."""
    monkeypatch.setattr(cluster.engine.backends, "library", lambda: None)


def test_every_check_passes_without_a_planted_bug() -> None:
    assert caught() is None


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_caught(name: str, monkeypatch: Patch) -> None:
    plain(), texts(), short_alone()  # the truth is made before the bug is planted
    BUGS[name](monkeypatch)
    assert caught() is not None


def test_planted_bug_list_is_large_enough() -> None:
    assert len(BUGS) >= 14
