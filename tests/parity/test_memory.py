"""Committed KV cells equal those of one dense forward, in the pools of target and draft. Every drafted tree equals the
tree of the reference draft.
"""

from dataclasses import replace

import pytest

from cluster.engine import build_engine
from tests.parity.drafts import correct
from tests.parity.harness import VOCAB, config_of, grid_requests, plain_run, plain_texts, run, scarce_config, tiny_pair
from tests.parity.reference import draft_reference, target_reference
from tests.parity.watch import ReferenceChecker
from tests.support.tiny_checkpoints import draft_folder, target_folder

DRAFTS: dict[str, dict[str, object]] = {
    "one aux": {"num_aux": 1},
    "three aux": {"num_aux": 3},
    "five aux": {"num_aux": 5},
    "two layers": {"layers": 2},
    "three layers, five aux": {"layers": 3, "num_aux": 5},
    "fc_norm": {"fc_norm": True},
    "input_norm": {"norm_before_fc": True},
    "norm_output": {"norm_output": True},
    "norm_before_residual": {"norm_before_residual": True},
    "EAGLE-3.1, two layers": {"fc_norm": True, "norm_output": True, "layers": 2},
    "no aux": {"use_aux": False},
    "own width": {"hidden": 48},
    "reduced vocabulary": {"draft_vocab": 15},
    "the target's head": {"own_head": False},
    "biases, own theta": {"biases": True, "theta": 500.0},
}


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize(("topk", "num_steps", "sampling"), [(1, 4, "greedy"), (3, 3, "0.8")])
def test_draft_trees_and_kv_cells_match_the_reference_for_each_draft_type(
    name: str, topk: int, num_steps: int, sampling: str
) -> None:
    target = target_folder(vocab_size=VOCAB)
    draft = draft_folder(target, **DRAFTS[name])
    checker = ReferenceChecker(
        target_reference(target), draft_reference(draft, target), dict(list(plain_texts(sampling).items())[1:3])
    )
    engine = build_engine(config_of(target, draft, topk, num_steps, chunked_prefill_size=7))
    checker.attach(engine)
    result = run(engine, grid_requests(sampling, 3)[1:], checker)
    assert all(result.completions[i] == plain_run(sampling).completions[i] for i in result.completions)
    assert not checker.errors
    assert checker.trees > 10
    assert checker.cells > 50


@pytest.mark.parametrize(("topk", "num_steps", "page_size"), [(1, 3, 1), (2, 2, 4), (4, 3, 16), (8, 5, 4), (4, 5, 1)])
@pytest.mark.parametrize("memory", ["ample", "scarce"])
def test_kv_cells_match_the_reference_after_retraction_and_prefix_reuse(
    topk: int, num_steps: int, page_size: int, memory: str
) -> None:
    """Accepted paths have every length. The same prompts are submitted again, when they are cached. With scarce memory
    the pages run out.
    """
    target, draft = tiny_pair(layers=2)
    checker = ReferenceChecker(target_reference(target), draft_reference(draft, target), plain_texts("0.8"))
    config = config_of(target, draft, topk, num_steps, page_size=page_size)
    requests = grid_requests("0.8", 8)
    extra_pages = 10 if page_size == 1 else 6  # enough pages for several requests to be admitted at once
    engine = build_engine(config if memory == "ample" else scarce_config(config, requests, extra_pages))
    checker.attach(engine, trees=False)
    correct(engine, plain_texts("0.8"), 0.8)
    first_result = run(engine, requests, checker)
    second_result = run(
        engine, [replace(request, request_id=f"{request.request_id}/2") for request in requests], checker
    )
    assert not checker.errors
    assert (
        {n.split("/")[0]: e for n, e in second_result.completions.items()}
        == first_result.completions
        == plain_run("0.8").completions
    )
    if memory == "ample":
        assert sum(output.cached_tokens for output in second_result.last.values()) > 0
        assert first_result.retracted == second_result.retracted == 0
    else:
        assert first_result.retracted + second_result.retracted > 0
    assert max(first_result.accept_lens) >= min(3, num_steps + 1)
