"""Gemma-4's assistant, a draft that reads the target's keys and values: its chains are those of `transformers`, and no
tree changes a token.
"""

from random import Random
from typing import Any

import pytest

from cluster.arch import read_target
from cluster.arch.resolve import check_models
from cluster.config import ConfigError
from cluster.engine import build_engine
from cluster.request import Request
from tests.parity.drafts import correct
from tests.parity.harness import SAMPLING, config_of, make_request, run, run_one_by_one, texts_of
from tests.support.families import VOCAB, FamilyCheckpoint, family_checkpoint
from tests.support.gemma4_assistant import assistant, drafted_chain
from tests.support.loading import check_draft, read_draft_spec

TARGETS = {
    "gemma4": "layers that borrow, with inputs of their own",
    "gemma4_moe": "experts beside the MLP, keys as values",
    "gemma4_wrapped": "around Gemma-4",
}


def target_of(family: str) -> FamilyCheckpoint:
    return family_checkpoint(family, TARGETS[family])


def assistant_of(family: str) -> tuple[str, Any]:
    return assistant(num_global_key_value_heads=1, attention_k_eq_v=True) if family == "gemma4_moe" else assistant()


def requests(sampling: str, **params: Any) -> list[Request]:
    """Return requests with prompts shorter and longer than the window of 8; the last two share a prefix."""
    random = Random(2)
    base = [random.randrange(2, VOCAB) for _ in range(40)]
    prompts = [base[:1], base[3:9], base[9:30], base[:33], [*base[:33], 5, 7]]
    return [
        make_request(f"{i}", prompt, SAMPLING[sampling], seed=i, max_tokens=20, ignore_eos=True, **params)
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_drafted_chains_are_those_of_transformers(family: str, page_size: int) -> None:
    target, (folder, model) = target_of(family), assistant_of(family)
    config = config_of(target.folder, folder, 1, 4, page_size=page_size, speculative_algorithm=None)
    sent = requests("greedy", return_tree=True)
    result = run(build_engine(config), sent)
    trees = 0
    for request in sent:
        text = list(request.prompt_token_ids)
        for output in result.outputs[request.request_id]:
            if output.tree is not None:
                assert list(output.tree.token_ids) == [text[-1], *drafted_chain(target, model, text, 4)]
                trees += 1
            text += output.token_ids
    assert trees > 50


@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.parametrize(("topk", "levels", "sampling"), [(1, 3, "0.8"), (3, 4, "greedy"), (8, 3, "0.8")])
@pytest.mark.parametrize("mode", ["fixed", "adaptive"])
def test_no_tree_of_the_assistant_changes_a_token(
    family: str, topk: int, levels: int, sampling: str, mode: str
) -> None:
    target, (folder, _) = target_of(family), assistant_of(family)
    settings = {"speculative_algorithm": None, "chunked_prefill_size": 7, "speculative_mode": mode}
    engine = build_engine(config_of(target.folder, folder, topk, levels, **settings))
    sent = requests(sampling)
    oracle = run_one_by_one(build_engine(config_of(target.folder, disable_radix_cache=True)), sent)
    if mode == "fixed":
        correct(engine, texts_of(sent, oracle), 0.7)
    for _ in range(2):
        result = run(engine, sent)
        assert result.completions == oracle.completions
    assert sum(output.cached_tokens for output in result.last.values()) > 0
    assert mode == "adaptive" or max(result.accept_lens) > 1


def test_an_assistant_with_clusters_computes_all_logits() -> None:
    """Its clusters save work in other heads, and the chain is that of the same assistant without clusters."""
    target, (plain_folder, _) = target_of("gemma4"), assistant()
    folder, _ = assistant(use_ordered_embeddings=True, num_centroids=8, centroid_intermediate_top_k=2)
    spec = check_draft(folder, read_target(target.folder))
    assert (spec.kind, spec.algorithm, spec.head) == ("frozen_kv", "NEXTN", "own")
    assert check_draft(plain_folder, read_target(target.folder)).layers == spec.layers
    assert [layer.geometry.borrows for layer in spec.layers] == [0, 0, 1, 1]


def test_an_override_of_a_fact_that_the_draft_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has \['recurrent'\], but the only facts .* leaves open are \[\]"):
        read_draft_spec(assistant()[0], read_target(target_of("gemma4").folder), {"recurrent": "pre"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone_hidden_size": 48}, "is for a target of width 48 .backbone_hidden_size., and this target has 32"),
        ({"num_key_value_heads": 4}, "layer 0 reads 4 KV heads of 12 numbers.* layer 0 of the target keeps 2 KV heads"),
        ({"sliding_window": 9}, "with a window of 9, and layer 0 of the target keeps .* with a window of 8"),
        ({"vocab_size": 70}, "has a vocabulary of 70 ids, and the target 64"),
    ],
)
def test_an_assistant_of_another_target_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_draft(assistant(**changes)[0], read_target(target_of("gemma4").folder))


def test_ranks_that_share_a_group_cannot_have_whole_assistants() -> None:
    settings = {"tp_size": 2, "speculative_draft_parallel": "replicated", "speculative_algorithm": None}
    with pytest.raises(ConfigError, match="speculative_draft_parallel replicated is not possible with this draft"):
        check_models(config_of(target_of("gemma4").folder, assistant()[0], **settings))


def test_an_assistant_does_not_fit_a_target_of_another_family() -> None:
    target = family_checkpoint("llama", "one head each, tied").folder
    with pytest.raises(ConfigError, match=r"no layer of the target has this type|keeps 4 KV heads of 8"):
        check_draft(assistant()[0], read_target(target))
