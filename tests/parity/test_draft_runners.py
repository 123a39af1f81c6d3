"""A draft of several MTP layers: law 1, each level against a dense reference, and KV pools that runners do not share.

The reference works as such layers are trained: at position p, layer i reads token p + 1 + i and the output of layer
i - 1 at position p. The reference has no position labels, no slots and no caches.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from cluster.config import ConfigError, EngineConfig
from cluster.engine import Engine, build_engine
from cluster.spec.multilayer import MultiLayerDraft
from cluster.spec.tree import DraftTree
from tests.parity.drafts import correct
from tests.parity.harness import (
    VOCAB,
    RunResult,
    config_of,
    grid_requests,
    plain_run,
    plain_texts,
    run,
    scarce_config,
    tiny_pair,
)
from tests.parity.reference import target_reference
from tests.support.late_device import owners
from tests.unit.models import draft_folders as write
from tests.unit.models.draft_reference import Mtp
from tests.unit.models.mtp_cases import MIMO_V2, PLAIN_STEP, STEP
from tests.unit.models.mtp_layers import WindowedMtpLayer, mimo_v2_layers, step_layers

DIALECTS = ("mimo", "mimo-v2", "step", "step-3.5")
NEXTN = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
MIMO = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")


def draft_folder_of(dialect: str) -> str:
    writers = {"mimo-v2": mimo_v2_layers, "step-3.5": step_layers}
    return writers[dialect](3, VOCAB) if dialect in writers else write.mtp(dialect, 3, vocab=VOCAB)


def references(dialect: str) -> list[Mtp]:
    folder, target = draft_folder_of(dialect), target_reference(tiny_pair()[0])
    layers: list[Mtp] = []
    for i in range(3):
        if dialect == "mimo-v2":
            prefix = f"mtp.layers.{i}."
            layers.append(WindowedMtpLayer(folder, target, **MIMO_V2 | {"at": prefix, "inner": prefix}))
        elif dialect == "step-3.5":
            prefix = f"layers.{4 + i}."
            places = {"at": prefix, "inner": prefix, "head": f"{prefix}transformer.shared_head.output.weight"}
            layers.append(WindowedMtpLayer(folder, target, **STEP | places))
        elif dialect == "mimo":
            prefix = f"mtp_layers.{i}."
            layers.append(Mtp(folder, target, at=prefix, parts=MIMO, hidden_first=True, zero_first=True))
        else:
            prefix = f"layers.{4 + i}."
            head, transformer_prefix = f"{prefix}shared_head.output.weight", f"{prefix}transformer."
            places = {"at": prefix, "inner": transformer_prefix, "head": head}
            layers.append(Mtp(folder, target, **PLAIN_STEP | places))
    return layers


def multi_layer_config(dialect: str, topk: int, steps: int = 3, **overrides: object) -> EngineConfig:
    target = tiny_pair()[0]
    return config_of(target, draft_folder_of(dialect), topk, steps, speculative_algorithm="NEXTN", **overrides)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("topk", "sampling", "page", "chunk", "memory"),
    [(1, "greedy", 4, 7, ""), (2, "0.8", 1, 64, "cached"), (4, "greedy", 16, 7, "scarce"), (1, "filtered", 4, -1, "")],
)
def test_multi_layer_draft_gives_the_tokens_of_plain_decoding(
    dialect: str, topk: int, sampling: str, page: int, chunk: int, memory: str
) -> None:
    requests = grid_requests(sampling, 8)
    config = multi_layer_config(dialect, topk, page_size=page, chunked_prefill_size=chunk)
    engine = build_engine(scarce_config(config, requests) if memory == "scarce" else config)
    correct(engine, plain_texts(sampling), 0.6)
    for _ in range(2 if memory == "cached" else 1):
        result = run(engine, requests)
        assert result.completions == plain_run(sampling).completions
        assert set(result.accept_lens) >= {1, 2, 3}


@contextmanager
def recorded_trees(engine: Engine) -> Iterator[list[tuple[str, int, DraftTree]]]:
    """Record every drafted tree as (request id, number of committed tokens, tree)."""
    drafted_trees: list[tuple[str, int, DraftTree]] = []
    multi_layer_draft = engine._parts.lockstep.step._draft
    assert isinstance(multi_layer_draft, MultiLayerDraft)
    original_draft = multi_layer_draft.draft

    def draft(batch, draft_input, noise, shape):  # type: ignore[no-untyped-def]
        tree = original_draft(batch, draft_input, noise, shape)
        rows = owners(engine)
        for i in range(batch.decodes):
            request_tree = DraftTree(
                *(tensor[i] for tensor in (tree.tokens, tree.parents, tree.depths, tree.ancestors))
            )
            drafted_trees.append((rows[int(batch.rows[i])], int(batch.seq_lens[i]), request_tree))
        return tree

    multi_layer_draft.draft = draft  # type: ignore[method-assign]
    yield drafted_trees


def chain_of(layers: list[Mtp], text: list[int], committed: int) -> list[int]:
    """Return the three tokens that the layers propose after `committed` tokens and the bonus token."""
    target_pass = target_reference(tiny_pair()[0]).run(text[:committed])
    known_tokens, hidden_states = list(text[: committed + 1]), layers[0].fuse(target_pass)
    for i, layer in enumerate(layers):
        logits, layer_output = layer.run(known_tokens[1 + i :], hidden_states)
        known_tokens.append(int(logits[-1].argmax()))
        hidden_states = layer_output if layer.conventions.get("pre") else hidden_states
    return known_tokens[committed + 1 :]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("memory", ["chunked", "cached", "scarce"])
def test_each_draft_level_matches_its_mtp_layer_in_the_reference(dialect: str, memory: str) -> None:
    """With chunked prompts, accepted paths of every length, cached prefixes, and retraction."""
    requests, layers = grid_requests("greedy", 8), references(dialect)
    # No window pools: their pages limit how many requests run at once, so none would be retracted.
    config = multi_layer_config(dialect, 1, chunked_prefill_size=7, page_size=4, swa_full_tokens_ratio=1)
    engine = build_engine(scarce_config(config, requests) if memory == "scarce" else config)
    with recorded_trees(engine) as drafted_trees:
        correct(engine, plain_texts("greedy"), 0.5)
        result = run(engine, requests)
        if memory == "cached":
            drafted_trees.clear()
            result = run(engine, requests)
            assert any(output.cached_tokens for output in result.last.values())
    assert set(result.accept_lens) == {1, 2, 3, 4}
    assert bool(result.retracted) == (memory == "scarce")
    texts = plain_texts("greedy")
    relevant_trees = [
        record for record in drafted_trees if record[1] < len(texts[record[0]]) - 1
    ]  # without trees after the request's end
    sampled_trees = relevant_trees[:: max(1, len(relevant_trees) // 12)]
    assert len(sampled_trees) >= 12
    for name, committed, tree in sampled_trees:
        assert tree.tokens[1:].tolist() == chain_of(layers, texts[name], committed), f"{name} at {committed}"


def run_recording_trees(engine: Engine) -> tuple[RunResult, list[list[int]]]:
    with recorded_trees(engine) as drafted_trees:
        result = run(engine, grid_requests("greedy", 3))
    return result, [tree.tokens.tolist() for _, _, tree in drafted_trees]


@pytest.mark.parametrize("topk", [1, 2])
def test_draft_runner_reads_only_its_own_kv_pool(topk: int) -> None:
    """While a runner works, the pools of all other runners are poisoned, and its trees must not change. The test then
    poisons the runner's own pool: the trees must change, or the poison would have no effect.
    """
    expected = run_recording_trees(build_engine(multi_layer_config("step", topk)))
    for poison_own_pool in (False, True):
        engine = build_engine(multi_layer_config("step", topk))
        draft = engine._parts.lockstep.step._draft
        assert isinstance(draft, MultiLayerDraft)
        for runner in draft._runners:
            pools = [pool for r in draft._runners if (r is runner) == poison_own_pool for pool in r.pools.all]
            poison_pools_while_running(runner, pools)
        assert (run_recording_trees(engine)[1] == expected[1]) != poison_own_pool


def poison_pools_while_running(runner, pools) -> None:  # type: ignore[no-untyped-def]
    """Patch the runner: during each of its forwards the `pools` hold wrong values, which are restored afterwards."""
    original_forward = runner.model.forward

    def forward(*args: object) -> object:
        saved_kvs = [pool.kv.clone() for pool in pools]
        for pool in pools:
            pool.kv.fill_(3e3)
        output = original_forward(*args)
        for pool, saved_kv in zip(pools, saved_kvs, strict=True):
            is_written = pool.kv != 3e3
            pool.kv.copy_(torch.where(is_written, pool.kv, saved_kv))
        return output

    runner.model.forward = forward


def test_more_speculative_steps_than_mtp_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="speculative_num_steps 4 is more than the 3 MTP layers"):
        build_engine(multi_layer_config("mimo", 1, 4))


def test_speculative_algorithm_must_fit_the_draft() -> None:
    with pytest.raises(ConfigError, match=r"speculative_algorithm EAGLE3 does not fit.*NEXTN"):
        build_engine(config_of(tiny_pair()[0], write.mtp("mimo", 3, vocab=VOCAB), 1, 3))
