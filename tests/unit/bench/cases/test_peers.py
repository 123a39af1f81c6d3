"""What vLLM is asked for, with a stand-in of its package: both are given a made-up model under names that both know."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.bench.cases import peers
from cluster.bench.cases.peers import QUICK, VLLM, measure, show
from cluster.bench.pair import Pair
from cluster.config import ConfigError

STAND_IN = '''
"""Answers the number of the prompt's first token, and says what it was made with."""
import json, os, struct
from types import SimpleNamespace as Plain

def SamplingParams(**given):
    assert given["ignore_eos"] and not given["detokenize"]
    return Plain(**given)

class LLM:
    def __init__(self, **settings):
        with open(settings["model"] + "/model.safetensors", "rb") as file:
            names = list(json.loads(file.read(struct.unpack("<Q", file.read(8))[0])))
        with open(os.environ["SAID"], "w") as file:
            json.dump(settings | {"names": names}, file)

    def generate(self, prompts, params, use_tqdm):
        return [
            Plain(outputs=[Plain(token_ids=[prompt["prompt_token_ids"][0]] * own.max_tokens)])
            for prompt, own in zip(prompts, params, strict=True)
        ]
'''
SIZE = replace(QUICK, batches=(1, 2), new_tokens=3, prompt_tokens=5, shape="tiny")


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-in writes what it was made with."""
    (tmp_path / "vllm.py").write_text(STAND_IN, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("SAID", str(tmp_path / "said.json"))
    monkeypatch.setenv(VLLM, sys.executable)
    return tmp_path / "said.json"


def test_a_made_up_model_is_measured_plain(said: Path) -> None:
    result = measure(Pair(), SIZE, lambda text: None)
    asked = json.loads(said.read_text(encoding="utf-8"))
    assert asked["dtype"] == result["dtype"] == "float32" and asked["skip_tokenizer_init"]
    assert "speculative_config" not in asked and asked["max_num_seqs"] == 2
    assert {"model.embed_tokens.weight", "model.layers.3.mlp.up_proj.weight", "lm_head.weight"} < set(asked["names"])
    assert result["target"] == "tiny" and result["layers"] == [4, 4]
    assert [(line["setting"], line["temperature"], line["batch"]) for line in result["lines"]] == [
        ("plain", temperature, batch) for temperature in peers.TEMPERATURES for batch in (1, 2)
    ]
    assert all(line["ratio"] > 0 for line in result["lines"])
    assert show(result).startswith("tiny, float32: 3 new tokens after 5, medians of 1 repeats")


def test_without_vllm_it_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VLLM, raising=False)
    with pytest.raises(ConfigError, match="set AERIE_VLLM to the Python of an environment with vLLM"):
        measure(Pair(), SIZE)
