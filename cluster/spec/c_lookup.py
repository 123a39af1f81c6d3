"""Looked-up tokens in drafted trees, in C, for CPUs: one call each instead of ten to thirty torch operators."""

from ctypes import Structure, byref, c_double, c_int64, c_void_p
from dataclasses import replace

import torch
from torch import Tensor

from cluster.capture.recorder import native
from cluster.kernels.library import Library
from cluster.spec import tree as tree_module
from cluster.spec.lookup import MEMORY, PRIOR, LookupChances
from cluster.spec.token_history import LONGEST_MATCH, Continuations
from cluster.spec.tree import DECAY, DraftTree

KNOWN = ("matched", "agreeing", "accept_len", "limits")
TREE = ("tokens", "parents", "depths", "ancestors", "scores")
FOUND = ("found", "matched", "log_chances")
NEW_TREE = ("new_tokens", "new_parents", "new_depths", "new_ancestors", "new_scores")


class MatchChancesStruct(Structure):
    """The C struct `aerie_match_chances`, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in ("trials", "hits", "matched", "out")),
        *((name, c_int64) for name in ("requests", "count", "longest")),
        ("prior", c_double),
    )


class MatchCountStruct(Structure):
    """The C struct `aerie_match_count`, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in ("trials", "hits", *KNOWN)),
        *((name, c_int64) for name in ("requests", "longest")),
        ("kept", c_double),
    )


class AddLookedUpStruct(Structure):
    """The C struct `aerie_add_looked_up`, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in (*TREE, *FOUND, *NEW_TREE)),
        *((name, c_int64) for name in ("requests", "nodes", "count")),
        *((name, c_double) for name in ("floor", "decay")),
    )


class CLookupChances(LookupChances):
    """`LookupChances` by a compiled `library`. The results must equal those of `LookupChances`, up to rounding."""

    def __init__(self, library: Library, device: torch.device) -> None:
        super().__init__(device)
        self._functions = [library.functions[name, torch.float32] for name in ("match_chances", "match_count")]

    def log_chances(self, matched: Tensor, count: int) -> Tensor:
        """See `LookupChances.log_chances`."""
        matched = matched.contiguous()
        out = self.trials.new_empty(matched.shape[0], count)
        struct = MatchChancesStruct(requests=matched.shape[0], count=count, longest=LONGEST_MATCH, prior=PRIOR)
        _set_addresses(struct, ("trials", "hits", "matched", "out"), (self.trials, self.hits, matched, out))
        native(self._functions[0], byref(struct))
        return out

    def count(self, matched: Tensor, agreeing: Tensor, accept_len: Tensor, limits: Tensor) -> None:
        """See `LookupChances.count`."""
        known, requests = [each.contiguous() for each in (matched, agreeing, accept_len, limits)], matched.shape[0]
        struct = MatchCountStruct(requests=requests, longest=LONGEST_MATCH, kept=1 - requests / MEMORY)
        _set_addresses(struct, ("trials", "hits", *KNOWN), (self.trials, self.hits, *known))
        native(self._functions[1], byref(struct))


class CAddLookedUp:
    """`AddLookedUp` by a compiled `library`; results must equal those of `lookup.add_looked_up`."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def __call__(self, tree: DraftTree, found: Continuations, log_chances: Tensor) -> DraftTree:
        """Return the trees with the looked-up tokens; arguments and result as in `lookup.add_looked_up`."""
        (r, n), count = tree.tokens.shape, found.tokens.shape[1]
        dtype, new = torch.float32 if tree.scores is None else tree.scores.dtype, tree.tokens.new_empty
        scores = None if tree.scores is None else tree.scores.contiguous()
        tensors = [each.contiguous() for each in (tree.tokens, tree.parents, tree.depths, tree.ancestors)]
        found_tensors = found.tokens.contiguous(), found.matched.contiguous(), log_chances.to(dtype).contiguous()
        tokens, parents, depths = (new(r, n + count) for _ in range(3))
        ancestors = new(r, n + count, n + count, dtype=torch.bool)
        new_scores = None if scores is None else scores.new_empty(r, n + count)
        struct = AddLookedUpStruct(requests=r, nodes=n, count=count, floor=tree_module.FLOOR, decay=DECAY)
        _set_addresses(struct, TREE, (*tensors, scores))
        _set_addresses(struct, FOUND, found_tensors)
        _set_addresses(struct, NEW_TREE, (tokens, parents, depths, ancestors, new_scores))
        native(self._library.functions["add_looked_up", dtype], byref(struct))
        return replace(
            tree,
            tokens=tokens,
            parents=parents,
            depths=depths,
            ancestors=ancestors,
            padded=True,
            scores=new_scores,
        )


def _set_addresses(struct: Structure, names: tuple[str, ...], tensors: tuple[Tensor | None, ...]) -> None:
    """Set the pointer fields `names` of `struct` to the addresses of `tensors`; NULL for None."""
    for name, tensor in zip(names, tensors, strict=True):
        setattr(struct, name, None if tensor is None else tensor.data_ptr())
