"""The engine on Triton gives the tokens of plain decoding in torch, for chain and tree drafts, with prompts in the same
steps.
"""

from typing import Any

import pytest
import torch

from cluster.config import ConfigError
from cluster.engine import build_engine
from cluster.kernels import launch
from cluster.request import RequestParams
from tests.parity.harness import SAMPLING, config_of, make_request, run, tiny_pair
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


@pytest.mark.parametrize("has_draft", [False, True])
def test_mixed_sampling_batch_matches_torch_and_launches_no_unstrided_views(
    has_draft: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row has its own temperature and filters. A kernel that gets a tensor reads contiguous numbers, unless it
    also gets the stride of the tensor.
    """
    original_launch, unstrided_arguments, checked_tensors = launch._launch_kernel, set(), 0

    def check_and_launch(kernel: Any, grid: Any, arguments: Any, constants: dict[str, Any]) -> None:
        nonlocal checked_tensors
        first, *_ = fields = arguments._fields  # a stride without a tensor's name is that of the first one
        for name, value in zip(fields, arguments, strict=True):
            checked_tensors += isinstance(value, torch.Tensor)
            strided = f"{name}_stride" in fields or (name == first and {"stride", "row_stride"} & {*fields})
            if isinstance(value, torch.Tensor) and not value.is_contiguous() and not strided:
                unstrided_arguments.add((type(arguments).__name__, name))
        original_launch(kernel, grid, arguments, constants)

    monkeypatch.setattr(launch, "_launch_kernel", check_and_launch)
    target, draft = tiny_pair()
    draft_settings = SHAPES["tree"] if has_draft else {}
    plain_engine = build_engine(config_of(target, attention_backend="torch", disable_radix_cache=True))
    engine = build_engine(config_of(target, draft if has_draft else None, **draft_settings, attention_backend="triton"))
    requests_of_all_kinds = [
        make_request(kind, [3 + at, 5, 2], params, max_tokens=2, seed=at)
        for at, (kind, params) in enumerate(SAMPLING.items())
    ]
    assert run(engine, requests_of_all_kinds).tokens == run(plain_engine, requests_of_all_kinds).tokens
    assert checked_tensors > 0, "no kernel was launched by the function that this test replaces"
    assert not unstrided_arguments


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
