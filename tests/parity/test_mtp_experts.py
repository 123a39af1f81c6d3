"""Law 1 on chains and trees, for a target and the MTP layer of its own checkpoint. Both have experts."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cluster.engine import build_engine
from cluster.kernels.torch_kernels import TorchKernels
from cluster.request import Request
from cluster.tools.tensor_report import ServingSetup, inspect
from tests.parity import harness
from tests.parity.drafts import Texts, correct
from tests.parity.harness import GREEDY, SAMPLING, RunResult, config_of, make_request, run
from tests.support.families import LAYERS, VOCAB, family_checkpoint
from tests.unit.models.draft_folders import RandomWeights, write
from tests.unit.models.mtp_layers import qwen_next

TARGETS = {"deepseek_v3": "low-rank queries", "glm4_moe": "half rotated, norms, biases"}
STEPS = 3


@cache
def checkpoint(family: str, count: int = 1) -> str:
    """Write a copy of the target with `count` MTP layers after its last layer; return its folder. The tensors of an MTP
    layer have the shapes of the last layer's tensors.
    """
    source = Path(family_checkpoint(family, TARGETS[family]).folder)
    tensors, random = load_file(source / "model.safetensors"), RandomWeights(61)
    last_layer_tensors = {name: tensor for name, tensor in tensors.items() if f"layers.{LAYERS - 1}." in name}
    width = tensors["model.norm.weight"].shape[0]
    for layer in range(LAYERS, LAYERS + count):
        for name, original_tensor in last_layer_tensors.items():
            new_tensor = random.matrix(*original_tensor.shape) + (1 if "norm" in name else 0)
            tensors[re.sub(r"layers\.\d+", f"layers.{layer}", name)] = new_tensor.to(original_tensor.dtype)
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = random.scale(width)
        tensors[f"model.layers.{layer}.eh_proj.weight"] = random.matrix(width, 2 * width)
        tensors[f"model.layers.{layer}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"model.layers.{layer}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    config = json.loads((source / "config.json").read_text()) | {"num_nextn_predict_layers": count}
    return write(tensors, config)


def prompt(length: int, seed: int = 1) -> list[int]:
    return torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def requests() -> list[Request]:
    common = {"max_tokens": 20, "ignore_eos": True}
    return [
        make_request("a", prompt(33), GREEDY, **common),
        make_request("b", prompt(7, 2), SAMPLING["0.8"], seed=3, **common),
        make_request("c", [*prompt(33)[:20], *prompt(9, 3)], SAMPLING["filtered"], seed=4, **common),
    ]


@cache
def plain(family: str) -> RunResult:
    return run(build_engine(config_of(checkpoint(family), disable_radix_cache=True)), requests())


@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.parametrize(("topk", "count", "rate"), [(1, 1, 0.0), (1, 1, 0.6), (3, 1, 0.6), (2, 3, 0.6)])
def test_moe_target_with_mtp_draft_matches_plain_decoding(family: str, topk: int, count: int, rate: float) -> None:
    """With one MTP layer that drafts every level, and with one MTP layer per level. With `rate` 0 the draft is not
    corrected; otherwise it is right often enough to reach every depth.
    """
    folder = checkpoint(family, count)
    config = config_of(folder, folder, topk, STEPS, speculative_algorithm="NEXTN", chunked_prefill_size=16)
    engine = build_engine(config)
    if rate:
        correct(engine, plain_texts(family), rate)
    accept_lens: set[int] = set()
    for _ in range(2):  # in the second run the prompts are cached
        result = run(engine, requests())
        assert result.completions == plain(family).completions
        accept_lens |= set(result.accept_lens)
    assert accept_lens >= ({1, 2, 3, 4} if rate else {1})


def plain_texts(family: str) -> Texts:
    return {
        request.request_id: [*request.prompt_token_ids, *plain(family).tokens[request.request_id]]
        for request in requests()
    }


@pytest.mark.parametrize(("topk", "sampling"), [(1, "greedy"), (3, "0.8")])
def test_qwen3_next_mtp_draft_matches_plain_decoding(topk: int, sampling: str) -> None:
    """Qwen3-Next's MTP layer with another target of the same sizes, since Aerie does not serve Qwen3-Next itself. Steps
    without rows are included.
    """
    target, draft = harness.tiny_pair()[0], qwen_next(vocab_size=harness.VOCAB)
    engine = build_engine(config_of(target, draft, topk, STEPS, speculative_algorithm="NEXTN", chunked_prefill_size=7))
    correct(engine, harness.plain_texts(sampling), 0.6)
    result = run(engine, harness.grid_requests(sampling, 8))
    assert result.completions == harness.plain_run(sampling).completions
    assert set(result.accept_lens) >= {1, 2, 3, 4}


@pytest.mark.parametrize("family", TARGETS)
def test_moe_target_with_mtp_tensors_matches_transformers(family: str) -> None:
    """With an MTP layer in the same file, the target still reads only its own tensors."""
    request = requests()[0]
    oracle = family_checkpoint(family, TARGETS[family]).oracle
    assert plain(family).tokens["a"] == oracle.greedy(list(request.prompt_token_ids), 20)


@pytest.mark.parametrize("family", TARGETS)
def test_inspect_separates_target_and_mtp_tensors(family: str) -> None:
    folder = checkpoint(family)
    report, tensors = inspect(folder, folder, ServingSetup(tp=2)), load_file(Path(folder) / "model.safetensors")
    assert report.problems == []
    assert report.draft is not None
    assert report.features["speculation"] == "NEXTN"
    mtp_names = {name for name in tensors if f"layers.{LAYERS}." in name}
    shared_copies = {name for name in mtp_names if "embed_tokens" in name or "shared_head.head" in name}
    assert {entry["name"] for entry in report.draft["tensors"]} == mtp_names - shared_copies
    assert {entry["name"] for entry in report.target["tensors"]} == tensors.keys() - mtp_names


@pytest.mark.parametrize("family", TARGETS)
def test_mtp_draft_trees_depend_on_its_own_experts(family: str) -> None:
    """The draft uses its own MTP layer with its own experts: with zeros in the experts it drafts other trees."""
    folder = checkpoint(family)
    config = config_of(folder, folder, 1, STEPS, speculative_algorithm="NEXTN")

    def trees(zero_experts: bool) -> list[list[int]]:
        engine = build_engine(config)
        step = engine._parts.lockstep.step
        draft = step._draft
        model = draft._runner.model  # type: ignore[attr-defined]
        assert len(model._layers) == 1
        if zero_experts:
            mlp = model._layers[0].mlp
            object.__setattr__(mlp, "down", TorchKernels().stack(torch.zeros_like(mlp.down.dense())))
        drafted_trees, original_draft = [], draft.draft
        draft.draft = lambda *args: drafted_trees.append(original_draft(*args)) or drafted_trees[-1]  # type: ignore[method-assign,func-returns-value]
        run(engine, requests())
        return [row for tree in drafted_trees for row in tree.tokens.tolist()]

    assert trees(zero_experts=False) == trees(zero_experts=False) != trees(zero_experts=True)
