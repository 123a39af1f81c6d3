"""`select_nodes` in C, for CPUs: one call instead of about fifteen torch operators on a few numbers each."""

from ctypes import Structure, byref, c_double, c_int64, c_void_p

import torch
from torch import Tensor

from cluster.capture.recorder import native
from cluster.kernels.library import Library
from cluster.spec.row_budget import LIMIT_PENALTY, NodeSelection

POINTERS = ("scores", "depths", "limits", "selected", "requests", "rows", "ranks")
NUMBERS = ("trees", "nodes", "count", "depths_stride")


class SelectStruct(Structure):
    """Arguments of the C function, laid out as `struct aerie_select`."""

    _fields_ = (
        *((name, c_void_p) for name in POINTERS),
        *((name, c_int64) for name in NUMBERS),
        ("penalty", c_double),
    )


class CSelectNodes:
    """`SelectNodes` by a compiled `library`; results must equal those of `row_budget.select_nodes`."""

    def __init__(self, library: Library) -> None:
        self._functions = {dtype: library.functions["select", dtype] for dtype in (torch.float32, torch.float64)}

    def __call__(self, scores: Tensor, depths: Tensor, limits: Tensor, count: int) -> NodeSelection:
        """Return the nodes to verify; arguments and result as in `row_budget.select_nodes`."""
        scores, limits = scores.contiguous(), limits.contiguous()
        depths = depths if depths.stride(1) == 1 else depths.contiguous()
        trees, nodes = scores.shape
        selected, requests = limits.new_empty(count), limits.new_empty(count)
        rows, ranks = limits.new_empty(trees, nodes), limits.new_empty(trees, nodes)
        struct = SelectStruct(trees=trees, nodes=nodes, count=count, depths_stride=depths.stride(0))
        struct.penalty = LIMIT_PENALTY
        for name, tensor in zip(POINTERS, (scores, depths, limits, selected, requests, rows, ranks), strict=True):
            setattr(struct, name, tensor.data_ptr())
        native(self._functions[scores.dtype], byref(struct))
        return NodeSelection(selected, requests, rows, ranks)
