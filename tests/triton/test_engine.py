"""The engine on Triton gives the tokens of plain decoding by torch: chain and tree, with prompts beside them."""

from typing import Any

import pytest
import torch

from cluster.config import ConfigError
from cluster.engine import build_engine
from cluster.kernels import launch
from cluster.request import RequestParams
from tests.families import FAMILIES, made
from tests.parity.harness import SAMPLING, config_of, request, run, tiny_pair

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_steps": 3},
    "tree": {"topk": 3, "num_steps": 3, "speculative_num_draft_tokens": 7},
}
FP8, CAPTURED = {"kv_cache_dtype": "fp8_e4m3"}, {"capture": "on"}
CASES = (("tree", ("filtered",), {}), ("tree", ("0.8", "greedy"), FP8), ("chain", ("0.8", "0.8", "filtered"), CAPTURED))
"""A shape, the samplings that an engine serves one after the other, and its settings."""


def requests(params: RequestParams) -> list[Any]:
    prompts = [[3, 5, 2], [1, *range(2, 15)]]
    return [request(f"r{at}", prompt, params, max_tokens=6, seed=at) for at, prompt in enumerate(prompts)]


@pytest.mark.parametrize(
    ("shape", "samplings", "settings"),
    [("chain", ("greedy",), {}), *(pytest.param(*each, marks=pytest.mark.slow) for each in CASES)],
)
def test_triton_engine_gives_the_tokens_of_plain_decoding(
    shape: str, samplings: tuple[str, ...], settings: dict[str, Any]
) -> None:
    """A step is captured the second time that its key occurs."""
    target, draft = tiny_pair()
    kept = {"kv_cache_dtype": settings.get("kv_cache_dtype", "auto")}
    plain = build_engine(config_of(target, attention_backend="torch", disable_radix_cache=True, **kept))
    engine = build_engine(config_of(target, draft, **SHAPES[shape], attention_backend="triton", **settings))
    for sampling in samplings:
        expected = run(plain, requests(SAMPLING[sampling]))
        assert run(engine, requests(SAMPLING[sampling])).tokens == expected.tokens
    assert engine.info().attention_backend == "triton"


@pytest.mark.parametrize("drafts", [False, True])
def test_mixed_sampling_batch_matches_torch_and_launches_no_unstrided_views(
    drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row has its own temperature and filters. Kernels read neighbouring numbers of what they are given, or take
    its stride.
    """
    started, apart = launch._launch_kernel, set()

    def checked(kernel: Any, grid: Any, arguments: Any, constants: dict[str, Any]) -> None:
        first, *_ = fields = arguments._fields  # a stride without a tensor's name is that of the first one
        for name, value in zip(fields, arguments, strict=True):
            strided = f"{name}_stride" in fields or (name == first and {"stride", "row_stride"} & {*fields})
            if isinstance(value, torch.Tensor) and not value.is_contiguous() and not strided:
                apart.add((type(arguments).__name__, name))
        started(kernel, grid, arguments, constants)

    monkeypatch.setattr(launch, "_launch_kernel", checked)
    target, draft = tiny_pair()
    own = SHAPES["tree"] if drafts else {}
    plain = build_engine(config_of(target, attention_backend="torch", disable_radix_cache=True))
    engine = build_engine(config_of(target, draft if drafts else None, **own, attention_backend="triton"))
    asked = [
        request(kind, [3 + at, 5, 2], params, max_tokens=4, seed=at)
        for at, (kind, params) in enumerate(SAMPLING.items())
    ]
    assert run(engine, asked).tokens == run(plain, asked).tokens
    assert not apart


def test_triton_moe_engine_gives_the_tokens_of_torch() -> None:
    """Plain decoding of a tiny Qwen3-MoE, some experts of which have no rows in a step."""
    target = made("qwen3_moe", next(iter(FAMILIES["qwen3_moe"].cases)), 2).folder
    prompts = [[3, 5, 2], [9]]
    texts = []
    for backend in ("torch", "triton"):
        engine = build_engine(config_of(target, attention_backend=backend))
        asked = [request(f"r{at}", prompt, SAMPLING["greedy"], max_tokens=3) for at, prompt in enumerate(prompts)]
        texts.append(run(engine, asked).tokens)
    assert texts[0] == texts[1]


def test_triton_backend_without_interpreter_or_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.kernels.triton_kernels.INTERPRETED", False)
    with pytest.raises(ConfigError, match="attention_backend triton runs on a GPU and device is cpu; set"):
        build_engine(config_of(tiny_pair()[0], attention_backend="triton"))
