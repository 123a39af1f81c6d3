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
        self._run = library.functions["accept", torch.float32]  # the function handles integers only: any dtype will do

    def __call__(self, tree: DraftTree, target_tokens: Tensor, first_tokens: Tensor, num_steps: int) -> Accepted:
        """Return the accepted paths; arguments and result as in `verify.accept`."""
        (trees, nodes), path_length = target_tokens.shape, num_steps + 1
        target_tokens = target_tokens.contiguous()
        tree_tensors = [
            tree_tensor if tree_tensor.stride(1) == 1 else tree_tensor.contiguous()
            for tree_tensor in (tree.tokens, tree.parents, tree.depths)
        ]
        path, path_tokens = target_tokens.new_empty(trees, path_length), target_tokens.new_empty(trees, path_length)
        lens, bonus = target_tokens.new_empty(trees), target_tokens.new_empty(trees)
        struct = AcceptStruct(trees=trees, nodes=nodes, wide=path_length)
        struct.tokens_stride, struct.parents_stride, struct.depths_stride = (
            tree_tensor.stride(0) for tree_tensor in tree_tensors
        )
        # In the order of POINTERS; the last one is scratch memory, one byte per node.
        tensors = (
            *tree_tensors,
            target_tokens,
            path,
            path_tokens,
            lens,
            bonus,
            target_tokens.new_empty(nodes, dtype=torch.int8),
        )
        for name, tensor in zip(POINTERS, tensors, strict=True):
            setattr(struct, name, tensor.data_ptr())
        native(self._run, byref(struct))
        return Accepted(path, path_tokens, lens, with_prompts(bonus, first_tokens))
