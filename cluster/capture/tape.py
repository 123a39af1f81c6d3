"""A tape: the calls of a program on a CPU, recorded once and replayed on the same buffers.

It is the CPU's counterpart of a CUDA graph, and stands for one in tests. Each replay makes the same calls on the same
memory; between the calls, it does not branch, and reads no value on the host. The caller copies new inputs into the old
input tensors before each replay.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import groupby
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from cluster.capture.buffers import Buffers
from cluster.capture.recorder import CaptureError, recorded_by, unrecorded
from cluster.capture.tensors import map_tensors, tensors_in

T = TypeVar("T")


Substitute = Callable[
    [OpOverload, Sequence[Any], Mapping[str, Any], Sequence[Tensor]], Sequence[Callable[[], object]] | None
]
"""(operator, args, kwargs, outputs) -> calls that fill the same outputs faster, or None if the operator itself is to be
replayed.
"""


class Tape(Generic[T]):
    """A program captured on a CPU."""

    def __init__(
        self, program: Callable[[], T], buffers: Buffers | None = None, substitute: Substitute | None = None
    ) -> None:
        """Run `program` and record it. Its tensors lie in `buffers`, which other tapes may share; None: in buffers of
        its own. Where `substitute` returns calls for an operator, a replay makes these calls instead.

        Raises:
            CaptureError: the program reads a device value on the host, or makes a tensor from host values.
        """
        program_buffers = Buffers() if buffers is None else buffers
        bytes_before, recorder = program_buffers.bytes, _Recorder(program_buffers, substitute)
        with torch.inference_mode(), recorded_by(recorder), recorder:
            self.output: T = program()
        self._calls, self.buffers, self._bytes = (
            join_calls(recorder.calls),
            recorder.used,
            program_buffers.bytes - bytes_before,
        )
        self._keep_alive = recorder.keep_alive

    @property
    def bytes(self) -> int:
        """How many bytes this tape added to the buffers that all tapes share."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._calls)

    def replay(self) -> None:
        """Make the recorded calls again, in order."""
        with torch.inference_mode():
            for call in self._calls:
                call()


def join_calls(calls: Sequence[Callable[[], object]]) -> list[Callable[[], object]]:
    """Return `calls` with neighbouring calls of C kernels joined into one call. The functions of C kernels have an
    attribute `joins`: the function that joins such calls.
    """
    joined_calls: list[Callable[[], object]] = []
    for joins, group in groupby(calls, lambda call: getattr(getattr(call, "func", None), "joins", None)):
        neighbours = list(group)
        joined_calls += neighbours if joins is None else [joins(neighbours)]
    return joined_calls


# Operators that must read values of tensors on the host, often to know the shape of their output, and what they read.
HOST_READS = {
    "aten::_local_scalar_dense": "a value",
    "aten::item": "a value",
    "aten::is_nonzero": "a value",
    "aten::equal": "a value",
    "aten::nonzero": "a count",
    "aten::masked_select": "a count",
    "aten::_unique2": "a count",
    "aten::unique_consecutive": "a count",
    "aten::bincount": "the largest value",
}


ALLOCATIONS = {"aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided"}
"""Operators that only allocate. They are not recorded."""


def host_value_read(function: OpOverload, args: Any, kwargs: Any) -> str | None:
    """Return a text, such as "a count", that says which value of a tensor the operator must read on the host. Return
    None if it reads none.
    """
    name: str = function._schema.name
    if name == "aten::index" and any(isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]):
        return "a count"
    if name == "aten::repeat_interleave" and kwargs.get("output_size") is None:
        return "a sum" if any(isinstance(arg, Tensor) for arg in args[1:] or args) else None
    return HOST_READS.get(name)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records each operator that computes something. `used` are the buffers of the program's tensors. `keep_alive` has
    tensors that must stay alive, because substituted calls use them by raw address.
    """

    def __init__(self, buffers: Buffers, substitute: Substitute | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Callable[[], object]] = []
        self.keep_alive: list[Any] = []
        self._substitute = substitute
        self._buffers, self._used = buffers, dict[int, Tensor]()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch not to disable its compiler around each operator that is recorded: a step is never compiled. To
        disable it would import the compiler at the first capture, which takes more than three seconds.
        """
        return False

    @property
    def used(self) -> list[Tensor]:
        """The buffers that the program's tensors lay in, each once."""
        return list(self._used.values())

    def opaque(self, run: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Make and record one call, whose output is copied into a buffer."""
        with unrecorded():
            return self._record_call(run, run(*arguments), arguments)

    def native(self, run: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Make and record one call."""
        with unrecorded():
            run(*arguments)
            self.calls.append(partial(run, *self._unowned(arguments)))

    def host_call(self, run: Callable[..., Tensor | None], arguments: tuple[Any, ...]) -> Tensor | None:
        """Make and record one call. On a CPU the arguments are in host memory already, so they are not copied."""
        with unrecorded():
            output = run(*arguments)
            if output is not None:
                return self._record_call(run, output, arguments)
            self.calls.append(partial(run, *self._unowned(arguments)))
        return None

    def __torch_dispatch__(self, function: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function._schema.name
        if name in ("aten::lift_fresh", "aten::lift_fresh_copy"):
            raise CaptureError(f"{name}: a program takes no numbers from the host; they belong to its inputs")
        if host_value := host_value_read(function, args, kwargs):
            raise CaptureError(f"{name}: a program must not ask for {host_value}")
        result = function(*args, **kwargs)
        # An output in the storage of an argument is a view or an in-place result: it needs no buffer of its own.
        argument_storages = {_storage(tensor) for tensor in tensors_in((args, kwargs))}
        if not function._schema.is_mutable:
            result = map_tensors(
                lambda tensor: tensor if _storage(tensor) in argument_storages else self._buffered_copy(tensor),
                result,
            )
        outputs = list(tensors_in(result))
        # Pure views and allocations are not recorded: the recorded calls already hold the resulting addresses. Neither
        # are operators that write no number.
        mutates, written = function._schema.is_mutable, [output for output in outputs if output.numel()]
        computed = any(_storage(output) not in argument_storages for output in written)
        if name not in ALLOCATIONS and ((mutates and (written or not outputs)) or computed):
            args, kwargs, outputs = self._unowned((args, kwargs, outputs))
            substitute_calls = None if self._substitute is None else self._substitute(function, args, kwargs, outputs)
            if substitute_calls is not None:
                self.keep_alive.append((args, outputs))
                self.calls += substitute_calls
            elif function._schema.is_mutable:
                self.calls.append(lambda: function(*args, **kwargs))
            else:
                self.calls.append(_replay_call(function, args, kwargs, outputs))
        return result

    def _record_call(self, run: Callable[..., Any], first_result: Tensor, arguments: tuple[Any, ...]) -> Tensor:
        """Return a copy of `first_result`, the result of `run(*arguments)`, in a buffer. Record a call that runs `run`
        again and writes the new result to that buffer.
        """
        buffered = self._buffered_copy(first_result)
        unowned_arguments, unowned_output = self._unowned(arguments), self._buffers.unowned_view(buffered)
        self.calls.append(lambda: unowned_output.copy_(run(*unowned_arguments)))
        return buffered

    def _buffered_copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of `tensor` in a buffer."""
        if not tensor.numel():
            return tensor
        copy, buffer = self._buffers.lend(tensor)
        self._used[buffer.data_ptr()] = buffer
        return copy.copy_(tensor)

    def _unowned(self, tree: T) -> T:
        """Return `tree` with each tensor replaced by its `Buffers.unowned_view`, so that recorded calls do not keep
        buffers lent.
        """
        unowned: T = map_tensors(self._buffers.unowned_view, tree)
        return unowned


def _storage(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def _replay_call(function: OpOverload, args: Any, kwargs: Any, outputs: list[Tensor]) -> Callable[[], object]:
    """Return a call that computes `outputs` again. It uses the operator's `out=` variant. If there is none, it calls
    the operator and copies its results.
    """
    out_variant = _out_variant(function)
    if out_variant is not None:
        variant, out_names = out_variant
        allowed = {argument.name for argument in variant._schema.arguments}
        allowed_kwargs = {key: value for key, value in kwargs.items() if key in allowed}
        return lambda: variant(*args, **allowed_kwargs, **dict(zip(out_names, outputs, strict=True)))

    if len(function._schema.returns) == 1 and len(outputs) == 1:
        single_output = outputs[0]
        return lambda: single_output.copy_(function(*args, **kwargs))

    def copy_outputs() -> None:
        for output, new_output in zip(outputs, tensors_in(function(*args, **kwargs)), strict=True):
            output.copy_(new_output)

    return copy_outputs


# Arguments of factory functions that their `out=` variants lack: the output tensor determines them.
FACTORY_ARGUMENTS = {"dtype", "layout", "device", "pin_memory"}


@cache
def _out_variant(function: OpOverload) -> tuple[OpOverload, list[str]] | None:
    """Return the `out=` variant of an operator and the names of its output arguments; None if it has none."""
    namespace, _, name = function._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name)

    def argument_types(operator: OpOverload, excluded: set[str]) -> list[tuple[str, str]]:
        return [
            (schema_argument.name, str(schema_argument.type))
            for schema_argument in operator._schema.arguments
            if schema_argument.name not in excluded
        ]

    for overload in packet.overloads():
        variant = getattr(packet, overload)
        written = [argument.name for argument in variant._schema.arguments if argument.is_out]
        if len(written) != len(function._schema.returns):
            continue
        if argument_types(variant, set(written)) == argument_types(function, FACTORY_ARGUMENTS):
            return variant, written
    return None
