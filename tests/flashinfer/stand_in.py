"""A stand-in for FlashInfer's wrappers, on a CPU and in float64. It checks every call against the recorded signatures.

It follows FlashInfer's documentation and source. A plan comes before a run. The plan is written to a pinned workspace,
which the next plan of the same wrapper overwrites; the device copies it from there when it reaches the copy. Page lists
are not copied: kernels read them in place. A wrapper for graphs has buffers of fixed sizes, which each plan fills. The
numbers of its plan depend only on the numbers of rows and requests; in other wrappers they also depend on the pages.
The stand-in refuses what FlashInfer does not promise for all kernels (requests without tokens, other layouts).
`device.py` has the simulated device that runs the launches.
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
from tests.flashinfer.device import DEVICE, WORKSPACE_SIZE, Launch, copy_on_device, is_capturing, kernel, stage_plan
from tests.flashinfer.signatures import LATENT, METADATA, PREFILL, recorded_signatures, signature

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


def bind_arguments(name: str, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by name. Fail if one of them does not have the type in the signature."""
    expected_signature = SIGNATURES[name, method]
    arguments = expected_signature.bind(*args, **kwargs).arguments
    for argument_name, value in arguments.items():
        type_text = str(expected_signature.parameters[argument_name].annotation)
        assert matches_annotation(value, ast.parse(type_text, mode="eval").body), (
            f"{argument_name} must be {type_text}, and {value!r} was passed"
        )
    return dict(arguments)


def matches_annotation(value: object, annotation: ast.expr) -> bool:
    """Return whether a value has the type that an annotation names."""
    if isinstance(annotation, ast.Subscript):
        inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        match ast.unparse(annotation.value):
            case "Literal":
                return value in [ast.literal_eval(option) for option in inner]
            case "Union" | "Optional" as union_name:
                return (union_name == "Optional" and value is None) or any(
                    matches_annotation(value, option) for option in inner
                )
        return isinstance(value, tuple)
    types = {"torch.Tensor": Tensor, "int": int, "bool": bool, "float": float, "str": str, "torch.dtype": torch.dtype}
    types |= {"object": object, "MLAPlanMetadata": Metadata}
    return isinstance(value, types[ast.unparse(annotation)]) and not (
        ast.unparse(annotation) == "int" and isinstance(value, bool)
    )


def csr(*args: Any, **kwargs: Any) -> "Metadata":
    """Stands in for `MLAPlanMetadata.csr`."""
    assert not args, "the arguments must be passed by name, as their order is easily confused"
    return Metadata(**bind_arguments(METADATA, "csr", args, kwargs))


@dataclass
class Metadata:
    """Stands in for an `MLAPlanMetadata` in CSR form: the page lists and lengths of all requests."""

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_len_arr: Tensor


class Wrapper:
    """Base of both wrappers: what they do with a plan. An instance has every attribute that the real `run` reads, as
    recorded in `signatures.json`. `graphs` is True for a wrapper for CUDA graphs.
    """

    def __init__(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        for attribute in recorded_signatures()["read"][name]:
            setattr(self, attribute, None)
        arguments = bind_arguments(name, "__init__", args, kwargs)
        assert arguments["float_workspace_buffer"].dtype == torch.uint8 and arguments["backend"] in ("fa2", "fa3")
        self._float_workspace_buffer, self._backend = arguments["float_workspace_buffer"], arguments["backend"]
        self.graphs = arguments.get("use_cuda_graph", False)
        self._sizes: tuple[int, ...] = ()
        self._dtypes: tuple[Any, Any] = None, None
        self._attention_options: tuple[bool, int, float] = False, -1, 1.0

    def check_plan(
        self, qo_indptr: Tensor, kv_indptr: Tensor, kv_lens: Tensor, kv_indices: Tensor, page_size: int
    ) -> None:
        """Check what FlashInfer requires of the tensors of a plan."""
        assert {tensor.dtype for tensor in (qo_indptr, kv_indptr, kv_lens, kv_indices)} == INT32
        assert all(
            tensor.dim() == 1 and tensor.is_contiguous() for tensor in (qo_indptr, kv_indptr, kv_lens, kv_indices)
        )
        assert qo_indptr.shape == kv_indptr.shape == (kv_lens.shape[0] + 1,) and kv_lens.shape[0] > 0
        assert not qo_indptr[0] and not kv_indptr[0] and (qo_indptr.diff() > 0).all() and (kv_lens > 0).all()
        assert torch.equal(kv_indptr.diff(), (kv_lens + page_size - 1) // page_size)
        assert kv_indices.shape[0] == kv_indptr[-1], "the page list and the plan have different numbers of pages"

    def fill_graph_buffers(self, buffers: Sequence[Tensor], plan_lists: Sequence[Tensor], page_list: Tensor) -> None:
        """Copy the tensors of a plan into the fixed buffers that graphs read. The page list must be in its buffer."""
        page_list_buffer = buffers[-1]
        assert all(tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in buffers)
        assert page_list.data_ptr() == page_list_buffer.data_ptr() and len(page_list) <= len(page_list_buffer), (
            "the page list must be in its buffer"
        )
        for buffer, tensor in zip(buffers[:-1], plan_lists, strict=True):
            assert buffer.shape == tensor.shape, "the batch of graphs is of one size"
            recorder.native(copy_on_device, buffer, tensor.clone(), len(tensor))

    def launch(self, launch_arguments: Launch, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> Tensor:
        """Queue the kernel on the device; return the tensor of log-sum-exps that the kernel will write."""
        assert self.graphs or not is_capturing(), "a graph launches with a plan that is not made for graphs"
        assert (q.dtype, keys.dtype) == self._dtypes and out.dtype == q.dtype, "the dtypes are not the planned ones"
        DEVICE.repeated += self.graphs
        lse = torch.empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        recorder.native(kernel, launch_arguments, q, keys, values, out, lse)
        return lse


class PagedWrapper(Wrapper):
    """Stands in for `BatchPrefillWithPagedKVCacheWrapper`. All its plans share one pinned workspace."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(PREFILL, args, kwargs)
        arguments = bind_arguments(PREFILL, "__init__", args, kwargs)
        buffers = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_last_page_len_buf", "paged_kv_indices_buf")
        graph_arguments = {"use_cuda_graph", *buffers} if self.graphs else set()
        assert arguments.keys() == {"float_workspace_buffer", "kv_layout", "backend"} | graph_arguments
        assert arguments["kv_layout"] == "NHD"
        with DEVICE.host():
            self._pinned, self._int_workspace_buffer = (
                torch.zeros(WORKSPACE_SIZE, dtype=torch.int32) for _ in range(2)
            )
        self._buffers: tuple[Tensor, ...] = tuple(arguments[name] for name in buffers) if self.graphs else ()
        self._max_rows, self._step_of_last_copy = 0, 0

    def plan(self, *args: Any, **kwargs: Any) -> None:
        with DEVICE.host():
            self._plan(bind_arguments(PREFILL, "plan", args, kwargs))

    def _plan(self, arguments: dict[str, Any]) -> None:
        assert self._step_of_last_copy <= DEVICE.read, (
            "the pinned workspace is written to while its copy may be under way"
        )
        page_size = self._page_size = arguments["page_size"]
        self._sizes = arguments["num_qo_heads"], arguments["num_kv_heads"], arguments["head_dim_qk"]
        scale = arguments.get("sm_scale", self._sizes[2] ** -0.5)
        self._attention_options = arguments.get("causal", False), arguments.get("window_left", -1), scale
        self._dtypes = (
            arguments.get("q_data_type", torch.float16),
            arguments.get("kv_data_type", arguments.get("q_data_type")),
        )
        qo_indptr, kv_indptr, last_page_lens = (
            arguments["qo_indptr"],
            arguments["paged_kv_indptr"],
            arguments["paged_kv_last_page_len"],
        )
        kv_indices = arguments["paged_kv_indices"]
        assert last_page_lens.dtype == torch.int32 and ((last_page_lens >= 1) & (last_page_lens <= page_size)).all()
        kv_lens = ((kv_indptr.diff() - 1) * page_size + last_page_lens).to(torch.int32)
        self.check_plan(qo_indptr, kv_indptr, kv_lens, kv_indices, page_size)
        batch_size, row_count = len(kv_lens), int(qo_indptr[-1])
        self._qo_indptr_last, self._batch_size, self._causal, self._window_left = (
            row_count,
            batch_size,
            *self._attention_options[:2],
        )
        self._max_q_len = arguments["max_token_per_sequence"] or int(qo_indptr.diff().max())
        self._max_kv_len = arguments["max_sequence_kv"] or int(kv_lens.max())
        self._sm_scale, self._num_qo_heads, self._num_kv_heads = scale, *self._sizes[:2]
        work_count = int(kv_indptr[-1])  # work lists are as long as the current step needs
        if self.graphs:
            self._max_rows = work_count = self._max_rows or row_count
            assert len(self._buffers[0]) == batch_size + 1, "the batch of graphs is of one size"
            assert row_count <= self._max_rows
            assert arguments["uniform_q_len"] is None or (qo_indptr.diff() == arguments["uniform_q_len"]).all()
            self.fill_graph_buffers(self._buffers, (qo_indptr, kv_indptr, last_page_lens), kv_indices)
        else:
            self._buffers = qo_indptr, kv_indptr, last_page_lens, kv_indices
        self._qo_indptr_buf, self._paged_kv_indptr_buf, self._paged_kv_last_page_len_buf = self._buffers[:3]
        self._paged_kv_indices_buf = self._buffers[3]
        self._plan_info = [work_count, batch_size, self._sizes[0], 16 * batch_size * work_count]
        self._step_of_last_copy = DEVICE.begun
        stage_plan(self._pinned, self._int_workspace_buffer, [qo_indptr, kv_indptr, kv_lens], tuple(self._plan_info))

    def run(self, *args: Any, **kwargs: Any) -> Any:
        arguments = bind_arguments(PREFILL, "run", args, kwargs)
        assert arguments.keys() == {"q", "paged_kv_cache", "out", "return_lse"} and arguments["return_lse"]
        assert self._plan_info is not None, "plan comes before run"
        q, cache, out = arguments["q"], arguments["paged_kv_cache"], arguments["out"]
        heads, kv_heads, head_size = self._sizes
        assert q.shape[1:] == (heads, head_size) and q.stride(2) == 1 and out.shape == q.shape
        assert cache.shape[1:] == (2, self._page_size, kv_heads, head_size) and cache.stride(4) == 1, "wrong layout"
        keys, values = cache.unbind(1)
        assert keys.stride() == values.stride(), "keys and values must have the same strides"
        launch_numbers, workspace = tuple(self._plan_info), self._int_workspace_buffer
        launch_arguments = Launch(
            launch_numbers, workspace, self._buffers[:3], self._buffers[3], self._batch_size, *self._attention_options
        )
        return out, self.launch(launch_arguments, q, keys, values, out)


class LatentWrapper(Wrapper):
    """Stands in for `BatchMLAPagedAttentionWrapper`. Each plan has its own pinned memory, which torch keeps until it is
    copied.
    """

    _planned_backend: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(LATENT, args, kwargs)
        arguments = bind_arguments(LATENT, "__init__", args, kwargs)
        buffers = ("qo_indptr", "kv_indptr", "kv_len_arr", "kv_indices")
        graph_arguments = {"use_cuda_graph", *buffers} if self.graphs else set()
        assert arguments.keys() == {"float_workspace_buffer", "backend"} | graph_arguments
        self._buffers: tuple[Tensor, ...] = tuple(arguments[name] for name in buffers) if self.graphs else ()

    def plan(self, *args: Any, **kwargs: Any) -> None:
        assert not args, "positional arguments are deprecated"
        with DEVICE.host():
            self._plan(bind_arguments(LATENT, "plan", args, kwargs))

    def _plan(self, arguments: dict[str, Any]) -> None:
        required_names = {"num_heads", "head_dim_ckv", "head_dim_kpe", "page_size", "causal", "sm_scale"}
        assert arguments.keys() == required_names | {"metadata", "q_data_type", "kv_data_type", "lse_mode"}, (
            "an argument is missing"
        )
        assert isinstance(arguments["metadata"], Metadata) and arguments["lse_mode"] == "base2"
        self._sizes = arguments["num_heads"], arguments["head_dim_ckv"], arguments["head_dim_kpe"]
        self._attention_options, self._page_size = (
            (arguments["causal"], -1, arguments["sm_scale"]),
            arguments["page_size"],
        )
        self._dtypes = arguments["q_data_type"], arguments["kv_data_type"]
        metadata = arguments["metadata"]
        qo_indptr, kv_indptr, kv_lens, kv_indices = (
            metadata.qo_indptr,
            metadata.kv_indptr,
            metadata.kv_len_arr,
            metadata.kv_indices,
        )
        self.check_plan(qo_indptr, kv_indptr, kv_lens, kv_indices, self._page_size)
        if self.graphs:
            self.fill_graph_buffers(self._buffers, (qo_indptr, kv_indptr, kv_lens), kv_indices)
        else:
            self._buffers = qo_indptr, kv_indptr, kv_lens, kv_indices
        previous, plan_state = self._planned_backend, MlaPlanState()
        workspace = torch.zeros(WORKSPACE_SIZE, dtype=torch.int32)
        plan_state._int_workspace_buffer = previous._int_workspace_buffer if self.graphs and previous else workspace
        packed_rows = int(qo_indptr[-1]) * self._sizes[0] // len(kv_lens)
        plan_state._plan_info = [2 if packed_rows > 64 else 1, 16]
        plan_state._kv_indices_buf, plan_state._page_size, plan_state._causal = (
            kv_indices,
            self._page_size,
            self._attention_options[0],
        )
        if self.graphs:
            plan_state._kv_indices_buf = self._buffers[3]
        self._planned_backend = plan_state
        pinned = torch.zeros(WORKSPACE_SIZE, dtype=torch.int32)
        stage_plan(
            pinned, plan_state._int_workspace_buffer, [qo_indptr, kv_indptr, kv_lens], tuple(plan_state._plan_info)
        )

    def run(self, *args: Any, **kwargs: Any) -> Any:
        assert not args, "positional arguments are deprecated"
        arguments = bind_arguments(LATENT, "run", args, kwargs)
        assert arguments.keys() == {"query", "kv_cache", "out", "return_lse"} and arguments["return_lse"]
        plan_state = self._planned_backend
        assert plan_state is not None, "plan comes before run"
        q, latent_cells, out = arguments["query"], arguments["kv_cache"], arguments["out"]
        heads, value_size, rope_size = self._sizes
        assert q.shape[1:] == (heads, value_size + rope_size) and latent_cells.shape[1:] == (
            self._page_size,
            value_size + rope_size,
        )
        assert out.shape == (q.shape[0], heads, value_size)
        keys = latent_cells[:, :, None]
        launch_numbers, batch_size = tuple(plan_state._plan_info), len(self._buffers[2])
        launch_arguments = Launch(
            launch_numbers,
            plan_state._int_workspace_buffer,
            (),
            plan_state._kv_indices_buf,
            batch_size,
            *self._attention_options,
        )
        return out, self.launch(launch_arguments, q, keys, keys[..., :value_size], out)


class MlaPlanState:
    """The backend object of `BatchMLAPagedAttentionWrapper`, which is new after each plan. It has every attribute that
    FlashInfer reads of it at a launch, as recorded in `signatures.json`.
    """

    _int_workspace_buffer: Any
    _plan_info: Any
    _kv_indices_buf: Any
    _page_size: Any
    _causal: Any

    def __init__(self) -> None:
        for attribute in recorded_signatures()["read"]["what MLA plans with"]:
            setattr(self, attribute, None)


class AnySize(frozenset[Any]):
    """A set that contains every size: the models of the tests have smaller heads than FlashInfer supports."""

    def __contains__(self, size: object) -> bool:
        return True


def stand_in(all_head_sizes: bool = True) -> FlashInfer:
    """Return the stand-in. It accepts all head sizes, or with `all_head_sizes=False` only those of FlashInfer."""
    if not all_head_sizes:
        return FlashInfer(PagedWrapper, LatentWrapper, csr, "fa3")
    return FlashInfer(PagedWrapper, LatentWrapper, csr, "fa3", AnySize(), AnySize())


def install_stand_in(set_attribute: Callable[[object, str, Any], None], all_head_sizes: bool = True) -> None:
    """Make engines on a CPU use the stand-in as FlashInfer. Count in `DEVICE` when the engine begins, sends and reads a
    step.
    """
    set_attribute(flashinfer_library, "find", lambda device, dtype: stand_in(all_head_sizes))
    original_run, original_read, original_send = Lockstep.run, Lockstep.read, Assembler.send

    def run_and_count(self: Lockstep, *args: Any, **kwargs: Any) -> StepInFlight:
        DEVICE.begin()
        try:
            step_in_flight = original_run(self, *args, **kwargs)
        except BaseException:
            DEVICE.finish()
            raise
        if step_in_flight.output is None:
            DEVICE.finish()
        return step_in_flight

    def read_and_count(self: Lockstep, step_in_flight: StepInFlight) -> StepOutput:
        step_output = original_read(self, step_in_flight)
        DEVICE.finish()
        return step_output

    def send_and_count(self: Assembler, *args: Any, **kwargs: Any) -> StagedLists:
        DEVICE.send()
        return original_send(self, *args, **kwargs)

    for counter in ("begun", "read", "sent", "running"):
        set_attribute(DEVICE, counter, 0)
    set_attribute(Assembler, "send", send_and_count)
    set_attribute(Lockstep, "run", run_and_count)
    set_attribute(Lockstep, "read", read_and_count)
