"""What vLLM is asked for, with a stand-in of its package: both are given a made-up model under names that both know."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.bench.cases import peers
from cluster.bench.cases.peers import QUICK, VLLM_VARIABLE, measure, show
from cluster.bench.pair import ModelPair
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
        drafts = settings.get("speculative_config")
        if drafts:
            with open(drafts["model"] + "/config.json") as file:
                settings["draft"] = json.load(file)
            assert os.path.exists(drafts["model"] + "/model.safetensors")
        self.drafts = 0
        bound = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "")
        with open(os.environ["SAID"], "a") as file:
            file.write(json.dumps(settings | {"names": names, "bound": bound}) + "\\n")

    def get_metrics(self):
        self.drafts += 10
        counts = {"drafts": self.drafts, "accepted_tokens": 1.5 * self.drafts, "draft_tokens": 3 * self.drafts}
        return [Plain(name="vllm:spec_decode_num_" + name, value=value) for name, value in counts.items()]

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
    monkeypatch.setenv(VLLM_VARIABLE, sys.executable)
    return tmp_path / "said.json"


def test_peers_bench_measures_random_model_with_plain_decoding_in_vllm(said: Path) -> None:
    result = measure(ModelPair(), SIZE, lambda text: None)
    asked, tuned = map(json.loads, said.read_text(encoding="utf-8").splitlines())
    assert asked["bound"] == "" and set(tuned["bound"].split(",")) == {str(core) for core in os.sched_getaffinity(0)}
    assert asked["dtype"] == result["dtype"] == "float32" and asked["skip_tokenizer_init"]
    assert "speculative_config" not in asked and asked["max_num_seqs"] == 2
    assert {"model.embed_tokens.weight", "model.layers.3.mlp.up_proj.weight", "lm_head.weight"} < set(asked["names"])
    assert result["target"] == "tiny" and result["layers"] == [4, 4]
    assert [(line["setting"], line["temperature"], line["batch"]) for line in result["lines"]] == [
        ("plain", temperature, batch) for temperature in peers.TEMPERATURES for batch in (1, 2)
    ]
    assert all(line["vllm_ratio"] > 0 and line["tuned_ratio"] > 0 for line in result["lines"])
    assert "float32" in show(result) and "3 new tokens after 5, medians of 1 repeats" in show(result)


@pytest.mark.slow
def test_peers_bench_gives_vllm_the_same_draft_chain(said: Path) -> None:
    """The demo's draft reads what layers 2, 5 and 8 give, which vLLM counts as what is given to those after them."""
    result = measure(ModelPair(), replace(QUICK, batches=(1,), new_tokens=3, prompt_tokens=5), lambda text: None)
    *plain, chain, tuned = map(json.loads, said.read_text(encoding="utf-8").splitlines())
    assert len(plain) == 2 and all("draft" not in each for each in plain)
    assert chain["draft"]["eagle_aux_hidden_state_layer_ids"] == [3, 6, 9]
    assert "draft_sample_method" not in chain["speculative_config"] and chain["draft"] == tuned["draft"]
    assert tuned["speculative_config"]["draft_sample_method"] == "probabilistic"
    greedy, sampled = (line for line in result["lines"] if line["setting"] == "chain of 3")
    assert greedy["tuned_accept_length"] == 2.5 and greedy["same_texts"] == 0.0 and sampled["same_texts"] is None


def test_peers_bench_raises_if_vllm_returns_too_few_tokens(said: Path) -> None:
    (said.parent / "vllm.py").write_text(STAND_IN.replace("* own.max_tokens", "* 2"), encoding="utf-8")
    with pytest.raises(RuntimeError, match=r"made \[2\] tokens, not 3"):
        measure(ModelPair(), replace(SIZE, batches=(1,)), lambda text: None)


def test_peers_bench_without_vllm_names_the_variable_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VLLM_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="set AERIE_VLLM to the Python of an environment with vLLM"):
        measure(ModelPair(), SIZE)
