"""`Growth` in C, for CPUs: one call for each level and one for the tree, instead of about forty torch operators.

Legend: R requests, K topk, N nodes, C candidates.
"""

from ctypes import Structure, byref, c_double, c_int64, c_void_p
from functools import partial

import torch
from torch import Tensor

from cluster.capture.recorder import native
from cluster.kernels.library import Library
from cluster.sampling.noise import at_least_float32
from cluster.spec import tree as tree_module
from cluster.spec.tree import DECAY, DraftTree, GrowthFactory

CANDIDATES = ("tokens", "parents", "scores")
ROWS = ("row_numbers", "row_scores")
BEST = ("next_tokens", "next_rows", "next_numbers", "next_scores")
NODES = ("node_tokens", "node_parents", "node_depths", "node_scores", "kept", "ancestors")


class LevelStruct(Structure):
    """The C struct `aerie_level`, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in ("proposals", "log_probabilities", *CANDIDATES, *ROWS, *BEST)),
        *((name, c_int64) for name in ("requests", "topk", "candidates", "first")),
        *((name, c_double) for name in ("floor", "decay")),
    )


class KeepStruct(Structure):
    """The C struct `aerie_keep`, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in (*CANDIDATES, "bonus", *NODES)),
        *((name, c_int64) for name in ("requests", "candidates", "nodes")),
    )


def growth_of(library: Library) -> GrowthFactory:
    """Return a `GrowthFactory` by a compiled `library`. Its results must equal those of `TorchGrowth`, except that C
    keeps the first of equal scores, and torch may keep any.
    """
    return partial(CGrowth, library)


class CGrowth:
    """`Growth` in C. The candidates of all levels share buffers `[R, C]`, which are allocated at the start."""

    def __init__(self, library: Library, tokens: Tensor, log_probabilities: Tensor, num_steps: int) -> None:
        """Allocate the candidates of `num_steps` levels, and write those of level 1."""
        (r, k), dtype = tokens.shape, at_least_float32(log_probabilities.dtype)
        self._functions = library.functions["level", dtype], library.functions["keep", dtype]
        count = k + (num_steps - 1) * k * k
        self._candidates = {name: tokens.new_empty(r, count) for name in CANDIDATES}
        self._candidates["scores"] = tokens.new_empty(r, count, dtype=dtype)
        self._shape, self._num_steps, self._added = (r, k), num_steps, 0
        self._best = dict[str, Tensor]()
        self.add(tokens, log_probabilities)

    def add(self, proposals: Tensor, log_probabilities: Tensor) -> None:
        """Add the candidates of one more level, and select its K best; see `Growth.add`.

        Raises:
            ValueError: all levels were added already.
        """
        (r, k), count, dtype = self._shape, self._candidates["tokens"].shape[1], self._candidates["scores"].dtype
        if self._added == count:
            raise ValueError(f"all {self._num_steps} levels were added already")
        rows = dict(zip(ROWS, (self._best[name] for name in BEST[2:]), strict=True)) if self._added else {}
        self._best = {name: proposals.new_empty(r, k) for name in BEST}
        self._best["next_scores"] = proposals.new_empty(r, k, dtype=dtype)
        tensors = {"proposals": proposals.contiguous(), "log_probabilities": log_probabilities.to(dtype).contiguous()}
        struct = LevelStruct(requests=r, topk=k, candidates=count, first=self._added)
        struct.floor, struct.decay = tree_module.FLOOR, DECAY
        _set_addresses(struct, tensors | self._candidates | rows | self._best)
        native(self._functions[0], byref(struct))
        self._added += k * k if self._added else k

    def best(self) -> tuple[Tensor, Tensor]:
        """Return what `add` selected already; see `Growth.best`."""
        return self._best["next_tokens"], self._best["next_rows"]

    def tree(self, bonus: Tensor, nodes: int) -> DraftTree:
        """Select the nodes among all candidates; see `Growth.tree`.

        Raises:
            ValueError: not all levels were added, or `nodes` is not between 1 and C + 1.
        """
        (r, count), bonus = self._candidates["tokens"].shape, bonus.contiguous()
        if self._added != count:
            raise ValueError(f"{self._added} candidates were added of the {count} of {self._num_steps} levels")
        if not 1 <= nodes <= count + 1:
            raise ValueError(f"{nodes} nodes of {count} candidates and a root")
        node_tensors = {name: bonus.new_empty(r, nodes) for name in NODES}
        node_tensors["node_scores"] = bonus.new_empty(r, nodes, dtype=self._candidates["scores"].dtype)
        node_tensors["kept"] = bonus.new_empty(r, nodes - 1)
        node_tensors["ancestors"] = bonus.new_empty(r, nodes, nodes, dtype=torch.bool)
        struct = KeepStruct(requests=r, candidates=count, nodes=nodes, bonus=bonus.data_ptr())
        _set_addresses(struct, self._candidates | node_tensors)
        native(self._functions[1], byref(struct))
        tokens, parents, depths, scores, kept, ancestors = (node_tensors[name] for name in NODES)
        return DraftTree(tokens, parents, depths, ancestors, scores=scores, candidates=kept)


def _set_addresses(struct: Structure, tensors: dict[str, Tensor]) -> None:
    """Set the pointer fields of `struct` to the addresses of the tensors of the same names."""
    for name, tensor in tensors.items():
        setattr(struct, name, tensor.data_ptr())
