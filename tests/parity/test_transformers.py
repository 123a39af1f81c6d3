"""Plain decoding equals transformers' greedy decoding, token for token, in float64."""

from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from cluster.engine import Engine, build_engine
from cluster.train.corpus import heldout_prompts
from tests.parity.harness import GREEDY, SAMPLING, config_of, make_request, run, speculative_engine
from tests.support.tiny_checkpoints import target_folder

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
TARGETS: dict[str, dict[str, object]] = {
    "grouped heads": {},
    "one head each": {"kv_heads": 4},
    "one kv head": {"kv_heads": 1},
    "tied": {"tied": True},
    "biases": {"biases": True},
    "llama3 rope": {"llama3": True},
    "llama3 rope, tied, biases": {"llama3": True, "tied": True, "biases": True},
    "own theta": {"rope_theta": 500.0},
    "two layers, wide heads": {"layers": 2, "heads": 2, "kv_heads": 1},
}
has_demo = pytest.mark.skipif(not (DEMO / "draft" / "config.json").is_file(), reason="the demo pair is not there")


@cache
def oracle(folder: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


def greedy(folder: str, prompt: list[int], new: int) -> list[int]:
    """Return up to `new` tokens of greedy decoding by `transformers`. EOS ends them and is included."""
    input_ids = torch.tensor([prompt])
    with torch.inference_mode():
        output_ids = oracle(folder).generate(
            input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=new, do_sample=False, pad_token_id=0
        )
    return output_ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", TARGETS)
def test_greedy_tokens_of_tiny_targets_match_transformers(name: str) -> None:
    folder = target_folder(seed=3, **TARGETS[name])
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, 64, (n,), generator=generator).tolist() for n in (1, 9, 70, 23)]
    engine = build_engine(config_of(folder, chunked_prefill_size=16))
    result = run(engine, [make_request(f"{i}", prompt, GREEDY, max_tokens=40) for i, prompt in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        assert result.tokens[f"{i}"] == greedy(folder, prompt, 40)


@pytest.mark.parametrize("name", TARGETS)
def test_logprobs_of_tiny_targets_match_transformers(name: str) -> None:
    """The tolerance is large because transformers keeps its rope angles in float32."""
    folder = target_folder(seed=3, **TARGETS[name])
    prompt = torch.randint(2, 64, (80,), generator=torch.Generator().manual_seed(2)).tolist()
    engine = build_engine(config_of(folder))
    result = run(engine, [make_request("0", prompt, GREEDY, max_tokens=8, logprobs=20, ignore_eos=True)])
    with torch.inference_mode():
        logits = oracle(folder)(torch.tensor([prompt + result.tokens["0"]])).logits[0]
    for i, line in enumerate(x for output in result.outputs["0"] for x in output.logprobs):
        row = logits[len(prompt) - 1 + i].log_softmax(-1)
        assert line.logprob == pytest.approx(float(row[line.token_id]), abs=2e-3)
        for token, p in line.top:
            assert p == pytest.approx(float(row[token]), abs=2e-3)


def heldout(count: int, length: int) -> list[list[int]]:
    return heldout_prompts(AutoTokenizer.from_pretrained(DEMO / "target"), count, length)


def demo_engine(topk: int = 0, num_steps: int = 0, **settings: object) -> Engine:
    folders = (str(DEMO / "target"), str(DEMO / "draft") if topk else None)
    return speculative_engine(
        config_of(*folders, topk, num_steps, max_total_tokens=8192, context_length=1024, **settings)
    )


@has_demo
@pytest.mark.parametrize("count", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_greedy_tokens_of_the_demo_target_match_transformers(count: int) -> None:
    folder, prompts = str(DEMO / "target"), heldout(count, 48)
    new = 24 if count < 50 else 64
    result = run(demo_engine(), [make_request(f"{i}", p, GREEDY, max_tokens=new) for i, p in enumerate(prompts)])
    assert not [i for i, p in enumerate(prompts) if result.tokens[f"{i}"] != greedy(folder, p, new)]


@has_demo
@pytest.mark.parametrize(
    ("count", "new", "shapes"),
    [
        (4, 16, [(1, 5), (4, 5)]),
        pytest.param(8, 48, [(k, s) for k in (1, 2, 4, 8) for s in (1, 2, 3, 5)], marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("sampling", SAMPLING)
def test_demo_pair_with_speculation_matches_plain_decoding(
    count: int, new: int, shapes: list[tuple[int, int]], sampling: str
) -> None:
    """With the trained draft, the tokens are those of plain decoding, and more than 1.5 are accepted per step."""
    requests = [
        make_request(f"{i}", p, SAMPLING[sampling], seed=i, max_tokens=new, ignore_eos=i % 2 == 0)
        for i, p in enumerate(heldout(count, 40))
    ]
    plain = run(demo_engine(page_size=16), requests)
    for topk, num_steps in shapes:
        speculative_result = run(
            demo_engine(topk, num_steps, page_size=(1, 4, 16)[topk % 3], chunked_prefill_size=64), requests
        )
        assert speculative_result.completions == plain.completions
        assert speculative_result.accept_length > 1.5, "the accept length of the trained draft is too small"
