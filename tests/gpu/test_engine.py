"""Tests of an engine on a CUDA device: in float64 it gives the same tokens as on the CPU."""

from pathlib import Path

import pytest
import torch

from cluster.config import EngineConfig
from cluster.engine import build_engine
from cluster.offline.stepping import complete
from cluster.request import Request, RequestParams
from tests.support.tiny_checkpoints import tiny_draft, tiny_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_cuda_engine_gives_the_tokens_of_the_cpu(tmp_path: Path, topk: int, temperature: float) -> None:
    target = tiny_target(tmp_path / "target")
    draft = tiny_draft(tmp_path / "draft", target)
    requests = [
        Request(str(i), tuple(range(2 + i, 30 + i)), RequestParams(temperature=temperature, seed=i, max_tokens=24))
        for i in range(4)
    ]
    texts = []
    for device in ("cpu", "cuda"):
        config = EngineConfig(
            model_path=target,
            dtype="float64",
            device=device,
            speculative_algorithm="EAGLE3",
            speculative_draft_model_path=draft,
            speculative_num_steps=3,
            speculative_eagle_topk=topk,
        )
        texts.append(complete(build_engine(config), requests))
    assert texts[0] == texts[1]
