"""What is asked of a checkpoint's quantised matrix, and what reading one asks of the checkpoint."""

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


class Files(Protocol):
    """What a format asks of a checkpoint; names are those on disk."""

    quantisation: Quantisation

    def entry(self, stored: str, shape: tuple[int, ...] | None = None) -> TensorLocation:
        """Where it lies, counted as used; refused if it is missing or of another shape."""
        ...

    def has(self, stored: str) -> bool:
        """Whether it is there."""
        ...

    def read(self, stored: str, index: Index = (), device: torch.device | None = None) -> Tensor:
        """What `index` selects of it, on `device`, else on the CPU; counted as used."""
        ...

    def skip(self, stored: str) -> None:
        """Count it as used if it is there."""
        ...

    def scheme(self, stored: str) -> Scheme:
        """What the config says of the matrix `stored`."""
        ...

    def wrong(self, stored: str, problem: str) -> ConfigError:
        """The error that there is a `problem` with it."""
        ...


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A part of the matrix `stored` `[.., O, I]` of `shape`: its outputs in `rows`, its inputs in `columns`; what it is
    made of goes to the `device` as it is stored, and is unpacked there. None: the CPU.
    """

    stored: str
    shape: tuple[int, ...]
    rows: Span | None = None
    columns: Span | None = None
    expert: int | None = None
    device: torch.device | None = None

    @property
    def stem(self) -> str:
        """What its tensors have in common."""
        return self.stored.removesuffix(".weight")

    @property
    def outputs(self) -> Span:
        """The outputs asked for."""
        return (0, self.shape[-2]) if self.rows is None else self.rows

    @property
    def inputs(self) -> Span:
        """The inputs asked for."""
        return (0, self.shape[-1]) if self.columns is None else self.columns
