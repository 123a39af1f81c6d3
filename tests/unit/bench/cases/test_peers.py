"""The settings that the peers bench gives to vLLM, which a stand-in of vLLM's package records. Aerie and vLLM get the
same random model, with tensor names that both know.
"""

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
"""Repeats the first token id of a prompt as its answer, and writes the engine's settings to a file."""
import json, os, struct
from types import SimpleNamespace as Plain

def SamplingParams(**fields):
    assert fields["ignore_eos"] and not fields["detokenize"]
    return Plain(**fields)

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
        with open(os.environ["SETTINGS_LOG"], "a") as file:
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
def settings_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file to which the stand-in writes the settings of each engine, one JSON line per engine."""
    (tmp_path / "vllm.py").write_text(STAND_IN, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("SETTINGS_LOG", str(tmp_path / "settings.json"))
    monkeypatch.setenv(VLLM_VARIABLE, sys.executable)
    return tmp_path / "settings.json"


def test_peers_bench_measures_random_model_with_plain_decoding_in_vllm(settings_log: Path) -> None:
    result = measure(ModelPair(), SIZE, lambda text: None)
    default_settings, tuned_settings = map(json.loads, settings_log.read_text(encoding="utf-8").splitlines())
    assert default_settings["bound"] == "" and set(tuned_settings["bound"].split(",")) == {
        str(core) for core in os.sched_getaffinity(0)
    }
    assert default_settings["dtype"] == result["dtype"] == "float32" and default_settings["skip_tokenizer_init"]
    assert "speculative_config" not in default_settings and default_settings["max_num_seqs"] == 2
    assert {"model.embed_tokens.weight", "model.layers.3.mlp.up_proj.weight", "lm_head.weight"} < set(
        default_settings["names"]
    )
    assert result["target"] == "tiny" and result["layers"] == [4, 4]
    assert [(line["setting"], line["temperature"], line["batch"]) for line in result["lines"]] == [
        ("plain", temperature, batch) for temperature in peers.TEMPERATURES for batch in (1, 2)
    ]
    assert all(line["vllm_ratio"] > 0 and line["tuned_ratio"] > 0 for line in result["lines"])
    assert "float32" in show(result) and "3 new tokens after 5, medians of 1 repeats" in show(result)


@pytest.mark.slow
def test_peers_bench_gives_vllm_the_same_draft_chain(settings_log: Path) -> None:
    """The demo's draft reads the outputs of layers 2, 5 and 8. vLLM counts them as the inputs of layers 3, 6 and 9."""
    result = measure(ModelPair(), replace(QUICK, batches=(1,), new_tokens=3, prompt_tokens=5), lambda text: None)
    *plain_settings, chain_settings, tuned_settings = map(
        json.loads, settings_log.read_text(encoding="utf-8").splitlines()
    )
    assert len(plain_settings) == 2 and all("draft" not in settings for settings in plain_settings)
    assert chain_settings["draft"]["eagle_aux_hidden_state_layer_ids"] == [3, 6, 9]
    assert (
        "draft_sample_method" not in chain_settings["speculative_config"]
        and chain_settings["draft"] == tuned_settings["draft"]
    )
    assert tuned_settings["speculative_config"]["draft_sample_method"] == "probabilistic"
    greedy, sampled = (line for line in result["lines"] if line["setting"] == "chain of 3")
    assert greedy["tuned_accept_length"] == 2.5 and greedy["same_texts"] == 0.0 and sampled["same_texts"] is None


def test_peers_bench_raises_if_vllm_returns_too_few_tokens(settings_log: Path) -> None:
    (settings_log.parent / "vllm.py").write_text(STAND_IN.replace("* own.max_tokens", "* 2"), encoding="utf-8")
    with pytest.raises(RuntimeError, match=r"made \[2\] tokens, not 3"):
        measure(ModelPair(), replace(SIZE, batches=(1,)), lambda text: None)


def test_peers_bench_without_vllm_names_the_variable_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VLLM_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="set AERIE_VLLM to the Python of an environment with vLLM"):
        measure(ModelPair(), SIZE)
