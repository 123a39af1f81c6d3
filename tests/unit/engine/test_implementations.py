"""The table of implementations: each entry exists, and every kind has all backends."""

import importlib.util
from typing import get_args

import pytest

from cluster.config import EngineConfig
from cluster.engine.backends import IMPLEMENTATIONS, implementation

BACKENDS = {"torch", "c", "triton", "flashinfer"}
ENTRIES = [(kind, backend) for kind, row in IMPLEMENTATIONS.items() for backend in row]


def test_every_kernel_kind_has_every_attention_backend() -> None:
    assert all({*row} == BACKENDS for row in IMPLEMENTATIONS.values())
    assert {*get_args(EngineConfig.model_fields["attention_backend"].annotation)} == BACKENDS | {"auto"}


@pytest.mark.parametrize(("kind", "backend"), ENTRIES)
def test_every_implementation_entry_can_be_imported(kind: str, backend: str) -> None:
    if importlib.util.find_spec("triton") is None and backend in ("triton", "flashinfer"):
        pytest.skip("Triton is not installed")
    assert callable(implementation(kind, backend))
