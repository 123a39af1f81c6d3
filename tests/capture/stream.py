"""A CUDA stream simulated on a CPU, as strict as CUDA: nothing that a step queues runs before the host waits for it.

Operators and native calls are queued; their outputs hold NaN until they run. During the capture of a graph segment the
calls are recorded and not queued. An error is raised if the host reads a value on the device, reads a tensor that no
copy has brought to the host, or makes its own numbers a part of a captured segment. All programs work in one memory
pool. Each replay begins with NaN in the whole pool, so no replay can use what an earlier one left. The host is one step
ahead of the device.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from cluster.batch import SamplingMode, StepInput
from cluster.capture import recorder
from cluster.capture.cuda_graph import Graph
from cluster.capture.recorder import recorded_by
from cluster.capture.tape import _replay_call, host_value_read
from cluster.config import EngineConfig
from cluster.config.tree_shape import TreeShape
from cluster.device.transfers import HostCopies
from cluster.distributed.mesh import Mesh
from cluster.dp_attention.plan import StepPlan
from cluster.dp_attention.sizes import Buckets
from cluster.engine import build
from cluster.engine.captures import Captures, buckets_of
from cluster.engine.lockstep import Lockstep
from cluster.engine.programs import Programs
from cluster.spec.result import StepOutput

Call = Callable[[], object]


class GpuViolation(AssertionError):
    """The program did something that a GPU cannot do, or for which the host would wait on a GPU."""


class Stream(TorchDispatchMode):
    """The simulated stream: the calls that are queued and have not run. It is also the `Segments` of captured programs,
    the recorder of a step, and the dispatch mode that sees torch's operators.

    `segments` counts captured segments, `launches` their launches, and `waits` how often the host waited in the middle
    of a step. `in_step` is True while the host queues a step.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._queue: deque[Call] = deque()
        self._captured_calls: list[Call] | None = None
        self._pool: list[Tensor] = []
        self._recent_outputs: deque[list[Tensor]] = deque([[]], maxlen=4)
        self.segments = self.launches = self.waits = 0
        self.in_step = False

    def enqueue(self, call: Call) -> None:
        """Queue a call; during the capture of a segment record it."""
        (self._queue if self._captured_calls is None else self._captured_calls).append(call)

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Run queued calls in order, as a device would, until `until()` is true or none is left."""
        if self._captured_calls is not None:
            raise GpuViolation("the host waits while a segment is captured, so nothing of the segment has run")
        with outside_step(self), torch.inference_mode():
            while self._queue and not until():
                self._queue.popleft()()

    def begin_step(self) -> None:
        """Begin a step. Native calls know only addresses, so the stream keeps the outputs of four steps alive."""
        self._recent_outputs.append([])

    # The methods of `cluster.capture.cuda_graph.Segments`.

    def ready(self) -> None:
        self.run()

    def begin(self) -> None:
        assert self._captured_calls is None
        self._captured_calls = []

    def end(self) -> Call:
        assert self._captured_calls is not None
        calls, self._captured_calls = self._captured_calls, None
        self.segments += 1

        def launch() -> None:
            assert self._captured_calls is None, "a segment is launched during a capture"
            self.launches += 1
            self._queue += calls

        return launch

    def drop(self) -> None:
        self._captured_calls = None

    def reserved_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._pool)

    def fill_pool_with_nan(self) -> None:
        """Queue a call that fills the pool with NaN, as if another program had worked in it."""
        pool = list(self._pool)
        self._queue.append(lambda: fill_with_nan(pool))

    # The methods of a recorder and of a dispatch mode.

    def opaque(self, run: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        raise GpuViolation(f"{run} returns a tensor whose shape is unknown before the call has run")

    def native(self, run: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        def call() -> None:
            with recorded_by(None):
                run(*arguments)

        self.enqueue(call)

    def host_call(self, run: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        return recorder.call_on_host(run, arguments)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, schema = kwargs or {}, function._schema
        if read_value := host_value_read(function, args, kwargs):
            raise GpuViolation(f"{schema.name} asks for {read_value}")
        if schema.name in ("aten::lift_fresh", "aten::lift_fresh_copy"):
            if self._captured_calls is not None:
                raise GpuViolation(f"{schema.name}: numbers of the host in a captured segment")
            return args[0]  # a tensor that is made once and kept; `test_host_transfers.py` checks the steps
        if schema.is_mutable:
            self.enqueue(lambda: function(*args, **kwargs))
            return written_arguments(schema, args, kwargs)
        meta = meta_output_of(function, args, kwargs)
        if meta is IS_ALIAS:
            return function(*args, **kwargs)
        real_output = tree_map(self._allocate_output, meta)
        outputs = [leaf for leaf in tree_leaves(real_output) if isinstance(leaf, Tensor)]
        if outputs and not schema.name.startswith(("aten::empty", "aten::new_empty")):
            self.enqueue(_replay_call(function, args, kwargs, outputs))
        return real_output

    def _allocate_output(self, meta: Any) -> Any:
        """Allocate memory for an output, filled with NaN. A value that is not a tensor is returned as it is."""
        if not isinstance(meta, Tensor):
            return meta
        return self.keep_alive(filled_with_nan(torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype)))

    def keep_alive(self, tensor: Tensor) -> Tensor:
        """Keep a tensor for some steps, or with the pool during a capture: on a stream memory is reused only by later
        work. Return the tensor.
        """
        (self._recent_outputs[-1] if self._captured_calls is None else self._pool).append(tensor)
        return tensor


META_ARGUMENTS: list[Tensor] = []
"""The meta tensors that stand in for the arguments of the current operator."""
IS_ALIAS = object()
"""Stands for the output of an operator that returns a view of an argument, or the argument itself."""
KNOWN_META_OUTPUTS: dict[Any, Any] = {}
"""The meta output of each operator that was called before, by operator and `signature_of` its arguments."""


def meta_output_of(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The output of an operator as meta tensors, which have no values; or `IS_ALIAS`."""
    key = function, signature_of(args), signature_of(list(kwargs.items()))
    if key not in KNOWN_META_OUTPUTS:
        output = function(*(to_meta(item) for item in args), **meta_kwargs_of(function._schema, args, kwargs))
        argument_storages = {item.untyped_storage()._cdata for item in META_ARGUMENTS}
        META_ARGUMENTS.clear()
        output_tensors = [item for item in tree_leaves(output) if isinstance(item, Tensor)]
        KNOWN_META_OUTPUTS[key] = (
            IS_ALIAS if any(item.untyped_storage()._cdata in argument_storages for item in output_tensors) else output
        )
    return KNOWN_META_OUTPUTS[key]


def signature_of(value: Any) -> Any:
    """Everything of an argument on which shape and dtype of an operator's output depend."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(signature_of, value))
    return type(value), value


def to_meta(value: Any) -> Any:
    """The argument with meta tensors in place of its tensors; the meta tensors are added to `META_ARGUMENTS`."""
    if isinstance(value, (list, tuple)):
        return type(value)(to_meta(item) for item in value)
    if isinstance(value, torch.device):
        return torch.device("meta")
    if not isinstance(value, Tensor):
        return value
    META_ARGUMENTS.append(torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta"))
    return META_ARGUMENTS[-1]


def meta_kwargs_of(schema: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments with meta tensors. An operator without tensor arguments makes its tensor on "meta" too."""
    meta_kwargs = {name: to_meta(item) for name, item in kwargs.items()}
    is_factory = not any(isinstance(item, Tensor) for item in tree_leaves((args, kwargs)))
    if is_factory and any(argument.name == "device" for argument in schema.arguments):
        meta_kwargs["device"] = torch.device("meta")
    return meta_kwargs


def written_arguments(schema: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of an operator that writes to arguments: it returns these arguments, or None."""
    names = [argument.name for argument in schema.arguments]
    by_name = dict(zip(names, args, strict=False)) | kwargs
    writes = [
        by_name[schema_argument.name]
        for schema_argument in schema.arguments
        if schema_argument.alias_info and schema_argument.alias_info.is_write
    ]
    if not schema.returns:
        return None
    assert len(schema.returns) == len(writes)
    return writes[0] if len(writes) == 1 else tuple(writes)


def filled_with_nan(tensor: Tensor) -> Tensor:
    """Fill a tensor with NaN and return it."""
    fill_with_nan([tensor])
    return tensor


def fill_with_nan(tensors: Sequence[Tensor]) -> None:
    """Fill tensors with NaN, and those of integers with 1."""
    with _disable_current_modes():
        for tensor in tensors:
            tensor.fill_(math.nan if tensor.is_floating_point() else 1)


class StreamGraph(Graph[Any]):
    """A captured program on the simulated stream. Each replay begins with NaN in the pool. Opaque and native calls go
    to the stream.
    """

    def __init__(self, program: Callable[[], Any], stream: Stream) -> None:
        self._stream = stream
        super().__init__(program, stream)

    def opaque(self, run: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        return self._stream.opaque(run, arguments)

    def native(self, run: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._stream.native(run, arguments)

    def replay(self) -> None:
        self._stream.fill_pool_with_nan()
        super().replay()


class StreamPrograms:
    """Stands in for `Programs`: everything that a step sends to the device goes to the stream."""

    def __init__(self, programs: Programs, stream: Stream) -> None:
        self._programs, self._stream = programs, stream
        self.step_modes: list[tuple[SamplingMode, bool]] = []
        """For each step: its mode, and whether it was replayed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._programs, name)

    def run(self, step_input: StepInput, plan: StepPlan, shape: TreeShape) -> StepOutput:
        stream = self._stream
        self.step_modes.append((plan.mode, plan.captured and plan.key in self._programs.captured))
        stream.begin_step()
        waits_before, stream.in_step = stream.waits, True
        try:
            with torch.inference_mode(), recorded_by(stream), stream:
                results = self._programs.run(step_input, plan, shape)
        finally:
            stream.in_step = False
        if SamplingMode.CONSTRAINED not in plan.mode:
            assert stream.waits == waits_before, "the host waited in a step without a grammar"
        return results


def run_engines_on_stream(patch: pytest.MonkeyPatch, buckets: Buckets | None = None) -> Stream:
    """Make engines that are built from now on run as on a GPU with Triton, one step ahead of a new stream; return the
    stream. `buckets` are the sizes of captured programs; None: those of a GPU.
    """
    stream, original = Stream(), build.capture_decoding
    patch_transfers(patch, stream)

    def captures_on_stream(config: EngineConfig, *_: Any) -> Captures:
        program_buckets = buckets or buckets_of(config, torch.device("cuda"), Mesh())
        return Captures(lambda program: StreamGraph(program, stream), program_buckets)

    def capture_decoding_on_stream(lockstep: Lockstep, *arguments: Any) -> Any:
        lockstep.programs, lockstep.max_in_flight = StreamPrograms(lockstep.programs, stream), 1  # type: ignore[assignment]
        return original(lockstep, *arguments)

    patch.setattr(build, "captures_of", captures_on_stream)
    patch.setattr(build, "capture_decoding", capture_decoding_on_stream)
    return stream


def patch_transfers(patch: pytest.MonkeyPatch, stream: Stream) -> None:
    """Make the stream queue all copies between host and device, and forbid all other ways to read a value."""

    class StreamCopies(HostCopies):
        def __init__(self, tensors: Sequence[Tensor]) -> None:
            with _disable_current_modes():
                self._tensors = [filled_with_nan(torch.empty(source.shape, dtype=source.dtype)) for source in tensors]
            for destination, source in zip(self._tensors, tensors, strict=True):
                stream.enqueue(lambda destination=destination, source=source: destination.copy_(source))
            stream.enqueue(lambda: setattr(self, "_came", True))
            self._came = False

        def wait(self) -> list[Tensor]:
            stream.run(lambda: self._came)
            assert self._came
            return self._tensors

    def copy_to_device(numbers: Tensor, device: torch.device) -> Tensor:
        if stream._captured_calls is not None:
            raise GpuViolation("numbers of the host in a captured segment")
        with _disable_current_modes():
            snapshot, destination = numbers.clone(), filled_with_nan(torch.empty_like(numbers))
        stream.enqueue(lambda: destination.copy_(snapshot))
        stream.keep_alive(destination)
        return destination

    def run_host_call(run: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        stream.waits += 1
        with outside_step(stream):
            return original(run, arguments)

    original = recorder.call_on_host
    for module_name in ("cluster.capture.recorder", "cluster.spec.result"):
        patch.setattr(f"{module_name}.HostCopies", StreamCopies)
    for module_name in ("cluster.capture.recorder", "cluster.device.staging"):
        patch.setattr(f"{module_name}.copy_to_device", copy_to_device)
    for module_name in ("cluster.capture.recorder", "cluster.capture.cuda_graph"):
        patch.setattr(f"{module_name}.call_on_host", run_host_call)
    for name in ("from_numpy", "frombuffer"):
        patch.setattr(torch, name, _forbid_in_capture(getattr(torch, name), name, stream))
    for name in ("tolist", "numpy", "cpu", "item", "__bool__", "__int__", "__float__"):
        patch.setattr(torch.Tensor, name, _forbid_in_step(getattr(torch.Tensor, name), name, stream))


@contextmanager
def outside_step(stream: Stream) -> Iterator[None]:
    """Run code in the middle of a step that is not a part of queueing it: work of the device, or work of the host on
    tensors that were copied to the host.
    """
    inside, stream.in_step = stream.in_step, False
    try:
        with _disable_current_modes():
            yield
    finally:
        stream.in_step = inside


def _forbid_in_step(original: Callable[..., Any], name: str, stream: Stream) -> Callable[..., Any]:
    def raise_in_step(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if stream.in_step:
            raise GpuViolation(f"{name} of a tensor in the middle of a step")
        return original(self, *args, **kwargs)

    return raise_in_step


def _forbid_in_capture(original: Callable[..., Any], name: str, stream: Stream) -> Callable[..., Any]:
    def raise_in_capture(*args: Any, **kwargs: Any) -> Any:
        if stream._captured_calls is not None:
            raise GpuViolation(f"{name}: numbers of the host in a captured segment")
        return original(*args, **kwargs)

    return raise_in_capture
