"""The accepted path against a walk from the root, on random trees."""

import pytest
import torch
from torch import Tensor

from cluster.spec.tree import DraftTree, ancestors_of
from cluster.spec.verify import accept


def random_tree(requests: int, nodes: int, steps: int, vocab: int, seed: int) -> DraftTree:
    """Random parents at most `steps` deep; siblings carry different tokens."""
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
    """Nodes and tokens of the path that plain decoding would take."""
    parents, drafted = tree.parents[request].tolist(), tree.tokens[request].tolist()
    choices: list[int] = chosen[request].tolist()
    node, path, tokens = 0, [0], choices[:1]
    while True:
        children = [j for j in range(1, len(parents)) if parents[j] == node]
        right = [j for j in children if drafted[j] == tokens[-1]]
        if not right:
            return path, tokens
        (node,) = right
        path.append(node)
        tokens.append(choices[node])


@pytest.mark.parametrize(
    ("nodes", "steps", "vocab"), [(1, 0, 3), (2, 1, 2), (6, 3, 2), (12, 5, 3), (24, 5, 4), (30, 16, 3)]
)
def test_the_accepted_path_is_the_walk(nodes: int, steps: int, vocab: int) -> None:
    lengths = set()
    for seed in range(4):
        tree = random_tree(32, nodes, steps, vocab, seed)
        chosen = torch.randint(vocab, (32, nodes), generator=torch.Generator().manual_seed(seed + 100))
        accepted = accept(tree, chosen, torch.tensor([41, 42]), steps)
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


def test_a_right_token_under_a_wrong_parent_does_not_count() -> None:
    parents = torch.tensor([[0, 0, 1, 0]])
    tree = DraftTree(torch.tensor([[9, 5, 6, 7]]), parents, torch.tensor([[0, 1, 2, 1]]), ancestors_of(parents, 2))
    accepted = accept(tree, torch.tensor([[7, 6, 1, 6]]), torch.zeros(0, dtype=torch.int64), 2)
    assert accepted.path.tolist() == [[0, 3, 0]]
    assert accepted.accept_len.tolist() == [2]
    assert accepted.tokens[0, :2].tolist() == [7, 6]
