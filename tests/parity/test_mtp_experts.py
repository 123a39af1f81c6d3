"""A target and the MTP layer of its own checkpoint, both with experts, in a whole engine: law 1 on chains and trees."""

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
from tests.families import LAYERS, VOCAB, made
from tests.parity import harness
from tests.parity.drafts import Texts, correct
from tests.parity.harness import GREEDY, SAMPLING, Run, config_of, request, run
from tests.unit.models.draft_folders import Random, write
from tests.unit.models.mtp_layers import qwen_next

TARGETS = {"deepseek_v3": "low-rank queries", "glm4_moe": "half rotated, norms, biases"}
STEPS = 3


@cache
def checkpoint(family: str, count: int = 1) -> str:
    """The target's folder with `count` MTP layers behind its last layer, each shaped like that one."""
    source = Path(made(family, TARGETS[family]).folder)
    held, random = load_file(source / "model.safetensors"), Random(61)
    last = {name: tensor for name, tensor in held.items() if f"layers.{LAYERS - 1}." in name}
    width = held["model.norm.weight"].shape[0]
    for at in range(LAYERS, LAYERS + count):
        for name, like in last.items():
            new = random.matrix(*like.shape) + (1 if "norm" in name else 0)
            held[re.sub(r"layers\.\d+", f"layers.{at}", name)] = new.to(like.dtype)
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            held[f"model.layers.{at}.{norm}.weight"] = random.scale(width)
        held[f"model.layers.{at}.eh_proj.weight"] = random.matrix(width, 2 * width)
        held[f"model.layers.{at}.embed_tokens.weight"] = held["model.embed_tokens.weight"].clone()
        held[f"model.layers.{at}.shared_head.head.weight"] = held["lm_head.weight"].clone()
    config = json.loads((source / "config.json").read_text()) | {"num_nextn_predict_layers": count}
    return write(held, config)


def prompt(length: int, seed: int = 1) -> list[int]:
    return torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def requests() -> list[Request]:
    common = {"max_tokens": 20, "ignore_eos": True}
    return [
        request("a", prompt(33), GREEDY, **common),
        request("b", prompt(7, 2), SAMPLING["0.8"], seed=3, **common),
        request("c", [*prompt(33)[:20], *prompt(9, 3)], SAMPLING["filtered"], seed=4, **common),
    ]


@cache
def plain(family: str) -> Run:
    return run(build_engine(config_of(checkpoint(family), disable_radix_cache=True)), requests())


@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.parametrize(("topk", "count", "rate"), [(1, 1, 0.0), (1, 1, 0.6), (3, 1, 0.6), (2, 3, 0.6)])
def test_moe_target_with_mtp_draft_matches_plain_decoding(family: str, topk: int, count: int, rate: float) -> None:
    """One layer used again and again, and a draft runner list; alone, and right often enough to reach every depth."""
    folder = checkpoint(family, count)
    config = config_of(folder, folder, topk, STEPS, speculative_algorithm="NEXTN", chunked_prefill_size=16)
    engine = build_engine(config)
    if rate:
        correct(engine, truth(family), rate)
    reached: set[int] = set()
    for _ in range(2):  # the second time from cached pages
        result = run(engine, requests())
        assert result.ended == plain(family).ended
        reached |= set(result.accept_lens)
    assert reached >= ({1, 2, 3, 4} if rate else {1})


def truth(family: str) -> Texts:
    return {one.request_id: [*one.prompt_token_ids, *plain(family).tokens[one.request_id]] for one in requests()}


@pytest.mark.parametrize(("topk", "sampling"), [(1, "greedy"), (3, "0.8")])
def test_qwen3_next_mtp_draft_matches_plain_decoding(topk: int, sampling: str) -> None:
    """Qwen3-Next's MTP layer behind a target of its sizes, as its own is not served; steps without rows included."""
    target, draft = harness.tiny_pair()[0], qwen_next(vocab_size=harness.VOCAB)
    engine = build_engine(config_of(target, draft, topk, STEPS, speculative_algorithm="NEXTN", chunked_prefill_size=7))
    correct(engine, harness.truth(sampling), 0.6)
    result = run(engine, harness.grid_requests(sampling, 8))
    assert result.ended == harness.plain_run(sampling).ended
    assert set(result.accept_lens) >= {1, 2, 3, 4}


@pytest.mark.parametrize("family", TARGETS)
def test_moe_target_with_mtp_tensors_matches_transformers(family: str) -> None:
    """So a target reads its own tensors alone, with an MTP layer in the same file."""
    asked = requests()[0]
    oracle = made(family, TARGETS[family]).oracle
    assert plain(family).tokens["a"] == oracle.greedy(list(asked.prompt_token_ids), 20)


@pytest.mark.parametrize("family", TARGETS)
def test_inspect_separates_target_and_mtp_tensors(family: str) -> None:
    folder = checkpoint(family)
    report, tensors = inspect(folder, folder, ServingSetup(tp=2)), load_file(Path(folder) / "model.safetensors")
    assert report.problems == []
    assert report.draft is not None
    assert report.features["speculation"] == "NEXTN"
    own = {name for name in tensors if f"layers.{LAYERS}." in name}
    copies = {name for name in own if "embed_tokens" in name or "shared_head.head" in name}
    assert {placed["name"] for placed in report.draft["tensors"]} == own - copies
    assert {placed["name"] for placed in report.target["tensors"]} == tensors.keys() - own


@pytest.mark.parametrize("family", TARGETS)
def test_mtp_draft_trees_depend_on_its_own_experts(family: str) -> None:
    """The draft's own MTP layer is asked, and its experts matter: with others it drafts other trees."""
    folder = checkpoint(family)
    config = config_of(folder, folder, 1, STEPS, speculative_algorithm="NEXTN")

    def trees(spoil: bool) -> list[list[int]]:
        engine = build_engine(config)
        step = engine._parts.lockstep.step
        draft = step._draft
        model = draft._runner.model  # type: ignore[attr-defined]
        assert len(model._layers) == 1
        if spoil:
            mlp = model._layers[0].mlp
            object.__setattr__(mlp, "down", TorchKernels().stack(torch.zeros_like(mlp.down.dense())))
        seen, true = [], draft.draft
        draft.draft = lambda *given: seen.append(true(*given)) or seen[-1]  # type: ignore[method-assign,func-returns-value]
        run(engine, requests())
        return [row for tree in seen for row in tree.tokens.tolist()]

    assert trees(spoil=False) == trees(spoil=False) != trees(spoil=True)
