"""Torch attention gives the same output with every gather method: one copy of all requests, or reads per request in
place.

Unwritten memory is NaN, so every read of it, masked or not, makes the output NaN.
"""

from itertools import product
from typing import Any

import pytest
import torch

from cluster.attention import cells
from tests.support.pairwise import covering
from tests.unit.attention.dense import Case

TREE = (-1, 0, 0, 1, 3, 2)  # nodes in order of depth
CHAIN = (-1, 0, 1, 2)
SHAPES: dict[str, dict[str, Any]] = {
    "ragged": {"committed": (37, 0, 5, 90), "parents": TREE, "chunks": ()},
    "single rows": {"committed": (37, 0, 5, 90), "parents": TREE, "chunks": ((9, 14),), "single_rows": True},
    "one request": {"committed": (43,), "parents": TREE, "chunks": ()},
    "one row each": {"committed": (1, 64, 17), "parents": (-1,), "chunks": ()},
    "chains": {"committed": (6, 30), "parents": CHAIN, "chunks": ()},
    "prompts": {"committed": (), "parents": (-1,), "chunks": ((70, 73), (0, 4), (9, 14), (3, 40))},
    "all": {"committed": (33, 2, 61), "parents": TREE, "chunks": ((0, 1), (0, 1), (20, 31), (0, 17), (50, 99))},
    "wide": {"committed": (21, 3), "parents": (-1, *range(32), 0, 1, 1), "chunks": ()},
}
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "grouped": {"heads": 6, "kv_heads": 3},
    "narrow values": {"heads": 6, "kv_heads": 3, "values": 4},
    "wide values": {"heads": 6, "kv_heads": 3, "values": 20, "sunk": True},
    "latent": {"latent": True, "kv_heads": 1},
    "sinks": {"sunk": True},
    "window": {"window": 3},
    "wide window": {"window": 40, "sunk": True},
    "chunks": {"window": 4, "chunked": True},
    "wide chunks, window pool": {"window": 32, "chunked": True, "window_pool": True, "sunk": True},
    "later runners": {"first": 2},
    "later runners, window": {"first": 3, "window": 5, "latent": True, "kv_heads": 1},
    "window pool": {"window": 6, "window_pool": True},
    "window pool, FP8": {"window": 9, "window_pool": True, "fp8": True, "heads": 6, "kv_heads": 3, "sunk": True},
    "FP8": {"fp8": True, "heads": 6, "kv_heads": 3, "window": 40, "sunk": True},
    "FP8, narrow values": {"fp8": True, "heads": 6, "kv_heads": 3, "values": 4, "window": 9, "window_pool": True},
    "FP8, latent": {"fp8": True, "latent": True, "kv_heads": 1},
}
GATHER_METHODS = {
    "default limits": {},
    "separately": {"READ_SEPARATELY_BYTES": 0},
    "in pieces": {"READ_SEPARATELY_BYTES": 0, "READ_IN_PIECES_BYTES": 0, "READ_IN_PLACE_BYTES": 0},
    "in long pieces": {
        "READ_SEPARATELY_BYTES": 0,
        "READ_IN_PIECES_BYTES": 0,
        "READ_IN_PLACE_BYTES": 20 * 2 * 2 * 8 * 8,
    },  # bytes of 20 tokens, of 80 latents
}


def make_case(shape: str, kind: str, page_size: int, lies: str) -> Case:
    case_options = {"heads": 4, "kv_heads": 2} | SHAPES[shape] | KINDS[kind]
    return Case(page_size=page_size, lies=lies, **case_options)


PLACES = ((1, "scattered"), (4, "tail"), (4, "scattered"), (4, "run"), (1, "run"))
FAST = covering([PLACES, list(SHAPES), list(KINDS)])


@pytest.mark.parametrize(
    ("place", "shape", "kind"),
    [
        pytest.param(*row, marks=() if row in FAST else pytest.mark.slow, id="-".join(map(str, row)))
        for row in product(PLACES, SHAPES, KINDS)
    ],
)
def test_torch_attention_matches_the_definition_for_every_gather_method(
    place: tuple[int, str], shape: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(shape, kind, *place)
    expected = case.expected()
    for method, limits in GATHER_METHODS.items():
        with monkeypatch.context() as patch:
            for name, value in limits.items():
                patch.setattr(cells, name, value)
            assert torch.allclose(case.backend_output(), expected, atol=1e-12, rtol=0), method
    monkeypatch.setattr(cells, "host_values", lambda *_: None)
    for extra_bound in (0, 1, 50):
        assert torch.allclose(case.backend_output(extra_bound), expected, atol=1e-12, rtol=0), (
            f"no host reads, extra bound {extra_bound}"
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_attention_agrees_for_separate_and_joint_reads(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("READ_SEPARATELY_BYTES", "READ_IN_PIECES_BYTES", "READ_IN_PLACE_BYTES"):
        monkeypatch.setattr(cells, name, 0)
    case_options = {"heads": 4, "kv_heads": 2, "committed": (60, 9), "parents": TREE, "chunks": ()}
    case = Case(**case_options, page_size=4, lies="scattered", dtype=dtype)
    separate_output = case.backend_output()
    monkeypatch.setattr(cells, "host_values", lambda *_: None)
    assert torch.allclose(separate_output, case.backend_output(), atol=0.01)
