"""A stream of a GPU on a CPU, as unkind as CUDA is: whatever a step is told to do waits until an event is waited for.

Operators and native calls are queued, and their outputs hold NaN until then. While a segment of a graph is captured
nothing is queued at all, only noted. Who asks for a number, reads a tensor that did not land by a copy, or makes
numbers of the host's part of a captured segment, is caught. All programs work in one pool of memory: each replay begins
with NaN in all of it, so nothing of an earlier one may be needed. The host is a step ahead.
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


class Unkind(AssertionError):
    """What a GPU would not have done, or would have waited for."""


class Stream(TorchDispatchMode):
    """What is queued and not done yet. `waits` counts how often the host waited in the midst of a step."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._queue: deque[Call] = deque()
        self._noted: list[Call] | None = None
        self._pool: list[Tensor] = []
        self._alive: deque[list[Tensor]] = deque([[]], maxlen=4)
        self.segments = self.launches = self.waits = 0
        self.inside = False

    def queue(self, call: Call) -> None:
        """Queue a call, or note it where a segment is captured."""
        (self._queue if self._noted is None else self._noted).append(call)

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Do what was queued, in order, as the device would meanwhile."""
        if self._noted is not None:
            raise Unkind("the host waits while a segment is captured, and nothing of it has run")
        with unwatched(self), torch.inference_mode():
            while self._queue and not until():
                self._queue.popleft()()

    def step(self) -> None:
        """A step is told from here on. Native calls know places alone: what they read is kept for some steps."""
        self._alive.append([])

    # what notes: `cluster.capture.cuda_graph.Segments`

    def ready(self) -> None:
        self.run()

    def begin(self) -> None:
        assert self._noted is None
        self._noted = []

    def end(self) -> Call:
        assert self._noted is not None
        noted, self._noted = self._noted, None
        self.segments += 1

        def launch() -> None:
            assert self._noted is None, "a launch is no part of a capture"
            self.launches += 1
            self._queue += noted

        return launch

    def drop(self) -> None:
        self._noted = None

    def reserved_bytes(self) -> int:
        return sum(one.untyped_storage().nbytes() for one in self._pool)

    def poison(self) -> None:
        """Another program may have worked in the pool."""
        pool = list(self._pool)
        self._queue.append(lambda: spoil(pool))

    # what is told: a recorder, and a mode

    def opaque(self, run: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        raise Unkind(f"{run} gives a tensor of a shape that nobody knows before it has run")

    def native(self, run: Callable[..., None], given: tuple[Any, ...]) -> None:
        def call() -> None:
            with recorded_by(None):
                run(*given)

        self.queue(call)

    def host_call(self, run: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        return recorder.call_on_host(run, given)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, schema = kwargs or {}, function._schema
        if what := host_value_read(function, args, kwargs):
            raise Unkind(f"{schema.name} asks for {what}")
        if schema.name in ("aten::lift_fresh", "aten::lift_fresh_copy"):
            if self._noted is not None:
                raise Unkind(f"{schema.name}: numbers of the host in a captured segment")
            return args[0]  # what is made once and kept; `test_host.py` has an eye on steps
        if schema.is_mutable:
            self.queue(lambda: function(*args, **kwargs))
            return written(schema, args, kwargs)
        meta = outcome(function, args, kwargs)
        if meta is ALIAS:
            return function(*args, **kwargs)
        real = tree_map(self._place, meta)
        outputs = [one for one in tree_leaves(real) if isinstance(one, Tensor)]
        if outputs and not schema.name.startswith(("aten::empty", "aten::new_empty")):
            self.queue(_replay_call(function, args, kwargs, outputs))
        return real

    def _place(self, meta: Any) -> Any:
        """Memory for an output, which nothing useful is in."""
        if not isinstance(meta, Tensor):
            return meta
        return self.keep(spoilt(torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype)))

    def keep(self, made: Tensor) -> Tensor:
        """Memory is given to others in the order of the stream."""
        (self._alive[-1] if self._noted is None else self._pool).append(made)
        return made


META: list[Tensor] = []
"""Stand-ins of the arguments of the operator at hand."""
ALIAS = object()
"""The outcome of an operator that gives a view, or the very tensor."""
OUTCOMES: dict[Any, Any] = {}
"""What came of each operator before, by the `traits` of its arguments."""


def outcome(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operator returns, without numbers; or ALIAS."""
    key = function, traits(args), traits(list(kwargs.items()))
    if key not in OUTCOMES:
        meta = function(*(of_meta(one) for one in args), **told(function._schema, args, kwargs))
        ours = {one.untyped_storage()._cdata for one in META}
        META.clear()
        made = [one for one in tree_leaves(meta) if isinstance(one, Tensor)]
        OUTCOMES[key] = ALIAS if any(one.untyped_storage()._cdata in ours for one in made) else meta
    return OUTCOMES[key]


def traits(given: Any) -> Any:
    """All of an argument that the outcome's form depends on."""
    if isinstance(given, Tensor):
        return given.shape, given.stride(), given.dtype
    if isinstance(given, (list, tuple)):
        return tuple(map(traits, given))
    return type(given), given


def of_meta(given: Any) -> Any:
    """Arguments without numbers."""
    if isinstance(given, (list, tuple)):
        return type(given)(of_meta(one) for one in given)
    if isinstance(given, torch.device):
        return torch.device("meta")
    if not isinstance(given, Tensor):
        return given
    META.append(torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="meta"))
    return META[-1]


def told(schema: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name without numbers; what a factory makes has none either."""
    given = {name: of_meta(one) for name, one in kwargs.items()}
    factory = not any(isinstance(one, Tensor) for one in tree_leaves((args, kwargs)))
    if factory and any(argument.name == "device" for argument in schema.arguments):
        given["device"] = torch.device("meta")
    return given


def written(schema: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operator returns that writes to its arguments: these."""
    names = [argument.name for argument in schema.arguments]
    by_name = dict(zip(names, args, strict=False)) | kwargs
    writes = [by_name[one.name] for one in schema.arguments if one.alias_info and one.alias_info.is_write]
    if not schema.returns:
        return None
    assert len(schema.returns) == len(writes)
    return writes[0] if len(writes) == 1 else tuple(writes)


def spoilt(tensor: Tensor) -> Tensor:
    """The same with nothing useful in it."""
    spoil([tensor])
    return tensor


def spoil(tensors: Sequence[Tensor]) -> None:
    """Leave nothing useful in them."""
    with _disable_current_modes():
        for one in tensors:
            one.fill_(math.nan if one.is_floating_point() else 1)


class StreamGraph(Graph[Any]):
    """A graph whose replay finds nothing in the pool; the host's own call is none of the device's."""

    def __init__(self, program: Callable[[], Any], stream: Stream) -> None:
        self._stream = stream
        super().__init__(program, stream)

    def opaque(self, run: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        return self._stream.opaque(run, given)

    def native(self, run: Callable[..., None], given: tuple[Any, ...]) -> None:
        self._stream.native(run, given)

    def replay(self) -> None:
        self._stream.poison()
        super().replay()


class OnStream:
    """Stands for `Programs`: all that they tell the device goes to the stream."""

    def __init__(self, programs: Programs, stream: Stream) -> None:
        self._programs, self._stream = programs, stream
        self.modes: list[tuple[SamplingMode, bool]] = []
        """Of each step its mode, and whether it was replayed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._programs, name)

    def run(self, order: StepInput, plan: StepPlan, shape: TreeShape) -> StepOutput:
        stream = self._stream
        self.modes.append((plan.mode, plan.captured and plan.key in self._programs.captured))
        stream.step()
        waited, stream.inside = stream.waits, True
        try:
            with torch.inference_mode(), recorded_by(stream), stream:
                results = self._programs.run(order, plan, shape)
        finally:
            stream.inside = False
        if SamplingMode.CONSTRAINED not in plan.mode:
            assert stream.waits == waited, "the host waits in a step without a grammar"
        return results


def on_stream(patch: pytest.MonkeyPatch, buckets: Buckets | None = None) -> Stream:
    """Have engines built from now on run as on a GPU with Triton, on this stream, a step ahead of it."""
    stream, true = Stream(), build.capture_decoding
    cross(patch, stream)

    def graphs(config: EngineConfig, *_: Any) -> Captures:
        of = buckets or buckets_of(config, torch.device("cuda"), Mesh())
        return Captures(lambda program: StreamGraph(program, stream), of)

    def decoding(lockstep: Lockstep, *given: Any) -> Any:
        lockstep.programs, lockstep.max_in_flight = OnStream(lockstep.programs, stream), 1  # type: ignore[assignment]
        return true(lockstep, *given)

    patch.setattr(build, "captures_of", graphs)
    patch.setattr(build, "capture_decoding", decoding)
    return stream


def cross(patch: pytest.MonkeyPatch, stream: Stream) -> None:
    """Copies between host and device are queued, and there is no other way to a number."""

    class Landed(HostCopies):
        def __init__(self, tensors: Sequence[Tensor]) -> None:
            with _disable_current_modes():
                self._tensors = [spoilt(torch.empty(one.shape, dtype=one.dtype)) for one in tensors]
            for there, one in zip(self._tensors, tensors, strict=True):
                stream.queue(lambda there=there, one=one: there.copy_(one))
            stream.queue(lambda: setattr(self, "_came", True))
            self._came = False

        def wait(self) -> list[Tensor]:
            stream.run(lambda: self._came)
            assert self._came
            return self._tensors

    def copy_to_device(numbers: Tensor, device: torch.device) -> Tensor:
        if stream._noted is not None:
            raise Unkind("numbers of the host in a captured segment")
        with _disable_current_modes():
            kept, there = numbers.clone(), spoilt(torch.empty_like(numbers))
        stream.queue(lambda: there.copy_(kept))
        stream.keep(there)
        return there

    def answered(run: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        stream.waits += 1
        with unwatched(stream):
            return true(run, given)

    true = recorder.call_on_host
    for place in ("cluster.capture.recorder", "cluster.spec.result"):
        patch.setattr(f"{place}.HostCopies", Landed)
    for place in ("cluster.capture.recorder", "cluster.device.staging"):
        patch.setattr(f"{place}.copy_to_device", copy_to_device)
    for place in ("cluster.capture.recorder", "cluster.capture.cuda_graph"):
        patch.setattr(f"{place}.call_on_host", answered)
    for name in ("from_numpy", "frombuffer"):
        patch.setattr(torch, name, _outside(getattr(torch, name), name, stream))
    for name in ("tolist", "numpy", "cpu", "item", "__bool__", "__int__", "__float__"):
        patch.setattr(torch.Tensor, name, _watched(getattr(torch.Tensor, name), name, stream))


@contextmanager
def unwatched(stream: Stream) -> Iterator[None]:
    """What is no telling of a step, amid one: the device's work, and the host's own on tensors that have landed."""
    inside, stream.inside = stream.inside, False
    try:
        with _disable_current_modes():
            yield
    finally:
        stream.inside = inside


def _watched(true: Callable[..., Any], name: str, stream: Stream) -> Callable[..., Any]:
    def watched(self: Tensor, *given: Any, **more: Any) -> Any:
        if stream.inside:
            raise Unkind(f"{name} of a tensor amid a step")
        return true(self, *given, **more)

    return watched


def _outside(true: Callable[..., Any], name: str, stream: Stream) -> Callable[..., Any]:
    def outside(*given: Any, **more: Any) -> Any:
        if stream._noted is not None:
            raise Unkind(f"{name}: numbers of the host in a captured segment")
        return true(*given, **more)

    return outside
