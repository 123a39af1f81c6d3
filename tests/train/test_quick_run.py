"""`aerie train --quick` runs all parts of training in seconds, and its checkpoints load like any other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster.arch.resolve import resolve_models
from cluster.config import EngineConfig
from cluster.train.command import run
from tests.train.test_command import parse_arguments


@pytest.mark.slow
def test_quick_training_run_writes_a_loadable_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, work = tmp_path / "out", tmp_path / "work"
    arguments = ("--quick", "--out", str(out), "--work", str(work), "--threads", "1")
    assert run(parse_arguments(*arguments)) == 0
    tokenizer = AutoTokenizer.from_pretrained(out / "target")
    target = AutoModelForCausalLM.from_pretrained(out / "target")
    text = "def f(x):\n    return x\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert target.dtype == torch.bfloat16
    assert target(torch.tensor([ids])).logits.shape == (1, len(ids), 512)
    assert target.generation_config.eos_token_id == [0, 2]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    pair = EngineConfig(model_path=str(out / "target"), speculative_draft_model_path=str(out / "draft"))
    draft = resolve_models(pair).draft
    assert draft is not None and draft.aux_boundaries == (1, 2, 3)
    assert "accept_len" in (out / "README.md").read_text()
    # A second run finds that its time is used up, and changes nothing.
    draft_before = (out / "draft" / "model.safetensors").read_bytes()
    assert run(parse_arguments("draft", *arguments)) == 0
    assert (out / "draft" / "model.safetensors").read_bytes() == draft_before
    assert "accept_len" in capsys.readouterr().out
    # The MTP layers train on the same text. The command writes them to the work directory.
    for layers in (1, 3):
        assert run(parse_arguments("mtp", "--mtp-layers", str(layers), *arguments)) == 0
        assert json.loads((work / f"mtp-{layers}/config.json").read_text())["num_nextn_predict_layers"] == layers
        names = load_file(work / f"mtp-{layers}/model.safetensors")
        assert {name.split(".")[2] for name in names} == {str(4 + i) for i in range(layers)}
