"""The accepted path of random trees against a walk from the root, for the torch and the C implementation."""

import pytest
import torch
from torch import Tensor

from cluster.engine.backends import tree_backend_of
from cluster.kernels.c_kernels import CKernels
from cluster.kernels.torch_kernels import TorchKernels
from cluster.spec.c_verify import CAccept
from cluster.spec.tree import DraftTree, ancestors_of, chain
from cluster.spec.verify import Accept, accept
from tests.unit.kernels.library import c_library


@pytest.fixture(params=["torch", "c"])
def accept_function(request: pytest.FixtureRequest) -> Accept:
    """Each implementation of accept."""
    return accept if request.param == "torch" else CAccept(c_library())


def random_tree(requests: int, nodes: int, steps: int, vocab: int, seed: int) -> DraftTree:
    """Return random trees at most `steps` deep, in which siblings have different tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.zeros(requests, nodes, dtype=torch.int64)
    parents, depths = torch.zeros_like(tokens), torch.zeros_like(tokens)
    for i in range(requests):
        used: dict[int, set[int]] = {}
        for j in range(1, nodes):
            shallow = [p for p in range(j) if depths[i, p] < steps and len(used.get(p, ())) < vocab]
            parent = shallow[int(torch.randint(len(shallow), (1,), generator=generator))]
            token = int(torch.randint(vocab, (1,), generator=generator))
            while token in used.setdefault(parent, set()):
                token = (token + 1) % vocab
            used[parent].add(token)
            tokens[i, j], parents[i, j], depths[i, j] = token, parent, depths[i, parent] + 1
    return DraftTree(tokens, parents, depths, ancestors_of(parents, steps))


def walk(tree: DraftTree, chosen: Tensor, request: int) -> tuple[list[int], list[int]]:
    """Return nodes and tokens of the path that plain decoding would take in one request's tree."""
    parents, drafted = tree.parents[request].tolist(), tree.tokens[request].tolist()
    choices: list[int] = chosen[request].tolist()
    node, path, tokens = 0, [0], choices[:1]
    while True:
        children = [j for j in range(1, len(parents)) if parents[j] == node]
        matches = [j for j in children if drafted[j] == tokens[-1]]
        if not matches:
            return path, tokens
        (node,) = matches
        path.append(node)
        tokens.append(choices[node])


@pytest.mark.parametrize(
    ("nodes", "steps", "vocab"), [(1, 0, 3), (2, 1, 2), (6, 3, 2), (12, 5, 3), (24, 5, 4), (30, 16, 3)]
)
def test_accepted_path_equals_a_walk_from_the_root(nodes: int, steps: int, vocab: int, accept_function: Accept) -> None:
    lengths = set()
    for seed in range(4):
        tree = random_tree(32, nodes, steps, vocab, seed)
        chosen = torch.randint(vocab, (32, nodes), generator=torch.Generator().manual_seed(seed + 100))
        accepted = accept_function(tree, chosen, torch.tensor([41, 42]), steps)
        for i in range(32):
            path, tokens = walk(tree, chosen, i)
            count = int(accepted.accept_len[i])
            assert count == len(path)
            assert accepted.path[i, :count].tolist() == path
            assert set(accepted.path[i, count:].tolist()) <= {0}
            assert accepted.tokens[i, :count].tolist() == tokens
            assert int(accepted.bonus[i]) == tokens[-1]
            lengths.add(count)
        assert accepted.bonus[32:].tolist() == [41, 42]
    assert lengths >= set(range(1, min(steps, 3) + 2))


def check_same_result(accept_function: Accept, tree: DraftTree, chosen: Tensor, first: Tensor, steps: int) -> None:
    actual, expected = accept_function(tree, chosen, first, steps), accept(tree, chosen, first, steps)
    for name in ("path", "tokens", "accept_len", "bonus"):
        actual_field, expected_field = getattr(actual, name), getattr(expected, name)
        assert actual_field.dtype == expected_field.dtype and torch.equal(actual_field, expected_field), name


def check_accepted(accept_function: Accept, request_count: int = 20) -> None:
    """Check that an implementation gives the results of the torch implementation, also beyond the accepted path.

    The inputs are chains, whose requests share parents and depths, trees with padding nodes, and zero requests.
    """
    no_first_tokens = torch.zeros(0, dtype=torch.int64)
    for requests, nodes in ((0, 1), (1, 1), (5, 4), (request_count, 9)):
        tokens = torch.randint(2, (requests, nodes), generator=torch.Generator().manual_seed(nodes))
        chosen = torch.randint(2, (requests, nodes), generator=torch.Generator().manual_seed(nodes + 1))
        check_same_result(accept_function, chain(tokens), chosen, no_first_tokens, nodes - 1)
        check_same_result(accept_function, chain(tokens), chosen.t().contiguous().t(), torch.tensor([7]), nodes + 2)
    for seed in range(4):
        tree, padding = random_tree(request_count, 11, 4, 3, seed), torch.arange(11, 15).expand(request_count, 4)
        parents = torch.cat([tree.parents, padding], 1)
        tokens, depths = (torch.cat([field, torch.zeros_like(padding)], 1) for field in (tree.tokens, tree.depths))
        chosen = torch.randint(3, (request_count, 15), generator=torch.Generator().manual_seed(seed))
        check_same_result(
            accept_function,
            DraftTree(tokens, parents, depths, ancestors_of(parents, 4), padded=True),
            chosen,
            no_first_tokens,
            4,
        )


def test_c_accept_equals_torch_accept() -> None:
    check_accepted(CAccept(c_library()))


def test_tree_backend_accepts_with_the_implementation_of_its_kernels() -> None:
    assert tree_backend_of(TorchKernels()).accept is accept
    assert isinstance(tree_backend_of(CKernels(c_library())).accept, CAccept)
