"""The engine on Triton gives the tokens of plain decoding in torch, for chain and tree drafts, with prompts in the same
steps.
"""

from typing import Any

import pytest

from cluster.config import ConfigError
from cluster.engine import build_engine
from cluster.request import RequestParams
from tests.parity.harness import SAMPLING, config_of, make_request, run, tiny_pair
from tests.parity.trees import adaptive, engine_with_trees
from tests.support.families import FAMILIES, family_checkpoint

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_steps": 3},
    "tree": {"topk": 3, "num_steps": 3, "speculative_num_draft_tokens": 7},
}
FP8, CAPTURED = {"kv_cache_dtype": "fp8_e4m3"}, {"capture": "on"}
SLOW_CASES = (
    ("tree", ("filtered",), {}),
    ("tree", ("0.8",), FP8),
    ("chain", ("0.8", "0.8"), CAPTURED),
)
"""The slow cases: a shape, the samplings that an engine serves one after the other, and the settings of the engine."""


def requests(params: RequestParams) -> list[Any]:
    prompts = [[3, 5, 2], [1, *range(2, 15)]]
    return [make_request(f"r{at}", prompt, params, max_tokens=4, seed=at) for at, prompt in enumerate(prompts)]


@pytest.mark.parametrize(
    ("shape", "samplings", "settings"),
    [("chain", ("greedy",), {}), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW_CASES)],
)
def test_triton_engine_gives_the_tokens_of_plain_decoding(
    shape: str, samplings: tuple[str, ...], settings: dict[str, Any]
) -> None:
    """With capture a step is captured when its key occurs for the second time."""
    target, draft = tiny_pair()
    cache_settings = {"kv_cache_dtype": settings.get("kv_cache_dtype", "auto")}
    plain_engine = build_engine(
        config_of(target, attention_backend="torch", disable_radix_cache=True, **cache_settings)
    )
    engine = build_engine(config_of(target, draft, **SHAPES[shape], attention_backend="triton", **settings))
    for sampling in samplings:
        expected = run(plain_engine, requests(SAMPLING[sampling]))
        assert run(engine, requests(SAMPLING[sampling])).tokens == expected.tokens
    assert engine.info().attention_backend == "triton"


@pytest.mark.slow
@pytest.mark.parametrize("has_draft", [False, True])
def test_mixed_sampling_batch_gives_the_tokens_of_torch(has_draft: bool) -> None:
    """Each request has its own temperature and filters."""
    target, draft = tiny_pair()
    draft_settings = SHAPES["tree"] if has_draft else {}
    plain_engine = build_engine(config_of(target, attention_backend="torch", disable_radix_cache=True))
    engine = build_engine(config_of(target, draft if has_draft else None, **draft_settings, attention_backend="triton"))
    requests_of_all_kinds = [
        make_request(kind, [3 + at, 5, 2], params, max_tokens=2, seed=at)
        for at, (kind, params) in enumerate(SAMPLING.items())
    ]
    assert run(engine, requests_of_all_kinds).tokens == run(plain_engine, requests_of_all_kinds).tokens


@pytest.mark.slow
@pytest.mark.parametrize("lookup_tokens", [0, 4])
def test_adaptive_trees_give_the_tokens_of_plain_decoding(lookup_tokens: int) -> None:
    """Steps without trees and steps with trees of all tiers follow each other. Between them the draft rests, and
    wakes.
    """
    target, draft = tiny_pair()
    requests_of_three = [*requests(SAMPLING["0.8"]), make_request("r2", [*range(3, 9)] * 2, SAMPLING["greedy"])]
    expected = run(build_engine(config_of(target, attention_backend="torch")), requests_of_three).tokens
    settings = {"speculative_lookup_tokens": lookup_tokens, "attention_backend": "triton"}
    config = adaptive(config_of(target, draft, topk=2, num_steps=2, speculative_num_draft_tokens=5, **settings))
    engine = engine_with_trees(lambda: build_engine(config), [0, 0, 2, 3, 1])
    assert run(engine, requests_of_three).tokens == expected


def test_triton_moe_engine_gives_the_tokens_of_torch() -> None:
    """A tiny Qwen3-MoE decodes without a draft. Some of its experts have no rows in a step."""
    target = family_checkpoint("qwen3_moe", next(iter(FAMILIES["qwen3_moe"].cases)), 2).folder
    prompts = [[3, 5, 2], [9]]
    tokens_by_backend = []
    for backend in ("torch", "triton"):
        engine = build_engine(config_of(target, attention_backend=backend))
        moe_requests = [
            make_request(f"r{at}", prompt, SAMPLING["greedy"], max_tokens=3) for at, prompt in enumerate(prompts)
        ]
        tokens_by_backend.append(run(engine, moe_requests).tokens)
    assert tokens_by_backend[0] == tokens_by_backend[1]


def test_triton_backend_without_interpreter_or_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.kernels.triton_kernels.INTERPRETED", False)
    with pytest.raises(ConfigError, match="attention_backend triton runs on a GPU and device is cpu; set"):
        build_engine(config_of(tiny_pair()[0], attention_backend="triton"))
