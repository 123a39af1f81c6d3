"""The engine on Triton gives the tokens of plain decoding by torch: chain and tree, with prompts beside them."""

from typing import Any

import pytest

from cluster.config import ConfigError
from cluster.engine import build_engine
from cluster.request import RequestParams
from tests.families import FAMILIES, made
from tests.parity.harness import SAMPLING, config_of, request, run, tiny_pair

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_steps": 3},
    "tree": {"topk": 3, "num_steps": 3, "speculative_num_draft_tokens": 7},
}
QUICK = ("chain", "greedy")
SLOW = (("tree", "greedy"), ("chain", "filtered"), ("tree", "filtered"))


def requests(params: RequestParams) -> list[Any]:
    prompts = [[3, 5, 2], [1, *range(2, 15)]]
    return [request(f"r{at}", prompt, params, max_tokens=6, seed=at) for at, prompt in enumerate(prompts)]


@pytest.mark.parametrize(
    ("shape", "sampling"),
    [QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)],
)
def test_tokens_are_those_of_plain_decoding(shape: str, sampling: str) -> None:
    target, draft = tiny_pair()
    expected = run(build_engine(config_of(target, attention_backend="torch")), requests(SAMPLING[sampling]))
    engine = build_engine(config_of(target, draft, **SHAPES[shape], attention_backend="triton"))
    given = run(engine, requests(SAMPLING[sampling]))
    assert given.tokens == expected.tokens
    assert engine.info().attention_backend == "triton"


@pytest.mark.slow
def test_tokens_with_caches_in_fp8_are_those_of_plain_decoding() -> None:
    target, draft = tiny_pair()
    kept = {"kv_cache_dtype": "fp8_e4m3"}
    expected = run(build_engine(config_of(target, attention_backend="torch", **kept)), requests(SAMPLING["0.8"]))
    engine = build_engine(config_of(target, draft, **SHAPES["tree"], attention_backend="triton", **kept))
    assert run(engine, requests(SAMPLING["0.8"])).tokens == expected.tokens


def test_experts_get_their_rows_and_give_them_back() -> None:
    """Plain decoding of a tiny Qwen3-MoE, some experts of which have no rows in a step."""
    target = made("qwen3_moe", next(iter(FAMILIES["qwen3_moe"].cases)), 2).folder
    prompts = [[3, 5, 2], [9]]
    texts = []
    for backend in ("torch", "triton"):
        engine = build_engine(config_of(target, attention_backend=backend))
        asked = [request(f"r{at}", prompt, SAMPLING["greedy"], max_tokens=3) for at, prompt in enumerate(prompts)]
        texts.append(run(engine, asked).tokens)
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_captured_steps_replay_what_is_started() -> None:
    """Twice, as the first time a key occurs its step is not captured."""
    target, draft = tiny_pair()
    expected = run(build_engine(config_of(target, attention_backend="torch")), requests(SAMPLING["0.8"]))
    config = config_of(target, draft, attention_backend="triton", capture="on")
    engine = build_engine(config)
    assert run(engine, requests(SAMPLING["0.8"])).tokens == expected.tokens
    assert run(engine, requests(SAMPLING["0.8"])).tokens == expected.tokens


def test_without_its_interpreter_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.kernels.triton_kernels.INTERPRETED", False)
    with pytest.raises(ConfigError, match="attention_backend triton runs on a GPU and device is cpu; set"):
        build_engine(config_of(tiny_pair()[0], attention_backend="triton"))
