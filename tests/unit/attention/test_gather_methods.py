"""However the twin reads, by one copy of all requests or request by request where they lie, it gives the same.

Memory that nobody wrote holds NaN here, so a read of it, masked or not, would be seen.
"""

from typing import Any

import pytest
import torch

from cluster.attention import cells
from tests.unit.attention.dense import Case

TREE = (-1, 0, 0, 1, 3, 2)  # nodes in order of depth
LINE = (-1, 0, 1, 2)
SHAPES: dict[str, dict[str, Any]] = {
    "ragged": {"committed": (37, 0, 5, 90), "parents": TREE, "chunks": ()},
    "alone": {"committed": (43,), "parents": TREE, "chunks": ()},
    "one row each": {"committed": (1, 64, 17), "parents": (-1,), "chunks": ()},
    "lines": {"committed": (6, 30), "parents": LINE, "chunks": ()},
    "prompts": {"committed": (), "parents": (-1,), "chunks": ((70, 73), (0, 4), (9, 14), (3, 40))},
    "all": {"committed": (33, 2, 61), "parents": TREE, "chunks": ((0, 1), (0, 1), (20, 31), (0, 17), (50, 99))},
    "wide": {"committed": (21, 3), "parents": (-1, *range(32), 0, 1, 1), "chunks": ()},
}
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "grouped": {"heads": 6, "kv_heads": 3},
    "latent": {"latent": True, "kv_heads": 1},
    "sinks": {"sunk": True},
    "window": {"window": 3},
    "wide window": {"window": 40, "sunk": True},
    "later runners": {"first": 2},
    "later runners, window": {"first": 3, "window": 5, "latent": True, "kv_heads": 1},
    "FP8": {"fp8": True, "heads": 6, "kv_heads": 3, "window": 40, "sunk": True},
    "FP8, latent": {"fp8": True, "latent": True, "kv_heads": 1},
}
WAYS = {
    "as it comes": {},
    "apart": {"READ_SEPARATELY_BYTES": 0},
    "in pieces": {"READ_SEPARATELY_BYTES": 0, "READ_IN_PIECES_BYTES": 0, "READ_IN_PLACE_BYTES": 0},
    "in long pieces": {
        "READ_SEPARATELY_BYTES": 0,
        "READ_IN_PIECES_BYTES": 0,
        "READ_IN_PLACE_BYTES": 20 * 2 * 2 * 8 * 8,
    },  # bytes of 20 tokens, of 80 latents
}


def case(shape: str, kind: str, page_size: int, lies: str) -> Case:
    given = {"heads": 4, "kv_heads": 2} | SHAPES[shape] | KINDS[kind]
    return Case(page_size=page_size, lies=lies, **given)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("page_size", "lies"),
    [
        (1, "scattered"),
        (4, "tail"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((4, "scattered"), (4, "run"), (1, "run"))),
    ],
)
def test_torch_attention_matches_the_definition_for_every_gather_method(
    page_size: int, lies: str, shape: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = case(shape, kind, page_size, lies)
    expected = one.expected()
    for way, limits in WAYS.items():
        with monkeypatch.context() as patch:
            for name, value in limits.items():
                patch.setattr(cells, name, value)
            assert torch.allclose(one.given(), expected, atol=1e-12, rtol=0), way
    monkeypatch.setattr(cells, "host_values", lambda *_: None)
    for over in (0, 1, 50):
        assert torch.allclose(one.given(over), expected, atol=1e-12, rtol=0), f"not looked at, bound over by {over}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_attention_agrees_for_separate_and_joint_reads(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("READ_SEPARATELY_BYTES", "READ_IN_PIECES_BYTES", "READ_IN_PLACE_BYTES"):
        monkeypatch.setattr(cells, name, 0)
    given = {"heads": 4, "kv_heads": 2, "committed": (60, 9), "parents": TREE, "chunks": ()}
    one = Case(**given, page_size=4, lies="scattered", dtype=dtype)
    together = one.given()
    monkeypatch.setattr(cells, "host_values", lambda *_: None)
    assert torch.allclose(together, one.given(), atol=0.01)
