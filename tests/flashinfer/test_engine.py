"""The engine on FlashInfer's stand-in gives the tokens of plain decoding by torch: chain, tree, prompts beside them."""

from typing import Any

import pytest

from cluster.config import ConfigError
from cluster.engine import build_engine
from tests.families import made
from tests.flashinfer.stand_in import DEVICE, stand_in_serves
from tests.late import delay
from tests.parity.harness import SAMPLING, config_of, request, run, tiny_pair
from tests.tiny import draft_folder

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_steps": 3},
    "tree": {"topk": 3, "num_steps": 3, "speculative_num_draft_tokens": 7},
}
FAMILIES = {"grouped": None, "latent": ("deepseek_v3", "low-rank queries"), "sinks, windows": ("gpt_oss", "yarn")}


@pytest.fixture(autouse=True)
def serves(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_serves(monkeypatch.setattr)


def requests(sampling: str = "0.8") -> list[Any]:
    prompts = [[3, 5, 2], [1, *range(2, 15)], [4, *range(2, 21)]]
    return [request(f"r{at}", prompt, SAMPLING[sampling], max_tokens=6, seed=at) for at, prompt in enumerate(prompts)]


def pair(family: str) -> tuple[str, str]:
    named = FAMILIES[family]
    if named is None:
        return tiny_pair()
    target = made(*named).folder
    return target, draft_folder(target)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_those_of_plain_decoding(shape: str, family: str, overlap: bool) -> None:
    target, draft = pair(family)
    expected = run(build_engine(config_of(target, attention_backend="torch")), requests())
    given = {"attention_backend": "flashinfer", "chunked_prefill_size": 8, **SHAPES[shape]}
    engine = build_engine(config_of(target, draft, **given))
    if overlap:
        delay(engine)
    before = DEVICE.plans, DEVICE.runs
    assert run(engine, requests()).tokens == expected.tokens
    assert DEVICE.plans > before[0] and DEVICE.runs > before[1] + 10
    assert engine.info().attention_backend == "flashinfer" and "FlashInfer 0." in engine.info().kernels
