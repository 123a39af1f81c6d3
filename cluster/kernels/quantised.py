"""A quantised matrix as codes of few bits with scales, independent of the checkpoint's format, and its dequantisation.

Shape legend: O outputs, I inputs, G groups of inputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["int4", "int8", "fp8", "fp8_e5m2", "fp4"]
MIDDLE: dict[Kind, int] = {"int4": 8, "int8": 128}  # the zero point of integer codes if the format stores none
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
FLOAT8: dict[Kind, torch.dtype] = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@dataclass(frozen=True, slots=True)
class Quantised:
    """A matrix with the elements (value(codes[.., o, i]) - zeros[.., o, g]) * scales[.., o, g], g = i // group.

    `codes` `[.., O, I]` uint8, one to a byte, are unsigned integers, or the bits of an 8-bit or 4-bit float. `scales`
    `[.., O, G]` are float32 or bfloat16. `zeros` `[.., O, G]` are uint8; if `zeros` is None, they are `MIDDLE` for
    integers and 0 for floats. `group` is 1 if a shard cuts groups, or if the inputs of a group are not adjacent.
    """

    kind: Kind
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int

    @property
    def shape(self) -> tuple[int, ...]:
        """(.., outputs, inputs)."""
        return tuple(self.codes.shape)

    @property
    def groups(self) -> int:
        """G."""
        return self.scales.shape[-1]

    @property
    def about(self) -> str:
        """A text that names the kind of codes and which inputs share a scale."""
        if self.groups == 1:
            return f"{self.kind} by output"
        return (
            f"{self.kind} by groups of {self.group}" if self.group > 1 else f"{self.kind} by groups cut or out of order"
        )

    def numbers(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the dequantised matrix `[.., O, I]`: the reference for every product with it."""
        if self.codes.is_meta:
            return torch.empty(self.shape, dtype=dtype, device="meta")
        if (float8 := FLOAT8.get(self.kind)) is not None:
            values = self.codes.view(float8).to(dtype)
        elif self.kind == "fp4":
            values = torch.tensor(FP4, dtype=dtype, device=self.codes.device)[self.codes.long()]
        else:
            zeros = MIDDLE[self.kind] if self.zeros is None else self._spread(self.zeros.to(dtype))
            values = self.codes.to(dtype) - zeros
        return values * self._spread(self.scales.to(dtype))

    def _spread(self, of_groups: Tensor) -> Tensor:
        """Expand values of groups `[.., G]` to inputs `[.., I]`; with a single group they stay `[.., 1]`."""
        if self.groups == 1:
            return of_groups
        return of_groups.repeat_interleave(self.group, -1)[..., : self.shape[-1]]

    def each(self, change: Callable[[Tensor], Tensor]) -> "Quantised":
        """Return the matrix with `change` applied to codes, scales and zeros. `change` must not touch the last dim."""
        zeros = None if self.zeros is None else change(self.zeros)
        return replace(self, codes=change(self.codes), scales=change(self.scales), zeros=zeros)


def fit(parts: Sequence[Quantised], zeros: bool = False) -> bool:
    """Return whether the parts can be joined after `alike`: they have the same kind and groups. If `zeros`, also
    require that all parts or none have zeros, so that `alike` need not add any.
    """
    one = parts[0]
    same = all((p.kind, p.groups, p.group) == (one.kind, one.groups, one.group) for p in parts)
    return same and (not zeros or all((p.zeros is None) == (one.zeros is None) for p in parts))


def alike(parts: Sequence[Quantised]) -> list[Quantised]:
    """Return the parts, which must `fit`, with scales of one dtype. If one part has zeros, all parts get zeros."""
    dtype = parts[0].scales.dtype
    if any(p.scales.dtype != dtype for p in parts):
        dtype = torch.float32
    zeroed = any(p.zeros is not None for p in parts)
    return [
        replace(p, scales=p.scales.to(dtype), zeros=_middle(p) if zeroed and p.zeros is None else p.zeros)
        for p in parts
    ]


def _middle(part: Quantised) -> Tensor:
    return torch.full_like(part.scales, MIDDLE.get(part.kind, 0), dtype=torch.uint8)
