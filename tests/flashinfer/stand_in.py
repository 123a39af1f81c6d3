"""FlashInfer's wrappers on a CPU, in float64: what they are told they hold to the committed signatures, to the letter.

They do what its documentation and source say of eager use: a plan comes before a run, lies in a pinned workspace that
the next plan of the same wrapper writes to, and is copied from there when the device comes to it; lists of pages are
not copied but read where they lie. What is not said of all kernels (no tokens at all, other layouts) is refused.
"""

import ast
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cluster.engine.lockstep import GangStep, Lockstep
from cluster.kernels import flashinfer_library
from cluster.kernels.flashinfer_library import FlashInfer
from cluster.spec.result import Decided
from tests.flashinfer.signatures import LATENT, METADATA, PREFILL, signature

SIGNATURES = {
    (name, method): signature(name, method)
    for name, methods in {
        PREFILL: ("__init__", "plan", "run"),
        LATENT: ("__init__", "plan", "run"),
        METADATA: ("csr",),
    }.items()
    for method in methods
}
INT32 = {torch.int32}


class Device:
    """The steps that the host has begun and whose results it has not read: their copies may be still to come."""

    def __init__(self) -> None:
        self.begun = 0
        self.read = 0
        self.plans = self.runs = 0

    def begin(self) -> None:
        self.begun += 1

    def finish(self) -> None:
        self.read += 1


DEVICE = Device()


def bound(name: str, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, all of them of the types that the signature says."""
    own = SIGNATURES[name, method]
    given = own.bind(*args, **kwargs).arguments
    for at, value in given.items():
        kind = str(own.parameters[at].annotation)
        assert fits(value, ast.parse(kind, mode="eval").body), f"{at} is {kind}, and {value!r} was passed"
    return dict(given)


def fits(value: object, kind: ast.expr) -> bool:
    """Whether a value is of the type that an annotation names."""
    if isinstance(kind, ast.Subscript):
        inner = kind.slice.elts if isinstance(kind.slice, ast.Tuple) else [kind.slice]
        match ast.unparse(kind.value):
            case "Literal":
                return value in [ast.literal_eval(one) for one in inner]
            case "Union" | "Optional" as word:
                return (word == "Optional" and value is None) or any(fits(value, one) for one in inner)
        return isinstance(value, tuple)
    types = {"torch.Tensor": Tensor, "int": int, "bool": bool, "float": float, "str": str, "torch.dtype": torch.dtype}
    types |= {"object": object, "MLAPlanMetadata": Metadata}
    return isinstance(value, types[ast.unparse(kind)]) and not (ast.unparse(kind) == "int" and isinstance(value, bool))


def csr(*args: Any, **kwargs: Any) -> "Metadata":
    """`MLAPlanMetadata.csr`."""
    assert not args, "by name, as positions mean little here"
    return Metadata(**bound(METADATA, "csr", args, kwargs))


@dataclass
class Metadata:
    """`MLAPlanMetadata` of a list of pages."""

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_len_arr: Tensor


class Planned:
    """What both wrappers do with a plan."""

    def __init__(self) -> None:
        self._pinned = torch.zeros(1 << 14, dtype=torch.int32)
        self._parts: list[int] | None = None
        self._there: list[Tensor] | None = None
        self._copied_in = 0
        self._listed: Tensor | None = None
        self.causal, self.window, self.scale = False, -1, 1.0
        self.dtypes: tuple[torch.dtype, torch.dtype] | None = None

    def stage(self, rows: Tensor, pages: Tensor, lens: Tensor, listed: Tensor, page_size: int) -> None:
        """Put a plan into the pinned workspace; the copy to the device begins, and ends with the step at the latest."""
        assert self._copied_in <= DEVICE.read, "the pinned workspace is written to while its copy may be under way"
        assert {one.dtype for one in (rows, pages, lens, listed)} == INT32
        assert all(one.dim() == 1 and one.is_contiguous() for one in (rows, pages, lens, listed))
        assert rows.shape == pages.shape == (lens.shape[0] + 1,) and lens.shape[0] > 0
        assert not rows[0] and not pages[0] and (rows.diff() > 0).all() and (lens > 0).all()
        assert torch.equal(pages.diff(), (lens + page_size - 1) // page_size)
        assert listed.shape[0] == pages[-1], "the list has as many pages as the plan"
        given = [rows, pages, lens]
        self._parts, self._there, self._listed = [one.shape[0] for one in given], None, listed
        self._pinned[: sum(self._parts)] = torch.cat(given)
        self._copied_in = DEVICE.begun
        DEVICE.plans += 1

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, page_size: int) -> Tensor:
        """q `[T, nh, d]` over keys and values `[pages, page_size, nkv, ..]` -> `out`, and logarithms to base 2."""
        assert self._parts is not None and self._listed is not None, "plan comes before run"
        if self._there is None:  # the device comes to the copy
            self._there = list(self._pinned[: sum(self._parts)].clone().split(self._parts))
        rows, pages, lens = self._there
        assert q.shape[0] == rows[-1], "as many rows as were planned"
        assert (q.dtype, keys.dtype) == self.dtypes and out.dtype == q.dtype, "as planned"
        lse = torch.full(q.shape[:2], math.nan, dtype=torch.promote_types(q.dtype, torch.float32))
        repeat = q.shape[1] // keys.shape[2]
        for i in range(lens.shape[0]):
            length, own = int(lens[i]), slice(int(rows[i]), int(rows[i + 1]))
            at = self._listed[int(pages[i]) : int(pages[i + 1])].long()
            k = keys[at].flatten(0, 1)[:length].double().repeat_interleave(repeat, 1)
            v = values[at].flatten(0, 1)[:length].double().repeat_interleave(repeat, 1)
            scores = torch.einsum("qhd,khd->hqk", q[own].double(), k) * self.scale
            label = torch.arange(length)
            last = label[-1] - (own.stop - own.start - 1) + torch.arange(own.stop - own.start)
            hidden = torch.zeros(scores.shape[1:], dtype=torch.bool)
            if self.causal:
                assert last[0] >= 0, "causal rows are the last of their text"
                hidden |= label > last[:, None]
            if self.window >= 0:
                hidden |= label < last[:, None] - self.window
            scores = scores.masked_fill(hidden, -math.inf)
            out[own] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(out.dtype)
            lse[own] = (scores.logsumexp(-1) / math.log(2)).t().to(lse.dtype)
        DEVICE.runs += 1
        return lse


class Paged(Planned):
    """`BatchPrefillWithPagedKVCacheWrapper`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        given = bound(PREFILL, "__init__", args, kwargs)
        assert given["float_workspace_buffer"].dtype == torch.uint8 and given["kv_layout"] == "NHD"
        assert given.keys() <= {"float_workspace_buffer", "kv_layout", "backend"}, "eager use only"
        assert given["backend"] in ("fa2", "fa3")

    def plan(self, *args: Any, **kwargs: Any) -> None:
        given = bound(PREFILL, "plan", args, kwargs)
        size = self._page_size = given["page_size"]
        self._heads = given["num_qo_heads"], given["num_kv_heads"], given["head_dim_qk"]
        self.causal, self.window = given.get("causal", False), given.get("window_left", -1)
        self.scale = given.get("sm_scale", self._heads[2] ** -0.5)
        self.dtypes = given.get("q_data_type", torch.float16), given.get("kv_data_type", given.get("q_data_type"))
        pages, last = given["paged_kv_indptr"], given["paged_kv_last_page_len"]
        assert last.dtype == torch.int32 and ((last >= 1) & (last <= size)).all()
        lens = (pages.diff() - 1) * size + last
        self.stage(given["qo_indptr"], pages, lens.to(torch.int32), given["paged_kv_indices"], size)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        given = bound(PREFILL, "run", args, kwargs)
        assert given.keys() == {"q", "paged_kv_cache", "out", "return_lse"} and given["return_lse"]
        q, cache, out = given["q"], given["paged_kv_cache"], given["out"]
        heads, kv_heads, size = self._heads
        assert q.shape[1:] == (heads, size) and q.stride(2) == 1 and out.shape == q.shape
        assert cache.shape[1:] == (2, self._page_size, kv_heads, size) and cache.stride(4) == 1, "pages, 2, page, ..."
        keys, values = cache.unbind(1)
        assert keys.stride() == values.stride(), "the kernels take one stride for both"
        return out, self.attend(q, keys, values, out, self._page_size)


class Latent(Planned):
    """`BatchMLAPagedAttentionWrapper`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        given = bound(LATENT, "__init__", args, kwargs)
        assert given.keys() == {"float_workspace_buffer", "backend"}, "eager use only"
        assert given["backend"] in ("fa2", "fa3")

    def plan(self, *args: Any, **kwargs: Any) -> None:
        assert not args, "deprecated"
        given = bound(LATENT, "plan", args, kwargs)
        need = {"num_heads", "head_dim_ckv", "head_dim_kpe", "page_size", "causal", "sm_scale"}
        assert given.keys() == need | {"metadata", "q_data_type", "kv_data_type", "lse_mode"}, "all are required"
        assert isinstance(given["metadata"], Metadata) and given["lse_mode"] == "base2"
        self._sizes = given["num_heads"], given["head_dim_ckv"], given["head_dim_kpe"]
        self.causal, self.scale, self._page_size = given["causal"], given["sm_scale"], given["page_size"]
        self.dtypes = given["q_data_type"], given["kv_data_type"]
        told = given["metadata"]
        self.stage(told.qo_indptr, told.kv_indptr, told.kv_len_arr, told.kv_indices, self._page_size)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        assert not args, "deprecated"
        given = bound(LATENT, "run", args, kwargs)
        assert given.keys() == {"query", "kv_cache", "out", "return_lse"} and given["return_lse"]
        q, cells, out = given["query"], given["kv_cache"], given["out"]
        heads, value, behind = self._sizes
        assert q.shape[1:] == (heads, value + behind) and cells.shape[1:] == (self._page_size, value + behind)
        assert out.shape == (q.shape[0], heads, value)
        keys = cells[:, :, None]
        return out, self.attend(q, keys, keys[..., :value], out, self._page_size)


class All(frozenset[Any]):
    """Models of tests are smaller than those that FlashInfer is for."""

    def __contains__(self, size: object) -> bool:
        return True


def stand_in(sizes: bool = True) -> FlashInfer:
    """The stand-in, for heads of all `sizes`, or of FlashInfer's."""
    if not sizes:
        return FlashInfer(Paged, Latent, csr, "fa3")
    return FlashInfer(Paged, Latent, csr, "fa3", All(), All())


def stand_in_serves(set_attribute: Callable[[object, str, Any], None], sizes: bool = True) -> None:
    """Have engines on a CPU get the stand-in where FlashInfer is asked for; it learns when steps begin and are read."""
    set_attribute(flashinfer_library, "find", lambda device, dtype: stand_in(sizes))
    begin, read = Lockstep.run, Lockstep.read

    def begun(self: Lockstep, *given: Any, **named: Any) -> GangStep:
        DEVICE.begin()
        try:
            ran = begin(self, *given, **named)
        except BaseException:
            DEVICE.finish()
            raise
        if ran.output is None:
            DEVICE.finish()
        return ran

    def finished(self: Lockstep, ran: GangStep) -> Decided:
        given = read(self, ran)
        DEVICE.finish()
        return given

    set_attribute(Lockstep, "run", begun)
    set_attribute(Lockstep, "read", finished)
