"""Trees and accepted paths by Triton are those of the twins, on any device."""

import torch

from cluster.spec import verify
from cluster.spec.tree import TorchGrowth
from cluster.spec.triton_tree import TritonGrowth, accept


def check_trees(device: torch.device, dice: torch.Generator, k: int, steps: int, nodes: int) -> None:
    """Seven trees of `nodes` nodes, `steps` levels of topk `k`, and the paths that are accepted of them."""
    shapes = [(7, k), *[(7, k, k)] * (steps - 1)]
    numbers = [torch.rand(shape, generator=dice, dtype=torch.float64).log() for shape in shapes]  # no ties
    likely = [one.to(device) for one in numbers]
    tokens = [torch.randint(9000, shape, generator=dice).to(device) for shape in shapes]
    trees = []
    for sprout in (TritonGrowth, TorchGrowth):
        grown = sprout(tokens[0], likely[0], steps)
        for level in range(1, steps):
            grown.add(tokens[level], likely[level])
            grown.best()
        trees.append(grown.tree(tokens[0][:, 0], nodes))
    for name in ("tokens", "parents", "depths", "ancestors"):
        assert torch.equal(getattr(trees[0], name), getattr(trees[1], name)), name
    chosen = trees[1].tokens.roll(-1, 1)
    own, twin = (accepting(trees[1], chosen, chosen[:2, 0], steps) for accepting in (accept, verify.accept))
    for name in ("path", "tokens", "accept_len", "bonus"):
        assert torch.equal(getattr(own, name), getattr(twin, name)), name
