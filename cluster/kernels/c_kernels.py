"""The kernels in C, for a CPU. Cases that they do not support (float16, GPUs, some layouts) go to `TorchKernels`."""

from collections.abc import Iterable

import torch
from torch import Tensor

from cluster.capture.recorder import native
from cluster.kernels import c_quantised
from cluster.kernels.interface import Activation, Angles, HeadNorms, Stack, Weight
from cluster.kernels.library import Function, Library
from cluster.kernels.panels import fitting_bias, fitting_ends, fitting_rows, in_panels, in_tiles, out_of_panels
from cluster.kernels.quantised import Quantised
from cluster.kernels.torch_kernels import TorchKernels

ACTIVATIONS = ("silu", "gelu_tanh", "clamped")


def _fit(scale: Tensor, rows: Tensor) -> bool:
    """Return whether C can read `scale` `[H]`: it must be contiguous, in the dtype of `rows` `[.., H]` or the dtype in
    which `rows` are summed.
    """
    known = scale.dtype in (rows.dtype, torch.promote_types(rows.dtype, torch.float32))
    return known and scale.shape == rows.shape[-1:] and scale.is_contiguous()


class Panels(Weight):
    """A weight `[inputs, outputs]` stored in panels of columns, laid out as a `PanelStack` of one expert."""

    def __init__(self, panels: Tensor, inputs: int, outputs: int, product: Function) -> None:
        self.panels, self.product = panels, product
        self.shape, self.dtype, self.nbytes = (inputs, outputs), panels.dtype, panels.nbytes

    def __call__(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `Weight`."""
        inputs, outputs = self.shape
        rows = fitting_rows(rows, inputs, self.dtype)
        bias = None if bias is None else fitting_bias(bias, rows, outputs)
        out, added = rows.new_empty(rows.shape[0], outputs), None if bias is None else bias.data_ptr()
        given = rows.data_ptr(), self.panels.data_ptr(), added, out.data_ptr(), rows.shape[0], inputs, outputs
        native(self.product, *given, None, 1, torch.get_num_threads())
        return out

    def dense(self) -> Tensor:
        """See `Weight`."""
        return out_of_panels(self.panels, *self.shape)[0]


class PanelStack(Stack):
    """The weights of E experts `[inputs, outputs]` stored in panels, one expert after the other."""

    def __init__(self, panels: Tensor, inputs: int, outputs: int, product: Function) -> None:
        self.panels, self.inputs, self.outputs = panels, inputs, outputs
        self.product, self.nbytes = product, panels.nbytes

    def __call__(self, rows: Tensor, ends: Tensor) -> Tensor:
        """See `Stack`."""
        rows, ends = fitting_rows(rows, self.inputs, self.panels.dtype), fitting_ends(ends, self.panels.shape[0])
        out = rows.new_empty(rows.shape[0], self.outputs)
        given = rows.data_ptr(), self.panels.data_ptr(), None, out.data_ptr(), *rows.shape, self.outputs
        native(self.product, *given, ends.data_ptr(), self.panels.shape[0], torch.get_num_threads())
        return out

    def dense(self) -> Tensor:
        """See `Stack`."""
        return out_of_panels(self.panels, self.inputs, self.outputs)


class CKernels(TorchKernels):
    """`Kernels` by the C functions of a `library`."""

    name = "c"

    def __init__(self, library: Library, dtype: torch.dtype = torch.float32) -> None:
        """`dtype` is the model's dtype; it only affects the descriptions `about` and `digits`."""
        joined = f", in {library.variant}" if library.variant and dtype == torch.bfloat16 else ""
        super().__init__(f"C, compiled for {library.level}{joined}")
        self.digits = f"C with {'fused' if library.fused else 'rounded'} products{joined}"
        self.library, self._functions = library, library.functions
        self._tiled = {torch.bfloat16} if library.variant == "tiles" else set()

    def weight(self, matrix: Tensor) -> Weight:
        """See `Kernels.weight`."""
        if (product := self._of("product", matrix)) is None:
            return super().weight(matrix)
        return Panels(self._laid_out(matrix[None]), matrix.shape[0], matrix.shape[1], product)

    def stack(self, matrices: Tensor) -> Stack:
        """See `Kernels.stack`."""
        if (product := self._of("product", matrices)) is None:
            return super().stack(matrices)
        return PanelStack(self._laid_out(matrices), matrices.shape[1], matrices.shape[2], product)

    def keeps(self, matrix: Quantised, dtype: torch.dtype) -> bool:
        """See `Kernels.keeps`."""
        return ("codes", dtype) in self._functions and c_quantised.knows(matrix)

    def quantised(self, matrix: Quantised, dtype: torch.dtype) -> Weight:
        """See `Kernels.quantised`."""
        return c_quantised.CodePanels(c_quantised.in_panels(matrix, dtype), self._functions["codes", dtype])

    def quantised_stack(self, matrices: Iterable[Quantised], dtype: torch.dtype) -> Stack:
        """See `Kernels.quantised_stack`."""
        return c_quantised.CodePanelStack(c_quantised.stacked(matrices, dtype), self._functions["codes", dtype])

    def norm(self, rows: Tensor, scale: Tensor, eps: float) -> Tensor:
        """See `Kernels.norm`."""
        run = self._of("norm", rows)
        if run is None or rows.dim() != 2 or rows.stride(1) != 1 or not _fit(scale, rows):
            return super().norm(rows, scale, eps)
        out, wide = torch.empty_like(rows, memory_format=torch.contiguous_format), scale.dtype != rows.dtype
        (count, size), places = rows.shape, (rows.data_ptr(), None, scale.data_ptr(), None, out.data_ptr())
        native(run, *places, count, size, rows.stride(0), wide, eps, torch.get_num_threads())
        return out

    def add_norm(self, rows: Tensor, more: Tensor | None, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `Kernels.add_norm`."""
        run = self._of("norm", rows)
        alike = more is not None and more.shape == rows.shape and more.dtype == rows.dtype
        if run is None or more is None or not alike or not rows.is_contiguous() or not _fit(scale, rows):
            return super().add_norm(rows, more, scale, eps)
        more, total, out = more.contiguous(), torch.empty_like(rows), torch.empty_like(rows)
        (count, size), wide = rows.shape, scale.dtype != rows.dtype
        places = rows.data_ptr(), more.data_ptr(), scale.data_ptr(), total.data_ptr(), out.data_ptr()
        native(run, *places, count, size, size, wide, eps, torch.get_num_threads())
        return total, out

    def rotate(self, heads: Tensor, angles: Angles, norms: HeadNorms | None = None) -> None:
        """See `Kernels.rotate`."""
        run = self._of("rotary", heads)
        beside = all(angle.dtype == heads.dtype and angle.is_contiguous() for angle in angles)
        scaled = norms is None or (_fit(norms.q, heads) and _fit(norms.k, heads) and norms.q.dtype == norms.k.dtype)
        if run is None or heads.stride(2) != 1 or not beside or not scaled:
            super().rotate(heads, angles, norms)
            return
        count, n, size = heads.shape
        queries, q, k, eps, wide = n, None, None, 0.0, False
        if norms is not None:
            queries, q, k, eps = norms.queries, norms.q.data_ptr(), norms.k.data_ptr(), norms.eps
            wide = norms.q.dtype != heads.dtype
        turned = angles.cos.shape[-1]
        places = heads.data_ptr(), angles.cos.data_ptr(), angles.sin.data_ptr(), q, k
        strides = heads.stride(0), heads.stride(1)
        native(run, *places, count, *strides, queries, n - queries, size, turned, wide, eps, torch.get_num_threads())

    def activate(self, both: Tensor, activation: Activation) -> Tensor:
        """See `Kernels.activate`."""
        run = self._of("activate", both)
        if run is None or not both.is_contiguous():
            return super().activate(both, activation)
        count, size = both.shape[0], both.shape[1] // 2
        out, (kind, alpha, limit) = both.new_empty(count, size), activation
        number = ACTIVATIONS.index(kind)
        native(run, both.data_ptr(), out.data_ptr(), count, size, number, alpha, limit, torch.get_num_threads())
        return out

    def _laid_out(self, matrices: Tensor) -> Tensor:
        """Lay out `[E, inputs, outputs]` in the panels that the product of their dtype reads."""
        return in_tiles(matrices) if matrices.dtype in self._tiled else in_panels(matrices)

    def _of(self, name: str, given: Tensor) -> Function | None:
        """Return the C function `name` for the dtype of `given`. Returns None if there is no such function, or if
        `given` is not on a CPU.
        """
        return self._functions.get((name, given.dtype)) if given.is_cpu else None
