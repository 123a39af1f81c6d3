"""Quantised weights stored in panels, for C products that unpack the codes in registers."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.capture.recorder import native
from cluster.kernels.interface import Stack, Weight
from cluster.kernels.library import Function
from cluster.kernels.panels import checked_bias, checked_ends, checked_rows, panel_columns_of
from cluster.kernels.quantised import Quantised

KINDS = ("int4", "int8", "int8 with zeros", "fp8", "fp4")  # in the order of the enum in codes/unpack.h
# C decodes fp8 to value / 256 and fp4 to 2 * value. The scales are multiplied by the inverse, which is exact.
SCALE_FACTORS = {"fp8": 256.0, "fp4": 0.5}
MIN_GROUP = 16
FP8_NAN = 0x7F  # the code of NaN in FP8 e4m3, without its sign; C would decode it as a number


class Codes(NamedTuple):
    """Quantised matrices in panels of c columns: `codes` `[E, O / c, n, c]`, `scales` and `zeros` `[E, O / c, G, c]`,
    with O rounded up to whole panels. An element of `codes` is a byte that holds one input (fp4: two inputs), or in
    int4 an int32 that holds eight inputs. n is the number of such elements for the I inputs. `zeros` is None if all
    zero points are the default of the kind. `kind` is an index of `KINDS`; `group` is the number of inputs that share a
    scale.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    kind: int
    group: int
    inputs: int
    outputs: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zeros."""
        return sum(tensor.nbytes for tensor in (self.codes, self.scales, self.zeros) if tensor is not None)


def supports(matrix: Quantised) -> bool:
    """Return whether C can multiply by this matrix. C must support its kind and group size, and no FP8 code may be NaN.
    A matrix on the device "meta" has no codes to check.
    """
    aligned_groups = matrix.groups == 1 or (matrix.group % 8 == 0 and matrix.group >= MIN_GROUP)
    if matrix.kind not in KINDS or not aligned_groups or matrix.codes.is_meta:
        return matrix.kind in KINDS and aligned_groups
    return matrix.kind != "fp8" or not bool(((matrix.codes & FP8_NAN) == FP8_NAN).any())


def in_panels(matrix: Quantised, dtype: torch.dtype) -> Codes:
    """Lay out a matrix `[O, I]` in panels, as a stack of one expert, for rows of `dtype`."""
    outputs, inputs = matrix.shape
    kind, panel_columns, codes = str(matrix.kind), panel_columns_of(dtype), matrix.codes.contiguous()
    zeros = matrix.zeros
    if kind == "int8":  # c ^ 128 as a signed byte is c - 128; with zeros, (c - 128) - (z - 128) = c - z
        codes, zeros = codes ^ 128, None if zeros is None else zeros ^ 128
        kind = kind if zeros is None else "int8 with zeros"
    if kind == "fp4":
        codes = _pack_pairs(codes)
    if kind == "int4":
        codes = _pack_pairs(F.pad(codes, (0, -inputs % 8))).view(torch.int32)
    scales = matrix.scales * SCALE_FACTORS.get(kind, 1.0)
    group = inputs if matrix.groups == 1 else matrix.group
    panels = (
        _to_panels(codes, panel_columns),
        _to_panels(scales, panel_columns),
        None if zeros is None else _to_panels(zeros, panel_columns),
    )
    return Codes(*panels, KINDS.index(kind), group, inputs, outputs, dtype)


def _pack_pairs(codes: Tensor) -> Tensor:
    """Pack 4-bit codes `[O, I]` two to a byte, the first one in the low half."""
    codes = F.pad(codes, (0, codes.shape[1] % 2))
    return codes[:, 0::2] | codes[:, 1::2] << 4


def stacked_in_panels(matrices: Iterable[Quantised], dtype: torch.dtype) -> Codes:
    """Lay out the matrices `[O, I]` in panels, as one stack in which each matrix is one expert. `supports` must be true
    for every matrix. Each is laid out before the next is read.
    """
    expert_panels = [in_panels(matrix, dtype) for matrix in matrices]
    zeros = [panels.zeros for panels in expert_panels if panels.zeros is not None]
    return expert_panels[0]._replace(
        codes=torch.cat([panels.codes for panels in expert_panels]),
        scales=torch.cat([panels.scales for panels in expert_panels]),
        zeros=torch.cat(zeros) if zeros else None,
    )


def _to_panels(matrix: Tensor, panel_columns: int) -> Tensor:
    """Arrange `[O, n]` in panels of c = `panel_columns` columns: `[1, O / c, n, c]`."""
    outputs, count = matrix.shape
    padded = F.pad(matrix, (0, 0, 0, -outputs % panel_columns)).view(1, -1, panel_columns, count)
    return padded.transpose(2, 3).contiguous()


def _product(codes: Codes, function: Function, rows: Tensor, bias: Tensor | None, ends: Tensor | None) -> Tensor:
    """Multiply rows `[T, I]` by the matrices. `ends` is as in `Stack`; it is None for a single matrix.

    Raises:
        ValueError: rows, bias or ends have the wrong width, dtype or device. The C code does not check this.
    """
    rows, num_rows = checked_rows(rows, codes.inputs, codes.dtype), rows.shape[0]
    bias = None if bias is None else checked_bias(bias, rows, codes.outputs)
    ends = None if ends is None else checked_ends(ends, codes.codes.shape[0])
    out = rows.new_empty(num_rows, codes.outputs)
    addresses = [
        None if tensor is None else tensor.data_ptr() for tensor in (codes.codes, codes.scales, codes.zeros, bias)
    ]
    sizes = num_rows, codes.inputs, codes.outputs, codes.group, codes.kind, codes.scales.dtype == torch.float32
    ends_address = None if ends is None else ends.data_ptr()
    experts, threads = codes.codes.shape[0], torch.get_num_threads()
    native(function, rows.data_ptr(), *addresses, out.data_ptr(), *sizes, ends_address, experts, threads)
    return out


class CodePanels(Weight):
    """A weight that stays quantised in memory."""

    def __init__(self, codes: Codes, function: Function) -> None:
        self.codes, self.function = codes, function
        self.shape, self.dtype, self.nbytes = (codes.inputs, codes.outputs), codes.dtype, codes.nbytes

    def __call__(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `Weight`."""
        return _product(self.codes, self.function, rows, bias, None)

    def dense(self) -> Tensor:
        """Return the dequantised matrix: the product of an identity matrix and the weight."""
        return self(torch.eye(self.codes.inputs, dtype=self.dtype))


class CodePanelStack(Stack):
    """The weights of E experts, which stay quantised in memory."""

    def __init__(self, codes: Codes, function: Function) -> None:
        self.codes, self.function, self.nbytes = codes, function, codes.nbytes

    def __call__(self, rows: Tensor, ends: Tensor) -> Tensor:
        """See `Stack`."""
        return _product(self.codes, self.function, rows, None, ends)

    def dense(self) -> Tensor:
        """See `Stack`."""
        experts, inputs = self.codes.codes.shape[0], self.codes.inputs
        rows = torch.eye(inputs, dtype=self.codes.dtype).repeat(experts, 1)
        ends = torch.arange(1, experts + 1, dtype=torch.int32) * inputs
        return self(rows, ends).view(experts, inputs, self.codes.outputs)
