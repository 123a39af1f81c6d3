"""The interface between models and kernels.

Shape legend: T rows, H columns, d head_dim, r rotary dim (at most d), E experts, k experts of a row, I intermediate.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from cluster.kernels.flashinfer.library import FlashInfer
from cluster.kernels.library import Library
from cluster.kernels.quantised import Quantised


class Weight(ABC):
    """A matrix of `shape` (inputs, outputs) that rows of `dtype` are multiplied by; it takes `nbytes` bytes of memory.
    Each class has its own memory layout and product.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    nbytes: int

    @abstractmethod
    def __call__(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return rows `[T, inputs]` times the matrix, plus `bias` `[outputs]`: `[T, outputs]`."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return the matrix as one tensor `[inputs, outputs]`."""


class Stack(ABC):
    """A matrix `[inputs, outputs]` for each of E experts, in `nbytes` bytes of memory."""

    nbytes: int

    @abstractmethod
    def __call__(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Return each row `[T, inputs]` times its expert's matrix: `[T, outputs]`.

        Expert e has rows `ends[e - 1]` (0 for the first) to `ends[e] - 1`; `ends` `[E]` is int32.
        """

    @abstractmethod
    def dense(self) -> Tensor:
        """Return the matrices as one tensor `[E, inputs, outputs]`."""


class Angles(NamedTuple):
    """Rotary cos and sin of T rows, `[T, 1, r]` each, in half-split layout: x * cos + roll(x, r / 2) * sin. The first
    half of `sin` is negated.
    """

    cos: Tensor
    sin: Tensor


class HeadNorms(NamedTuple):
    """RMS norms of heads: the first `queries` heads are scaled by `q` `[d]`, the others (keys) by `k` `[d]`."""

    queries: int
    q: Tensor
    k: Tensor
    eps: float


class Groups(NamedTuple):
    """The T k choices of T rows, sorted by expert. Each row has chosen the k experts `topk_ids` `[T, k]`. Sorting gives
    each choice one of T k places; choices of the same expert keep their order.

    For each place, `source_rows` `[T k]` is the row of the choice, and `place_experts` `[T k]` the expert. Expert e has
    the places `ends[e - 1]` (0 for the first) to `ends[e] - 1`; `ends` is `[E]` int32. `places` `[T, k]` is the place
    of each choice.
    """

    topk_ids: Tensor
    source_rows: Tensor
    place_experts: Tensor
    ends: Tensor
    places: Tensor


class Activation(NamedTuple):
    """A gated activation of a gate g and an up value u: f(g) * u with f = silu or gelu_tanh. `clamped` (gpt-oss) is
    (u' + 1) * g' * sigmoid(alpha * g') with g' = min(g, limit) and u' = clamp(u, -limit, limit). `clamped_silu`
    (Step-3.5) is min(silu(g), limit) * u'.
    """

    kind: Literal["silu", "gelu_tanh", "clamped", "clamped_silu"] = "silu"
    alpha: float = 1.0
    limit: float = 0.0


class Kernels(Protocol):
    """The operators of a step except attention.

    `name`: the backend. `description`: a description for users; if this backend is a fallback, it says why.
    `numerics`: kernels with equal `numerics` give the same bits. `library`: the compiled C library, or None.
    `flashinfer`: FlashInfer if it computes attention, otherwise None.
    """

    name: str
    description: str
    numerics: str
    library: Library | None
    flashinfer: FlashInfer | None

    def weight(self, matrix: Tensor) -> Weight:
        """Return a weight from `matrix` `[inputs, outputs]`, in this backend's layout."""

    def stack(self, matrices: Tensor) -> Stack:
        """Return a stack from `matrices` `[E, inputs, outputs]`, in this backend's layout."""

    def keeps_quantised(self, matrix: Quantised, dtype: torch.dtype) -> bool:
        """Return whether rows of `dtype` can be multiplied by a matrix like this one while it stays quantised."""

    def quantised(self, matrix: Quantised, dtype: torch.dtype) -> Weight:
        """Return a weight from `matrix` `[outputs, inputs]`, for rows of `dtype`. `keeps_quantised` must be True for
        `matrix`, which stays quantised. `TorchKernels` instead accepts any matrix, and dequantises it.
        """

    def quantised_stack(self, matrices: Iterable[Quantised], dtype: torch.dtype) -> Stack:
        """Return a stack from the experts' `matrices` `[outputs, inputs]`, which must be of one kind. The condition of
        `quantised` applies to each of them.
        """

    def norm(self, rows: Tensor, scale: Tensor, eps: float) -> Tensor:
        """Return the RMSNorm of `rows` `[.., H]` times `scale` `[H]`, in the dtype of `rows`. The dtype of `scale` may
        be wider; then the norm is computed in at least that dtype.
        """

    def add_norm(self, rows: Tensor, residual: Tensor | None, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return the sum `rows + residual` `[T, H]` (`rows` if `residual` is None), and the sum's RMSNorm times
        `scale`.
        """

    def rotate(self, heads: Tensor, angles: Angles, norms: HeadNorms | None = None) -> None:
        """Apply `norms`, if given, to `heads` `[T, n, d]`, then rotate the first r numbers of each head; in place."""

    def activate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Return the gated activation of `gate_up` `[T, 2 I]`, in which the I gates of a row come before its I up
        values: `[T, I]`.
        """

    def group(self, topk_ids: Tensor, experts: int) -> Groups:
        """Return the choices `topk_ids` `[T, k]` (expert numbers below `experts`) sorted by expert."""

    def combine(self, expert_outputs: Tensor, groups: Groups, weights: Tensor, bias: Tensor | None) -> Tensor:
        """Return for each row the sum of weight * (expert output + bias of the expert) over its k experts, `[T, H]`.

        `expert_outputs` `[T k, H]` are the outputs by place, `bias` is `[E, H]` (None: no bias), `weights` are
        `[T, k]`. The terms of a row are added in ascending order of experts, so that the sum does not depend on the
        batch.
        """
