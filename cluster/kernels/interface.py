"""What a model asks of its kernels. Shape legend: T rows, H columns, d head_dim, E experts."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from cluster.kernels.flashinfer.library import FlashInfer
from cluster.kernels.library import Library
from cluster.kernels.quantised import Quantised


class Weight(ABC):
    """A matrix `[inputs, outputs]` that rows are multiplied by. It owns how it lies in memory, and so its product."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(inputs, outputs)."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """That of rows and results."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that it takes."""

    @abstractmethod
    def __call__(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        """Rows `[T, inputs]` times the matrix, plus `bias` `[outputs]` -> `[T, outputs]`."""

    @abstractmethod
    def dense(self) -> Tensor:
        """The matrix as one tensor `[inputs, outputs]`."""


class Stack(ABC):
    """A matrix `[inputs, outputs]` for each of E experts."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that it takes."""

    @abstractmethod
    def __call__(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Rows `[T, inputs]` -> `[T, outputs]`; expert e has those after e - 1's, up to `ends[e]`, `[E]` int32."""

    @abstractmethod
    def dense(self) -> Tensor:
        """The matrices as one tensor `[E, inputs, outputs]`."""


class Angles(NamedTuple):
    """cos and signed sin of some rows, `[T, 1, d]` each, in the half-split layout: x * cos + roll(x, d / 2) * sin."""

    cos: Tensor
    sin: Tensor


class HeadNorms(NamedTuple):
    """RMS norms of heads: of the first `queries` by `q` `[d]`, of the others, the keys, by `k` `[d]`."""

    queries: int
    q: Tensor
    k: Tensor
    eps: float


class Groups(NamedTuple):
    """Rows that chose k experts each, `chosen` `[T, k]`, as T k places in order of the experts: `source` `[T k]` is the
    row at each place, `expert` `[T k]` its expert, `ends` `[E]` int32 where each expert's places end, and `place`
    `[T, k]` the place of each choice. One expert's rows stay in order.
    """

    chosen: Tensor
    source: Tensor
    expert: Tensor
    ends: Tensor
    place: Tensor


class Activation(NamedTuple):
    """How a gate g and an up u become one number: f(g) u; `clamped` (gpt-oss): (u' + 1) g' sigmoid(alpha g'), where
    g' is at most `limit` and u' within it.
    """

    kind: Literal["silu", "gelu_tanh", "clamped"] = "silu"
    alpha: float = 1.0
    limit: float = 0.0


class Kernels(Protocol):
    """The operators of a step beside attention. `name` is that of the backend, `about` says which of its kind it is, or
    why it serves, `library` is what it is compiled into, `flashinfer` what attends where that is set. Those with the
    same `digits` give the same bits.
    """

    name: str
    about: str
    digits: str
    library: Library | None
    flashinfer: FlashInfer | None

    def weight(self, matrix: Tensor) -> Weight:
        """`matrix` `[inputs, outputs]`, laid out for its products."""
        ...

    def stack(self, matrices: Tensor) -> Stack:
        """`matrices` `[E, inputs, outputs]`, laid out for their products."""
        ...

    def keeps(self, matrix: Quantised, dtype: torch.dtype) -> bool:
        """Whether rows of `dtype` can be multiplied by a matrix like this one while it stays quantised."""
        ...

    def quantised(self, matrix: Quantised, dtype: torch.dtype) -> Weight:
        """A weight from `matrix` `[outputs, inputs]`, for rows of `dtype`; kept as it is if `keeps` says so."""
        ...

    def quantised_stack(self, matrices: Iterable[Quantised], dtype: torch.dtype) -> Stack:
        """The experts' `matrices` `[outputs, inputs]`, all of one kind, likewise."""
        ...

    def norm(self, rows: Tensor, scale: Tensor, eps: float) -> Tensor:
        """RMSNorm of `[.., H]` times `scale` `[H]`, computed in the dtype of `scale`, which may be the wider one."""
        ...

    def add_norm(self, rows: Tensor, more: Tensor | None, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`rows + more` `[T, H]`, and its RMSNorm."""
        ...

    def rotate(self, heads: Tensor, angles: Angles, norms: HeadNorms | None = None) -> None:
        """Norm `heads` `[T, n, >= d]`, then rotate the first d numbers of each, in place."""
        ...

    def activate(self, both: Tensor, activation: Activation) -> Tensor:
        """Gates and ups side by side `[T, 2 I]` -> `[T, I]`."""
        ...

    def group(self, chosen: Tensor, experts: int) -> Groups:
        """Rows by the experts that they chose, `[T, k]` of `experts`."""
        ...

    def combine(self, made: Tensor, groups: Groups, weights: Tensor, bias: Tensor | None) -> Tensor:
        """What experts `made` `[T k, H]` of rows at their places, plus each expert's `bias` `[E, H]`, times `weights`
        `[T, k]`, added up for each row in order of its experts -> `[T, H]`.
        """
        ...
