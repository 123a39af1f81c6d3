"""The engine with FlashInfer's stand-in gives the tokens of plain decoding with torch attention, for chains, trees and
chunked prompts.
"""

from itertools import product
from typing import Any

import pytest
import torch

from cluster.config import ConfigError
from cluster.engine import build_engine
from cluster.engine.backends import sampler_of, tree_backend_of
from cluster.kernels.flashinfer.kernels import FlashInferKernels
from cluster.kernels.triton_kernels import TritonKernels
from cluster.sampling.triton_sampler import TritonSampler
from cluster.spec.row_budget import select_nodes
from cluster.spec.triton_tree import TritonGrowth, accept
from tests.flashinfer.stand_in import DEVICE, install_stand_in, stand_in
from tests.parity.harness import SAMPLING, config_of, make_request, run, tiny_pair
from tests.support.families import family_checkpoint
from tests.support.late_device import delay
from tests.support.tiny_checkpoints import draft_folder

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_steps": 3},
    "tree": {"topk": 3, "num_steps": 3, "speculative_num_draft_tokens": 7},
}
FAMILIES = {"grouped": None, "latent": ("deepseek_v3", "low-rank queries"), "sinks, windows": ("gpt_oss", "yarn")}
QUICK = (("chain", "latent", False),)
ALL = [(shape, family, (s + f) % 2 == 0) for (s, shape), (f, family) in product(enumerate(SHAPES), enumerate(FAMILIES))]
"""Every shape with every family, as (shape, family, overlap). Each shape and family has both values of `overlap`."""


@pytest.fixture(autouse=True)
def use_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    install_stand_in(monkeypatch.setattr)


def requests(sampling: str = "0.8") -> list[Any]:
    prompts = [[3, 5, 2], [1, *range(2, 15)]]
    return [
        make_request(f"r{index}", prompt, SAMPLING[sampling], max_tokens=4, seed=index)
        for index, prompt in enumerate(prompts)
    ]


def pair(family: str) -> tuple[str, str]:
    """Return the folders of a target of this family and of a draft for it."""
    family_and_case = FAMILIES[family]
    if family_and_case is None:
        return tiny_pair()
    target = family_checkpoint(*family_and_case).folder
    return target, draft_folder(target)


@pytest.mark.parametrize(
    ("shape", "family", "overlap"),
    [pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow) for each in ALL],
)
def test_flashinfer_engine_gives_the_tokens_of_plain_decoding(shape: str, family: str, overlap: bool) -> None:
    """With `overlap` the host is one step ahead. A step is then planned with the lengths before the step under way."""
    target, draft = pair(family)
    expected = run(build_engine(config_of(target, attention_backend="torch")), requests())
    settings = {"attention_backend": "flashinfer", "chunked_prefill_size": 8, **SHAPES[shape]}
    engine = build_engine(config_of(target, draft, **settings))
    if overlap:
        delay(engine)
    counts_before = DEVICE.plans, DEVICE.runs
    assert run(engine, requests()).tokens == expected.tokens
    assert DEVICE.plans > counts_before[0] and DEVICE.runs > counts_before[1] + 10


def test_engine_info_lists_the_layers_left_to_triton() -> None:
    info = build_engine(config_of(family_checkpoint("gpt_oss", "yarn").folder, attention_backend="flashinfer")).info()
    assert info.attention_backend == "flashinfer" and "attention by FlashInfer 0." in info.kernels
    assert info.attention == (
        "target, layers 0, 2: trees by Triton: in its sliding windows a row's place counts, in a tree a node's depth",
    )
    assert build_engine(config_of(tiny_pair()[0], attention_backend="torch")).info().attention == ()


def test_flashinfer_kernels_use_triton_tree_ops_and_sampler() -> None:
    kernels = FlashInferKernels(stand_in())
    assert tree_backend_of(kernels) == tree_backend_of(TritonKernels()) == (TritonGrowth, select_nodes, accept)
    assert isinstance(sampler_of(kernels), TritonSampler)


def test_flashinfer_backend_refuses_a_target_with_unsupported_head_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    install_stand_in(monkeypatch.setattr, all_head_sizes=False)
    with pytest.raises(ConfigError, match=r"flashinfer has no part in this target: .*\[64, 128, 256\] .*; set it to"):
        build_engine(config_of(tiny_pair()[0], attention_backend="flashinfer"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_flashinfer_backend_without_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="attention_backend flashinfer runs on a GPU and device is cpu; set"):
        build_engine(config_of(tiny_pair()[0], attention_backend="flashinfer"))
