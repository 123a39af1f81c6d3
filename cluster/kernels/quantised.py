"""A quantised matrix as codes of few bits with scales, independent of the checkpoint's format, and its dequantisation.

Shape legend: O outputs, I inputs, G groups of inputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["int4", "int8", "fp8", "fp8_e5m2", "fp4"]
ZERO_POINTS: dict[Kind, int] = {"int4": 8, "int8": 128}  # the zero point of integer codes if the format stores none
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
FLOAT8: dict[Kind, torch.dtype] = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@dataclass(frozen=True, slots=True)
class Quantised:
    """A matrix with the elements (value(codes[.., o, i]) - zeros[.., o, g]) * scales[.., o, g], g = i // group.

    `codes` `[.., O, I]` uint8 has one code per byte: an unsigned integer, or the bits of an 8-bit or 4-bit float.
    `scales` `[.., O, G]` are float32 or bfloat16. `zeros` `[.., O, G]` are uint8; if `zeros` is None, the zero points
    are `ZERO_POINTS` for integers and 0 for floats. `group` is the number of adjacent inputs that share a scale. It is
    1 if a shard cuts the checkpoint's groups, or if their inputs are not adjacent: then each input has its own scale.
    """

    kind: Kind
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix: (.., outputs, inputs)."""
        return tuple(self.codes.shape)

    @property
    def groups(self) -> int:
        """G, the number of groups of inputs that share a scale."""
        return self.scales.shape[-1]

    @property
    def description(self) -> str:
        """A text that names the kind of codes and which inputs share a scale."""
        if self.groups == 1:
            return f"{self.kind} by output"
        return (
            f"{self.kind} by groups of {self.group}" if self.group > 1 else f"{self.kind} by groups cut or out of order"
        )

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the dequantised matrix `[.., O, I]`: the reference for every product with it."""
        if self.codes.is_meta:
            return torch.empty(self.shape, dtype=dtype, device="meta")
        if (float8 := FLOAT8.get(self.kind)) is not None:
            values = self.codes.view(float8).to(dtype)
        elif self.kind == "fp4":
            values = torch.tensor(FP4, dtype=dtype, device=self.codes.device)[self.codes.long()]
        else:
            zero_points = ZERO_POINTS[self.kind] if self.zeros is None else self._expand_groups(self.zeros.to(dtype))
            values = self.codes.to(dtype) - zero_points
        return values * self._expand_groups(self.scales.to(dtype))

    def _expand_groups(self, group_values: Tensor) -> Tensor:
        """Expand values of groups `[.., G]` to inputs `[.., I]`; with a single group they stay `[.., 1]`."""
        if self.groups == 1:
            return group_values
        return group_values.repeat_interleave(self.group, -1)[..., : self.shape[-1]]

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "Quantised":
        """Return the matrix with `change` applied to codes, scales and zeros. `change` must not touch the last dim."""
        zeros = None if self.zeros is None else change(self.zeros)
        return replace(self, codes=change(self.codes), scales=change(self.scales), zeros=zeros)


def can_join(matrices: Sequence[Quantised], zeros: bool = False) -> bool:
    """Return whether `unified` makes it possible to concatenate the matrices: whether they have the same kind and
    groups. If `zeros`, also require that all matrices or none have zeros, so that `unified` need not add any.
    """
    first = matrices[0]
    same_layout = all(
        (matrix.kind, matrix.groups, matrix.group) == (first.kind, first.groups, first.group) for matrix in matrices
    )
    return same_layout and (not zeros or all((matrix.zeros is None) == (first.zeros is None) for matrix in matrices))


def unified(matrices: Sequence[Quantised]) -> list[Quantised]:
    """Return the matrices, for which `can_join` is True, with scales of one dtype. If one matrix has
    zeros, a matrix without zeros gets the default zero point of its kind.
    """
    dtype = matrices[0].scales.dtype
    if any(matrix.scales.dtype != dtype for matrix in matrices):
        dtype = torch.float32
    has_zeros = any(matrix.zeros is not None for matrix in matrices)
    return [
        replace(
            matrix,
            scales=matrix.scales.to(dtype),
            zeros=_default_zeros(matrix) if has_zeros and matrix.zeros is None else matrix.zeros,
        )
        for matrix in matrices
    ]


def _default_zeros(matrix: Quantised) -> Tensor:
    return torch.full_like(matrix.scales, ZERO_POINTS.get(matrix.kind, 0), dtype=torch.uint8)
