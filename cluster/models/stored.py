"""Types for reading quantised matrices: the matrix to read (`StoredMatrix`), and the checkpoint as formats see it."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cluster.arch.quantisation import Quantisation
from cluster.arch.quantisation_rules import Scheme
from cluster.arch.safetensors.header import TensorLocation
from cluster.config import ConfigError

Span = tuple[int, int]
Index = tuple[slice | int, ...]


class StoredTensors(Protocol):
    """A checkpoint as the readers of quantised formats see it. Tensors have the checkpoint's own names, normalised as
    in `normalise_name`.
    """

    quantisation: Quantisation

    def locate(self, stored: str, shape: tuple[int, ...] | None = None) -> TensorLocation:
        """Return where the tensor lies, and count it as used; raises `ConfigError` if missing or of another shape."""

    def has_stored(self, stored: str) -> bool:
        """Whether the tensor exists."""

    def read(self, stored: str, index: Index = (), device: torch.device | None = None) -> Tensor:
        """Return what `index` selects of the tensor, on `device` (None: the CPU), and count it as used."""

    def mark_used(self, stored: str) -> None:
        """Count the tensor as used, if it exists."""

    def scheme(self, stored: str) -> Scheme:
        """Return the quantisation scheme that the config gives for the matrix `stored`."""

    def error(self, stored: str, problem: str) -> ConfigError:
        """Return an error that names the tensor and a `problem` with it."""


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A part of the matrix `stored` `[.., O, I]` of `shape`: the outputs in `rows` and the inputs in `columns` (None:
    all), of one `expert` if the matrix is a stack. Packed bytes are copied to `device` (None: the CPU) and unpacked
    there.
    """

    stored: str
    shape: tuple[int, ...]
    rows: Span | None = None
    columns: Span | None = None
    expert: int | None = None
    device: torch.device | None = None

    @property
    def stem(self) -> str:
        """Return the common prefix of the names of the matrix's tensors (codes, scales, zeros)."""
        return self.stored.removesuffix(".weight")

    @property
    def outputs(self) -> Span:
        """Return the span of outputs to read."""
        return (0, self.shape[-2]) if self.rows is None else self.rows

    @property
    def inputs(self) -> Span:
        """Return the span of inputs to read."""
        return (0, self.shape[-1]) if self.columns is None else self.columns
