"""Checks that Triton builds the same trees and accepts the same paths as the PyTorch reference, on any device."""

import torch

from cluster.spec import verify
from cluster.spec.tree import TorchGrowth
from cluster.spec.triton_tree import TritonGrowth, accept


def check_trees(device: torch.device, random_source: torch.Generator, k: int, steps: int, nodes: int) -> None:
    """Compare seven trees of `nodes` nodes, `steps` levels and topk `k`, and the paths that are accepted in them."""
    shapes = [(7, k), *[(7, k, k)] * (steps - 1)]
    log_probs = [torch.rand(shape, generator=random_source, dtype=torch.float64).log() for shape in shapes]  # no ties
    device_log_probs = [values.to(device) for values in log_probs]
    tokens = [torch.randint(9000, shape, generator=random_source).to(device) for shape in shapes]
    trees = []
    for growth_class in (TritonGrowth, TorchGrowth):
        growth = growth_class(tokens[0], device_log_probs[0], steps)
        for level in range(1, steps):
            growth.add(tokens[level], device_log_probs[level])
            growth.best()
        trees.append(growth.tree(tokens[0][:, 0], nodes))
    for name in ("tokens", "parents", "depths", "ancestors"):
        assert torch.equal(getattr(trees[0], name), getattr(trees[1], name)), name
    chosen_tokens = trees[1].tokens.roll(-1, 1)
    triton_result, torch_result = (
        accept_function(trees[1], chosen_tokens, chosen_tokens[:2, 0], steps)
        for accept_function in (accept, verify.accept)
    )
    for name in ("path", "tokens", "accept_len", "bonus"):
        assert torch.equal(getattr(triton_result, name), getattr(torch_result, name)), name
