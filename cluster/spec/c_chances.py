"""`NodeChances` in C, for CPUs: one call instead of about twenty torch operators on a few numbers each."""

from ctypes import Structure, byref, c_double, c_int64, c_void_p

import torch
from torch import Tensor

from cluster.capture.recorder import native
from cluster.kernels.library import Library
from cluster.spec.chances import LEAST, MEMORY, POINTS, PRIOR, NodeChances
from cluster.spec.tree import NO_TOKEN, DraftTree
from cluster.spec.verify import Accepted

COUNTS = ("trials", "hits")


class ChancesStruct(Structure):
    """The C struct `aerie_chances`, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in (*COUNTS, "log_probabilities", "sampled", "out")),
        *((name, c_int64) for name in ("requests", "rows", "topk", "points")),
        *((name, c_double) for name in ("prior", "least")),
    )


COUNTED = ("log_probabilities", "is_likeliest", "tokens", "parents", "path", "sampled", "limits")


class CountStruct(Structure):
    """The C struct `aerie_count`, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in (*COUNTS, *COUNTED)),
        *((name, c_int64) for name in ("requests", "drafted", "nodes", "path_length", "points")),
        *((name, c_int64) for name in ("tokens_stride", "parents_stride", "no_token")),
        ("kept", c_double),
    )


class CNodeChances(NodeChances):
    """`NodeChances` by a compiled `library`. The results must equal those of `NodeChances`, up to rounding."""

    def __init__(self, library: Library, device: torch.device) -> None:
        super().__init__(device)
        self._library = library

    def log_chances(self, log_probabilities: Tensor, sampled: Tensor) -> Tensor:
        """See `NodeChances.log_chances`."""
        log_probabilities, sampled = log_probabilities.contiguous(), sampled.contiguous()
        out, requests, topk = torch.empty_like(log_probabilities), sampled.shape[0], log_probabilities.shape[-1]
        struct = ChancesStruct(requests=requests, topk=topk, points=POINTS, prior=PRIOR, least=LEAST)
        struct.rows = log_probabilities.numel() // max(1, requests * topk)
        struct.trials, struct.hits = self.trials.data_ptr(), self.hits.data_ptr()
        struct.log_probabilities, struct.sampled = log_probabilities.data_ptr(), sampled.data_ptr()
        struct.out = out.data_ptr()
        native(self._library.functions["chances", out.dtype], byref(struct))
        return out

    def count(self, tree: DraftTree, accepted: Accepted, sampled: Tensor, limits: Tensor) -> None:
        """See `NodeChances.count`."""
        if tree.proposed is None:
            return
        tokens, parents = (each if each.stride(1) == 1 else each.contiguous() for each in (tree.tokens, tree.parents))
        contiguous = [each.contiguous() for each in (*tree.proposed, accepted.path, sampled, limits)]
        (requests, drafted), nodes = contiguous[0].shape, tokens.shape[1]
        struct = CountStruct(requests=requests, drafted=drafted, nodes=nodes, points=POINTS, no_token=NO_TOKEN)
        struct.path_length, struct.kept = accepted.path.shape[1], 1 - requests / MEMORY
        struct.tokens_stride, struct.parents_stride = tokens.stride(0), parents.stride(0)
        tensors = (self.trials, self.hits, *contiguous[:2], tokens, parents, *contiguous[2:])
        for name, tensor in zip((*COUNTS, *COUNTED), tensors, strict=True):
            setattr(struct, name, tensor.data_ptr())
        native(self._library.functions["count", contiguous[0].dtype], byref(struct))
