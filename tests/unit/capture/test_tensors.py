"""The tensors of a call's arguments are those that torch's pytree finds, in the same order and the same containers."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from cluster.capture.tensors import map_tensors, tensors_in


class Arguments(NamedTuple):
    rows: Tensor
    scale: Tensor | None
    sizes: tuple[int, ...]


A, B, C = torch.zeros(1), torch.ones(2), torch.ones(3)
VALUES: tuple[Any, ...] = (
    A,
    None,
    7,
    (),
    ((A, [B, None, (C, 3)]), {"out": (B, C), "dim": 1}),
    [Arguments(A, None, (2, 3)), Arguments(B, C, ())],
    (range(2), slice(0, 2), "text", {"nested": {"again": [A]}}),
    torch.ones(2, 2).topk(1),
)


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_tensors_are_found_and_changed_as_by_pytree(value: Any) -> None:
    expected = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    assert [id(tensor) for tensor in tensors_in(value)] == [id(tensor) for tensor in expected]
    changed, expected_change = (
        map_tensors(lambda tensor: tensor + 1, value),
        tree_map_only(Tensor, lambda tensor: tensor + 1, value),
    )
    assert type(changed) is type(expected_change) and str(changed) == str(expected_change)
