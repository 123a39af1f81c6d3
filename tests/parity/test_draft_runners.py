"""A draft of several layers: law 1, each level against a dense reference, and pools that nobody else touches.

The reference works as such layers are trained: layer i at position p reads token p + 1 + i and what layer i - 1 gave at
p. The engine's labels, slots and caches have no counterpart in it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from cluster.config import ConfigError, EngineConfig
from cluster.engine import Engine, build_engine
from cluster.spec.multilayer import MultiLayerDraft
from cluster.spec.tree import DraftTree
from tests.late import owners
from tests.parity.drafts import correct
from tests.parity.harness import VOCAB, Run, config_of, grid_requests, plain_run, run, scarce, tiny_pair, truth
from tests.parity.reference import target_reference
from tests.unit.models import draft_folders as write
from tests.unit.models.draft_reference import Mtp

NEXTN = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
MIMO = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")


def references(dialect: str) -> list[Mtp]:
    folder, target = write.mtp(dialect, 3, vocab=VOCAB), target_reference(tiny_pair()[0])
    made = []
    for i in range(3):
        if dialect == "mimo":
            at = f"mtp_layers.{i}."
            made.append(Mtp(folder, target, at=at, parts=MIMO, hidden_first=True, zero_first=True))
        else:
            at = f"layers.{4 + i}."
            head, inner = f"{at}shared_head.output.weight", f"{at}transformer."
            made.append(Mtp(folder, target, at=at, inner=inner, parts=NEXTN, gemma=True, pre=True, head=head))
    return made


def settings(dialect: str, topk: int, steps: int = 3, **more: object) -> EngineConfig:
    target = tiny_pair()[0]
    return config_of(target, write.mtp(dialect, 3, vocab=VOCAB), topk, steps, speculative_algorithm="NEXTN", **more)


@pytest.mark.parametrize("dialect", ["mimo", "step"])
@pytest.mark.parametrize(
    ("topk", "sampling", "page", "chunk", "memory"),
    [(1, "greedy", 4, 7, ""), (2, "0.8", 1, 64, "cached"), (4, "greedy", 16, 7, "scarce"), (1, "filtered", 4, -1, "")],
)
def test_multi_layer_draft_gives_the_tokens_of_plain_decoding(
    dialect: str, topk: int, sampling: str, page: int, chunk: int, memory: str
) -> None:
    requests = grid_requests(sampling, 8)
    config = settings(dialect, topk, page_size=page, chunked_prefill_size=chunk)
    engine = build_engine(scarce(config, requests) if memory == "scarce" else config)
    correct(engine, truth(sampling), 0.6)
    for _ in range(2 if memory == "cached" else 1):
        result = run(engine, requests)
        assert result.ended == plain_run(sampling).ended
        assert set(result.accept_lens) >= {1, 2, 3}


@contextmanager
def watched(engine: Engine) -> Iterator[list[tuple[str, int, DraftTree]]]:
    """Every request's tree with its committed count, as drafted."""
    seen: list[tuple[str, int, DraftTree]] = []
    inner = engine._parts.lockstep.step._draft
    assert isinstance(inner, MultiLayerDraft)
    true = inner.draft

    def draft(batch, carried, noise, shape):  # type: ignore[no-untyped-def]
        tree = true(batch, carried, noise, shape)
        rows = owners(engine)
        for i in range(batch.decodes):
            one = DraftTree(*(part[i] for part in (tree.tokens, tree.parents, tree.depths, tree.ancestors)))
            seen.append((rows[int(batch.rows[i])], int(batch.seq_lens[i]), one))
        return tree

    inner.draft = draft  # type: ignore[method-assign]
    yield seen


def chain_of(layers: list[Mtp], text: list[int], committed: int) -> list[int]:
    """The three tokens that the layers propose after `committed` tokens and the bonus."""
    seen = target_reference(tiny_pair()[0]).run(text[:committed])
    known, source = list(text[: committed + 1]), seen.hidden
    for i, layer in enumerate(layers):
        logits, out = layer.run(known[1 + i :], source)
        known.append(int(logits[-1].argmax()))
        source = out if layer.say.get("pre") else source
    return known[committed + 1 :]


@pytest.mark.parametrize("dialect", ["mimo", "step"])
@pytest.mark.parametrize("memory", ["chunked", "cached", "scarce"])
def test_each_draft_level_matches_its_mtp_layer_in_the_reference(dialect: str, memory: str) -> None:
    """Over chunks, accepted paths of every length, prefixes from the cache, and after retraction."""
    requests, layers = grid_requests("greedy", 8), references(dialect)
    config = settings(dialect, 1, chunked_prefill_size=7, page_size=4)
    engine = build_engine(scarce(config, requests) if memory == "scarce" else config)
    with watched(engine) as seen:
        correct(engine, truth("greedy"), 0.5)
        result = run(engine, requests)
        if memory == "cached":
            seen.clear()
            result = run(engine, requests)
            assert any(output.cached_tokens for output in result.last.values())
    assert set(result.accept_lens) == {1, 2, 3, 4}
    assert bool(result.retracted) == (memory == "scarce")
    texts = truth("greedy")
    counted = [one for one in seen if one[1] < len(texts[one[0]]) - 1]  # not drafted in vain, after the request's end
    picked = counted[:: max(1, len(counted) // 12)]
    assert len(picked) >= 12
    for name, committed, tree in picked:
        assert tree.tokens[1:].tolist() == chain_of(layers, texts[name], committed), f"{name} at {committed}"


def drafted(engine: Engine) -> tuple[Run, list[list[int]]]:
    with watched(engine) as seen:
        result = run(engine, grid_requests("greedy", 3))
    return result, [tree.tokens.tolist() for _, _, tree in seen]


@pytest.mark.parametrize("topk", [1, 2])
def test_draft_runner_reads_only_its_own_kv_pool(topk: int) -> None:
    """While a runner works every other runner's pool is poison; its own is not, or this test would prove nothing."""
    clean = drafted(build_engine(settings("step", topk)))
    for own in (False, True):
        engine = build_engine(settings("step", topk))
        draft = engine._parts.lockstep.step._draft
        assert isinstance(draft, MultiLayerDraft)
        for runner in draft._runners:
            poisoned(runner, [r.pool for r in draft._runners if (r is runner) == own])
        assert (drafted(engine)[1] == clean[1]) != own


def poisoned(runner, pools) -> None:  # type: ignore[no-untyped-def]
    """From now on `pools` hold nonsense while `runner` works."""
    true = runner.model.forward

    def forward(*given: object) -> object:
        held = [pool.kv.clone() for pool in pools]
        for pool in pools:
            pool.kv.fill_(3e3)
        out = true(*given)
        for pool, kv in zip(pools, held, strict=True):
            changed = pool.kv != 3e3
            pool.kv.copy_(torch.where(changed, pool.kv, kv))
        return out

    runner.model.forward = forward


def test_more_speculative_steps_than_mtp_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="speculative_num_steps 4 is more than the 3 MTP layers"):
        build_engine(settings("mimo", 1, 4))


def test_speculative_algorithm_must_fit_the_draft() -> None:
    with pytest.raises(ConfigError, match=r"speculative_algorithm EAGLE3 does not fit.*NEXTN"):
        build_engine(config_of(tiny_pair()[0], write.mtp("mimo", 3, vocab=VOCAB), 1, 3))
