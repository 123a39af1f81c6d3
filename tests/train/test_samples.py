"""The hand-written decode loop and the feature capture, compared with `transformers` in float64."""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

from cluster.train.samples import continue_rows, features
from cluster.train.target import TargetRecipe, build_target

RECIPE = TargetRecipe(vocab_size=50, hidden_size=32, layers=4, heads=4, kv_heads=2, head_dim=8, intermediate_size=48)


def random_target() -> LlamaForCausalLM:
    target = build_target(RECIPE).double().eval().requires_grad_(False)
    torch.manual_seed(1)
    for parameter in target.parameters():
        parameter.add_(0.2 * torch.randn_like(parameter))
    return target


def test_greedy_continuations_match_transformers() -> None:
    target = random_target()
    prompts = torch.randint(3, 50, (3, 5))
    decoded = continue_rows(target, prompts, 12, torch.zeros(3), seed=0)
    expected = target.generate(prompts, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(decoded, expected)


def test_sampling_noise_depends_only_on_seed_and_position() -> None:
    target = random_target()
    prompts = torch.randint(3, 50, (2, 5))
    temperatures = torch.tensor([0.0, 1.0])
    all_tokens = continue_rows(target, prompts, 10, temperatures, seed=4)
    resumed_tokens = continue_rows(target, all_tokens[:, :9], 6, temperatures, seed=4)
    assert torch.equal(all_tokens, resumed_tokens)
    assert torch.equal(all_tokens[:1], continue_rows(target, prompts[:1], 10, torch.zeros(1), seed=9))


def test_features_are_the_outputs_of_the_requested_layers() -> None:
    target = random_target()
    ids = torch.randint(3, 50, (2, 9))
    aux_hidden, logits = features(target, ids, (0, 2))
    expected = target(input_ids=ids, output_hidden_states=True)
    # hidden_states[i] enters layer i, so the output of layer i is hidden_states[i + 1].
    torch.testing.assert_close(aux_hidden[..., :32], expected.hidden_states[1])
    torch.testing.assert_close(aux_hidden[..., 32:], expected.hidden_states[3])
    torch.testing.assert_close(logits, expected.logits)
