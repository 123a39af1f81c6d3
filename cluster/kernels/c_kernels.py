"""The kernels in C, for a CPU. Cases that they do not support (float16, GPUs, some layouts) go to `TorchKernels`."""

from collections.abc import Iterable

import torch
from torch import Tensor

from cluster.capture.recorder import native
from cluster.kernels import c_quantised
from cluster.kernels.interface import Activation, Angles, HeadNorms, Stack, Weight
from cluster.kernels.library import Function, Library
from cluster.kernels.panels import checked_bias, checked_ends, checked_rows, in_panels, in_tiles, out_of_panels
from cluster.kernels.quantised import Quantised
from cluster.kernels.torch_kernels import TorchKernels

ACTIVATIONS = ("silu", "gelu_tanh", "clamped", "clamped_silu")


def _scale_fits(scale: Tensor, rows: Tensor) -> bool:
    """Return whether C can read `scale` `[H]`: it must be contiguous, in the dtype of `rows` `[.., H]` or the dtype in
    which `rows` are summed.
    """
    known_dtype = scale.dtype in (rows.dtype, torch.promote_types(rows.dtype, torch.float32))
    return known_dtype and scale.shape == rows.shape[-1:] and scale.is_contiguous()


class Panels(Weight):
    """A weight `[inputs, outputs]` stored in panels of columns, laid out as a `PanelStack` of one expert."""

    def __init__(self, panels: Tensor, inputs: int, outputs: int, product: Function) -> None:
        self.panels, self.product = panels, product
        self.shape, self.dtype, self.nbytes = (inputs, outputs), panels.dtype, panels.nbytes

    def __call__(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `Weight`."""
        inputs, outputs = self.shape
        rows = checked_rows(rows, inputs, self.dtype)
        bias = None if bias is None else checked_bias(bias, rows, outputs)
        out, bias_address = rows.new_empty(rows.shape[0], outputs), None if bias is None else bias.data_ptr()
        arguments = (
            rows.data_ptr(),
            self.panels.data_ptr(),
            bias_address,
            out.data_ptr(),
            rows.shape[0],
            inputs,
            outputs,
        )
        native(self.product, *arguments, None, 1, torch.get_num_threads())
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
        rows, ends = checked_rows(rows, self.inputs, self.panels.dtype), checked_ends(ends, self.panels.shape[0])
        out = rows.new_empty(rows.shape[0], self.outputs)
        arguments = rows.data_ptr(), self.panels.data_ptr(), None, out.data_ptr(), *rows.shape, self.outputs
        native(self.product, *arguments, ends.data_ptr(), self.panels.shape[0], torch.get_num_threads())
        return out

    def dense(self) -> Tensor:
        """See `Stack`."""
        return out_of_panels(self.panels, self.inputs, self.outputs)


class CKernels(TorchKernels):
    """`Kernels` by the C functions of a `library`."""

    name = "c"

    def __init__(self, library: Library, dtype: torch.dtype = torch.float32) -> None:
        """`dtype` is the model's dtype; it only affects the texts `description` and `numerics`."""
        variant_text = f", in {library.variant}" if library.variant and dtype == torch.bfloat16 else ""
        super().__init__(f"C, compiled for {library.level}{variant_text}")
        self.numerics = f"C with {'fused' if library.fused else 'rounded'} products{variant_text}"
        self.library, self._functions = library, library.functions
        self._tiled_dtypes = {torch.bfloat16} if library.variant == "tiles" else set()

    def weight(self, matrix: Tensor) -> Weight:
        """See `Kernels.weight`."""
        if (product := self._function("product", matrix)) is None:
            return super().weight(matrix)
        return Panels(self._lay_out(matrix[None]), matrix.shape[0], matrix.shape[1], product)

    def stack(self, matrices: Tensor) -> Stack:
        """See `Kernels.stack`."""
        if (product := self._function("product", matrices)) is None:
            return super().stack(matrices)
        return PanelStack(self._lay_out(matrices), matrices.shape[1], matrices.shape[2], product)

    def keeps_quantised(self, matrix: Quantised, dtype: torch.dtype) -> bool:
        """See `Kernels.keeps_quantised`."""
        return ("codes", dtype) in self._functions and c_quantised.supports(matrix)

    def quantised(self, matrix: Quantised, dtype: torch.dtype) -> Weight:
        """See `Kernels.quantised`."""
        return c_quantised.CodePanels(c_quantised.in_panels(matrix, dtype), self._functions["codes", dtype])

    def quantised_stack(self, matrices: Iterable[Quantised], dtype: torch.dtype) -> Stack:
        """See `Kernels.quantised_stack`."""
        return c_quantised.CodePanelStack(
            c_quantised.stacked_in_panels(matrices, dtype), self._functions["codes", dtype]
        )

    def norm(self, rows: Tensor, scale: Tensor, eps: float) -> Tensor:
        """See `Kernels.norm`."""
        function = self._function("norm", rows)
        if function is None or rows.dim() != 2 or rows.stride(1) != 1 or not _scale_fits(scale, rows):
            return super().norm(rows, scale, eps)
        out, wide_scale = torch.empty_like(rows, memory_format=torch.contiguous_format), scale.dtype != rows.dtype
        (count, size), addresses = rows.shape, (rows.data_ptr(), None, scale.data_ptr(), None, out.data_ptr())
        native(function, *addresses, count, size, rows.stride(0), wide_scale, eps, torch.get_num_threads())
        return out

    def add_norm(self, rows: Tensor, residual: Tensor | None, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `Kernels.add_norm`."""
        function = self._function("norm", rows)
        same_layout = residual is not None and residual.shape == rows.shape and residual.dtype == rows.dtype
        if (
            function is None
            or residual is None
            or not same_layout
            or not rows.is_contiguous()
            or not _scale_fits(scale, rows)
        ):
            return super().add_norm(rows, residual, scale, eps)
        residual, residual_sum, out = residual.contiguous(), torch.empty_like(rows), torch.empty_like(rows)
        (count, size), wide_scale = rows.shape, scale.dtype != rows.dtype
        addresses = rows.data_ptr(), residual.data_ptr(), scale.data_ptr(), residual_sum.data_ptr(), out.data_ptr()
        native(function, *addresses, count, size, size, wide_scale, eps, torch.get_num_threads())
        return residual_sum, out

    def rotate(self, heads: Tensor, angles: Angles, norms: HeadNorms | None = None) -> None:
        """See `Kernels.rotate`."""
        function = self._function("rotary", heads)
        angles_fit = all(angle.dtype == heads.dtype and angle.is_contiguous() for angle in angles)
        norms_fit = norms is None or (
            _scale_fits(norms.q, heads) and _scale_fits(norms.k, heads) and norms.q.dtype == norms.k.dtype
        )
        if function is None or heads.stride(2) != 1 or not angles_fit or not norms_fit:
            super().rotate(heads, angles, norms)
            return
        count, num_heads, head_dim = heads.shape
        query_heads, q_address, k_address, eps, wide_scale = num_heads, None, None, 0.0, False
        if norms is not None:
            query_heads, q_address, k_address, eps = norms.queries, norms.q.data_ptr(), norms.k.data_ptr(), norms.eps
            wide_scale = norms.q.dtype != heads.dtype
        rotary_dim = angles.cos.shape[-1]
        addresses = heads.data_ptr(), angles.cos.data_ptr(), angles.sin.data_ptr(), q_address, k_address
        strides = heads.stride(0), heads.stride(1)
        native(
            function,
            *addresses,
            count,
            *strides,
            query_heads,
            num_heads - query_heads,
            head_dim,
            rotary_dim,
            wide_scale,
            eps,
            torch.get_num_threads(),
        )

    def activate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """See `Kernels.activate`."""
        function = self._function("activate", gate_up)
        if function is None or not gate_up.is_contiguous():
            return super().activate(gate_up, activation)
        count, size = gate_up.shape[0], gate_up.shape[1] // 2
        out, (kind, alpha, limit) = gate_up.new_empty(count, size), activation
        kind_number = ACTIVATIONS.index(kind)
        native(
            function,
            gate_up.data_ptr(),
            out.data_ptr(),
            count,
            size,
            kind_number,
            alpha,
            limit,
            torch.get_num_threads(),
        )
        return out

    def _lay_out(self, matrices: Tensor) -> Tensor:
        """Lay out `[E, inputs, outputs]` in the panels that the product of their dtype reads."""
        return in_tiles(matrices) if matrices.dtype in self._tiled_dtypes else in_panels(matrices)

    def _function(self, name: str, tensor: Tensor) -> Function | None:
        """Return the C function `name` for the dtype of `tensor`. Return None if there is no such function, or if
        `tensor` is not on a CPU.
        """
        return self._functions.get((name, tensor.dtype)) if tensor.is_cpu else None
