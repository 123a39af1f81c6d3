"""FlashInfer's wrappers on a CPU, in float64: what they are told they hold to the committed signatures, to the letter.

They do what its documentation and source say: a plan comes before a run, lies in a pinned workspace that the next plan
of the same wrapper writes to, and is copied from there when the device comes to it; lists of pages are not copied but
read where they lie. For graphs there are buffers of fixed sizes, which each plan fills, and numbers of a plan follow
from rows and requests alone; else they are another plan's. What is not said of all kernels (no tokens at all, other
layouts) is refused. `device.py` is what launches meet.
"""

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cluster.capture import recorder
from cluster.device.staging import StagedLists
from cluster.engine.assembler import Assembler
from cluster.engine.lockstep import Lockstep, StepInFlight
from cluster.kernels.flashinfer import library as flashinfer_library
from cluster.kernels.flashinfer.library import FlashInfer
from cluster.spec.result import StepOutput
from tests.flashinfer.device import DEVICE, ROOM, Launch, arrive, captured, kernel, staged
from tests.flashinfer.signatures import LATENT, METADATA, PREFILL, known, signature

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


class Wrapper:
    """What both wrappers do with a plan. All that their `run` reads is there, as `known` says."""

    def __init__(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        for read in known()["read"][name]:
            setattr(self, read, None)
        given = bound(name, "__init__", args, kwargs)
        assert given["float_workspace_buffer"].dtype == torch.uint8 and given["backend"] in ("fa2", "fa3")
        self._float_workspace_buffer, self._backend = given["float_workspace_buffer"], given["backend"]
        self.graphs = given.get("use_cuda_graph", False)
        self._sizes: tuple[int, ...] = ()
        self._dtypes: tuple[Any, Any] = None, None
        self._how: tuple[bool, int, float] = False, -1, 1.0

    def check(self, rows: Tensor, pages: Tensor, lens: Tensor, listed: Tensor, page_size: int) -> None:
        """What is said of plans must hold."""
        assert {one.dtype for one in (rows, pages, lens, listed)} == INT32
        assert all(one.dim() == 1 and one.is_contiguous() for one in (rows, pages, lens, listed))
        assert rows.shape == pages.shape == (lens.shape[0] + 1,) and lens.shape[0] > 0
        assert not rows[0] and not pages[0] and (rows.diff() > 0).all() and (lens > 0).all()
        assert torch.equal(pages.diff(), (lens + page_size - 1) // page_size)
        assert listed.shape[0] == pages[-1], "the list has as many pages as the plan"

    def kept(self, buffers: Sequence[Tensor], given: Sequence[Tensor], listed: Tensor) -> None:
        """Bring what graphs read to where they read it."""
        room = buffers[-1]
        assert all(one.dtype == torch.int32 and one.is_contiguous() for one in buffers)
        assert listed.data_ptr() == room.data_ptr() and len(listed) <= len(room), "the list is the wrapper's own"
        for there, one in zip(buffers[:-1], given, strict=True):
            assert there.shape == one.shape, "the batch of graphs is of one size"
            recorder.native(arrive, there, one.clone(), len(one))

    def launch(self, told: Launch, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> Tensor:
        """Start the kernel."""
        assert self.graphs or not captured(), "a graph holds a plan that is not made for graphs"
        assert (q.dtype, keys.dtype) == self._dtypes and out.dtype == q.dtype, "as planned"
        DEVICE.repeated += self.graphs
        lse = torch.empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        recorder.native(kernel, told, q, keys, values, out, lse)
        return lse


class Paged(Wrapper):
    """`BatchPrefillWithPagedKVCacheWrapper`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(PREFILL, args, kwargs)
        given = bound(PREFILL, "__init__", args, kwargs)
        buffers = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_last_page_len_buf", "paged_kv_indices_buf")
        of_graphs = {"use_cuda_graph", *buffers} if self.graphs else set()
        assert given.keys() == {"float_workspace_buffer", "kv_layout", "backend"} | of_graphs
        assert given["kv_layout"] == "NHD"
        with DEVICE.host():
            self._pinned, self._int_workspace_buffer = (torch.zeros(ROOM, dtype=torch.int32) for _ in range(2))
        self._buffers: tuple[Tensor, ...] = tuple(given[name] for name in buffers) if self.graphs else ()
        self._most_rows, self._copied_in = 0, 0

    def plan(self, *args: Any, **kwargs: Any) -> None:
        with DEVICE.host():
            self._plan(bound(PREFILL, "plan", args, kwargs))

    def _plan(self, given: dict[str, Any]) -> None:
        assert self._copied_in <= DEVICE.read, "the pinned workspace is written to while its copy may be under way"
        size = self._page_size = given["page_size"]
        self._sizes = given["num_qo_heads"], given["num_kv_heads"], given["head_dim_qk"]
        scale = given.get("sm_scale", self._sizes[2] ** -0.5)
        self._how = given.get("causal", False), given.get("window_left", -1), scale
        self._dtypes = given.get("q_data_type", torch.float16), given.get("kv_data_type", given.get("q_data_type"))
        rows, pages, last = given["qo_indptr"], given["paged_kv_indptr"], given["paged_kv_last_page_len"]
        listed = given["paged_kv_indices"]
        assert last.dtype == torch.int32 and ((last >= 1) & (last <= size)).all()
        lens = ((pages.diff() - 1) * size + last).to(torch.int32)
        self.check(rows, pages, lens, listed, size)
        batch, count = len(lens), int(rows[-1])
        self._qo_indptr_last, self._batch_size, self._causal, self._window_left = count, batch, *self._how[:2]
        self._max_q_len = given["max_token_per_sequence"] or int(rows.diff().max())
        self._max_kv_len = given["max_sequence_kv"] or int(lens.max())
        self._sm_scale, self._num_qo_heads, self._num_kv_heads = scale, *self._sizes[:2]
        works = int(pages[-1])  # lists are as long as the step at hand needs
        if self.graphs:
            self._most_rows = works = self._most_rows or count
            assert len(self._buffers[0]) == batch + 1, "the batch of graphs is of one size"
            assert count <= self._most_rows
            assert given["uniform_q_len"] is None or (rows.diff() == given["uniform_q_len"]).all()
            self.kept(self._buffers, (rows, pages, last), listed)
        else:
            self._buffers = rows, pages, last, listed
        self._qo_indptr_buf, self._paged_kv_indptr_buf, self._paged_kv_last_page_len_buf = self._buffers[:3]
        self._paged_kv_indices_buf = self._buffers[3]
        self._plan_info = [works, batch, self._sizes[0], 16 * batch * works]
        self._copied_in = DEVICE.begun
        staged(self._pinned, self._int_workspace_buffer, [rows, pages, lens], tuple(self._plan_info))

    def run(self, *args: Any, **kwargs: Any) -> Any:
        given = bound(PREFILL, "run", args, kwargs)
        assert given.keys() == {"q", "paged_kv_cache", "out", "return_lse"} and given["return_lse"]
        assert self._plan_info is not None, "plan comes before run"
        q, cache, out = given["q"], given["paged_kv_cache"], given["out"]
        heads, kv_heads, size = self._sizes
        assert q.shape[1:] == (heads, size) and q.stride(2) == 1 and out.shape == q.shape
        assert cache.shape[1:] == (2, self._page_size, kv_heads, size) and cache.stride(4) == 1, "pages, 2, page, ..."
        keys, values = cache.unbind(1)
        assert keys.stride() == values.stride(), "the kernels take one stride for both"
        numbers, workspace = tuple(self._plan_info), self._int_workspace_buffer
        told = Launch(numbers, workspace, self._buffers[:3], self._buffers[3], self._batch_size, *self._how)
        return out, self.launch(told, q, keys, values, out)


class Latent(Wrapper):
    """`BatchMLAPagedAttentionWrapper`: each plan has pinned memory of its own, which torch keeps until it is copied."""

    _planned_backend: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(LATENT, args, kwargs)
        given = bound(LATENT, "__init__", args, kwargs)
        buffers = ("qo_indptr", "kv_indptr", "kv_len_arr", "kv_indices")
        of_graphs = {"use_cuda_graph", *buffers} if self.graphs else set()
        assert given.keys() == {"float_workspace_buffer", "backend"} | of_graphs
        self._buffers: tuple[Tensor, ...] = tuple(given[name] for name in buffers) if self.graphs else ()

    def plan(self, *args: Any, **kwargs: Any) -> None:
        assert not args, "deprecated"
        with DEVICE.host():
            self._plan(bound(LATENT, "plan", args, kwargs))

    def _plan(self, given: dict[str, Any]) -> None:
        need = {"num_heads", "head_dim_ckv", "head_dim_kpe", "page_size", "causal", "sm_scale"}
        assert given.keys() == need | {"metadata", "q_data_type", "kv_data_type", "lse_mode"}, "all are required"
        assert isinstance(given["metadata"], Metadata) and given["lse_mode"] == "base2"
        self._sizes = given["num_heads"], given["head_dim_ckv"], given["head_dim_kpe"]
        self._how, self._page_size = (given["causal"], -1, given["sm_scale"]), given["page_size"]
        self._dtypes = given["q_data_type"], given["kv_data_type"]
        told = given["metadata"]
        rows, pages, lens, listed = told.qo_indptr, told.kv_indptr, told.kv_len_arr, told.kv_indices
        self.check(rows, pages, lens, listed, self._page_size)
        if self.graphs:
            self.kept(self._buffers, (rows, pages, lens), listed)
        else:
            self._buffers = rows, pages, lens, listed
        before, planned = self._planned_backend, Planning()
        workspace = torch.zeros(ROOM, dtype=torch.int32)
        planned._int_workspace_buffer = before._int_workspace_buffer if self.graphs and before else workspace
        packed = int(rows[-1]) * self._sizes[0] // len(lens)
        planned._plan_info = [2 if packed > 64 else 1, 16]
        planned._kv_indices_buf, planned._page_size, planned._causal = listed, self._page_size, self._how[0]
        if self.graphs:
            planned._kv_indices_buf = self._buffers[3]
        self._planned_backend = planned
        pinned = torch.zeros(ROOM, dtype=torch.int32)
        staged(pinned, planned._int_workspace_buffer, [rows, pages, lens], tuple(planned._plan_info))

    def run(self, *args: Any, **kwargs: Any) -> Any:
        assert not args, "deprecated"
        given = bound(LATENT, "run", args, kwargs)
        assert given.keys() == {"query", "kv_cache", "out", "return_lse"} and given["return_lse"]
        planned = self._planned_backend
        assert planned is not None, "plan comes before run"
        q, cells, out = given["query"], given["kv_cache"], given["out"]
        heads, value, behind = self._sizes
        assert q.shape[1:] == (heads, value + behind) and cells.shape[1:] == (self._page_size, value + behind)
        assert out.shape == (q.shape[0], heads, value)
        keys = cells[:, :, None]
        numbers, batch = tuple(planned._plan_info), len(self._buffers[2])
        told = Launch(numbers, planned._int_workspace_buffer, (), planned._kv_indices_buf, batch, *self._how)
        return out, self.launch(told, q, keys, keys[..., :value], out)


class Planning:
    """What `BatchMLAPagedAttentionWrapper` plans with, anew each time."""

    _int_workspace_buffer: Any
    _plan_info: Any
    _kv_indices_buf: Any
    _page_size: Any
    _causal: Any

    def __init__(self) -> None:
        for read in known()["read"]["what MLA plans with"]:
            setattr(self, read, None)


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
    begin, read, send = Lockstep.run, Lockstep.read, Assembler.send

    def begun(self: Lockstep, *given: Any, **named: Any) -> StepInFlight:
        DEVICE.begin()
        try:
            ran = begin(self, *given, **named)
        except BaseException:
            DEVICE.finish()
            raise
        if ran.output is None:
            DEVICE.finish()
        return ran

    def finished(self: Lockstep, ran: StepInFlight) -> StepOutput:
        given = read(self, ran)
        DEVICE.finish()
        return given

    def sent(self: Assembler, *given: Any, **named: Any) -> StagedLists:
        DEVICE.send()
        return send(self, *given, **named)

    for count in ("begun", "read", "sent", "running"):
        set_attribute(DEVICE, count, 0)
    set_attribute(Assembler, "send", sent)
    set_attribute(Lockstep, "run", begun)
    set_attribute(Lockstep, "read", finished)
