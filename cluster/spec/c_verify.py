"""`accept` in C, for CPUs: one call instead of about twenty torch operators on a few numbers each."""

from ctypes import Structure, byref, c_int64, c_void_p

import torch
from torch import Tensor

from cluster.batch import with_prompts
from cluster.capture.recorder import native
from cluster.kernels.library import Library
from cluster.spec.tree import DraftTree
from cluster.spec.verify import Accepted

POINTERS = ("tokens", "parents", "depths", "chosen", "path", "taken", "lens", "bonus", "on")
NUMBERS = ("trees", "nodes", "wide", "tokens_stride", "parents_stride", "depths_stride")


class AcceptStruct(Structure):
    """Arguments of the C function, laid out as `struct aerie_accept`."""

    _fields_ = (*((name, c_void_p) for name in POINTERS), *((name, c_int64) for name in NUMBERS))


class CAccept:
    """`Accept` by a compiled `library`; results must equal those of `verify.accept`."""

    def __init__(self, library: Library) -> None:
        self._run = library.functions["accept", torch.float32]  # it handles integers only: the dtype does not matter

    def __call__(self, tree: DraftTree, chosen: Tensor, first: Tensor, num_steps: int) -> Accepted:
        """Return the accepted paths; arguments and result as in `verify.accept`."""
        (trees, nodes), wide = chosen.shape, num_steps + 1
        chosen = chosen.contiguous()
        rows = [each if each.stride(1) == 1 else each.contiguous() for each in (tree.tokens, tree.parents, tree.depths)]
        path, taken = chosen.new_empty(trees, wide), chosen.new_empty(trees, wide)
        lens, bonus = chosen.new_empty(trees), chosen.new_empty(trees)
        given = AcceptStruct(trees=trees, nodes=nodes, wide=wide)
        given.tokens_stride, given.parents_stride, given.depths_stride = (each.stride(0) for each in rows)
        # In the order of POINTERS; the last one is scratch memory, one byte per node.
        told = (*rows, chosen, path, taken, lens, bonus, chosen.new_empty(nodes, dtype=torch.int8))
        for name, tensor in zip(POINTERS, told, strict=True):
            setattr(given, name, tensor.data_ptr())
        native(self._run, byref(given))
        return Accepted(path, taken, lens, with_prompts(bonus, first))
