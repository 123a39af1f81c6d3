"""A tape: the calls of a program on a CPU, recorded once and replayed on the same buffers.

It is the CPU's counterpart of a CUDA graph, and its reference in tests: a replay reads and writes fixed memory, does
not branch, and reads no value on the host. The caller copies new inputs into the old input tensors before each replay.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from cluster.capture.buffers import Buffers
from cluster.capture.recorder import CaptureError, recorded_by, unrecorded

T = TypeVar("T")


Substitute = Callable[
    [OpOverload, Sequence[Any], Mapping[str, Any], Sequence[Tensor]], Sequence[Callable[[], object]] | None
]
"""(operator, args, kwargs, outputs) -> faster calls that fill the same outputs; None: replay the operator itself."""


class Tape(Generic[T]):
    """A program captured on a CPU."""

    def __init__(
        self, program: Callable[[], T], buffers: Buffers | None = None, substitute: Substitute | None = None
    ) -> None:
        """Run `program` and record it. Its tensors lie in `buffers`, which other tapes may share. Where `substitute`
        returns calls for an operator, a replay makes these instead.

        Raises:
            CaptureError: the program reads a device value on the host, or makes a tensor from host values.
        """
        lender = Buffers() if buffers is None else buffers
        before, recorder = lender.bytes, _Recorder(lender, substitute)
        with torch.inference_mode(), recorded_by(recorder), recorder:
            self.output: T = program()
        self._calls, self.buffers, self._bytes = joined(recorder.calls), recorder.used, lender.bytes - before
        self._held = recorder.held

    @property
    def bytes(self) -> int:
        """The memory that this tape added to the buffers that all tapes share."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._calls)

    def replay(self) -> None:
        """Make the recorded calls again, in order."""
        with torch.inference_mode():
            for call in self._calls:
                call()


def joined(calls: Sequence[Callable[[], object]]) -> list[Callable[[], object]]:
    """Merge neighbouring calls of C kernels into one call each, by the attribute `joins` of their functions."""
    found: list[Callable[[], object]] = []
    for joins, group in groupby(calls, lambda call: getattr(getattr(call, "func", None), "joins", None)):
        some = list(group)
        found += some if joins is None else [joins(some)]
    return found


# Operators that need tensor values on the host, often for the shape of their output; each with what it needs.
ASKING = {
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


MEMORY = {"aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided"}
"""Operators that only allocate. They are not recorded."""


def asks(function: OpOverload, args: Any, kwargs: Any) -> str | None:
    """Return what an operator must read of the tensors' values on the host; None if nothing."""
    name: str = function._schema.name
    if name == "aten::index" and any(isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]):
        return "a count"
    if name == "aten::repeat_interleave" and kwargs.get("output_size") is None:
        return "a sum" if any(isinstance(arg, Tensor) for arg in args[1:] or args) else None
    return ASKING.get(name)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records each operator that computes something. `used`: the buffers of the program's tensors. `held`: tensors that
    substituted calls use by raw address, which must stay alive.
    """

    def __init__(self, buffers: Buffers, substitute: Substitute | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Callable[[], object]] = []
        self.held: list[Any] = []
        self._substitute = substitute
        self._buffers, self._used = buffers, dict[int, Tensor]()

    @property
    def used(self) -> list[Tensor]:
        """The buffers that the program's tensors lay in, each once."""
        return list(self._used.values())

    def opaque(self, run: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        """Record one call, whose output is copied into a buffer."""
        with unrecorded():
            return self._answered(run, run(*given), given)

    def native(self, run: Callable[..., None], given: tuple[Any, ...]) -> None:
        """Record one call."""
        with unrecorded():
            run(*given)
            self.calls.append(partial(run, *self._lasting(given)))

    def hosted(self, run: Callable[..., Tensor | None], given: tuple[Any, ...]) -> Tensor | None:
        """Record one call. On a CPU the device's memory is the host's, so nothing is copied to the host."""
        with unrecorded():
            made = run(*given)
            if made is not None:
                return self._answered(run, made, given)
            self.calls.append(partial(run, *self._lasting(given)))
        return None

    def __torch_dispatch__(self, function: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function._schema.name
        if name in ("aten::lift_fresh", "aten::lift_fresh_copy"):
            raise CaptureError(f"{name}: a program takes no numbers from the host; they belong to its inputs")
        if what := asks(function, args, kwargs):
            raise CaptureError(f"{name}: a program must not ask for {what}")
        result = function(*args, **kwargs)
        # An output in the storage of an argument is a view or an in-place result: it needs no buffer of its own.
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        if not function._schema.is_mutable:
            result = tree_map_only(Tensor, lambda one: one if _storage(one) in given else self._lent(one), result)
        outputs = [output for output in tree_leaves(result) if isinstance(output, Tensor)]
        # Pure views and allocations are not recorded: the recorded calls already hold the resulting addresses.
        computed = any(output.numel() and _storage(output) not in given for output in outputs)
        if name not in MEMORY and (function._schema.is_mutable or computed):
            args, kwargs, outputs = self._lasting((args, kwargs, outputs))
            faster = None if self._substitute is None else self._substitute(function, args, kwargs, outputs)
            if faster is not None:
                self.held.append((args, outputs))
                self.calls += faster
            elif function._schema.is_mutable:
                self.calls.append(lambda: function(*args, **kwargs))
            else:
                self.calls.append(_replayed(function, args, kwargs, outputs))
        return result

    def _answered(self, run: Callable[..., Any], answer: Tensor, given: tuple[Any, ...]) -> Tensor:
        """Return `answer`, the result of `run(*given)`, in a buffer; every replay fills it with a new result."""
        made = self._lent(answer)
        held, lasting = self._lasting(given), self._buffers.lasting(made)
        self.calls.append(lambda: lasting.copy_(run(*held)))
        return made

    def _lent(self, made: Tensor) -> Tensor:
        """Return a copy of `made` in a buffer."""
        if not made.numel():
            return made
        lent, buffer = self._buffers.lend(made)
        self._used[buffer.data_ptr()] = buffer
        return lent.copy_(made)

    def _lasting(self, given: T) -> T:
        """Replace all tensors by those of `Buffers.lasting`: recorded calls must not keep buffers lent."""
        lasting: T = tree_map_only(Tensor, self._buffers.lasting, given)
        return lasting


def _storage(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def _replayed(function: OpOverload, args: Any, kwargs: Any, outputs: list[Tensor]) -> Callable[[], object]:
    """Return a call that recomputes `outputs`: by the operator's `out=` variant, or by a copy where it has none."""
    into = _into(function)
    if into is not None:
        variant, names = into
        allowed = {argument.name for argument in variant._schema.arguments}
        given = {key: value for key, value in kwargs.items() if key in allowed}
        return lambda: variant(*args, **given, **dict(zip(names, outputs, strict=True)))

    if len(function._schema.returns) == 1 and len(outputs) == 1:
        only = outputs[0]
        return lambda: only.copy_(function(*args, **kwargs))

    def copied() -> None:
        for output, again in zip(outputs, tree_leaves(function(*args, **kwargs)), strict=True):
            output.copy_(again)

    return copied


# Arguments of factory functions that their `out=` variants lack: the output tensor determines them.
OF_A_FACTORY = {"dtype", "layout", "device", "pin_memory"}


def _into(function: OpOverload) -> tuple[OpOverload, list[str]] | None:
    """Return the `out=` variant of an operator and the names of its output arguments; None if it has none."""
    space, _, name = function._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, space), name)

    def taken(of: OpOverload, but: set[str]) -> list[tuple[str, str]]:
        return [(one.name, str(one.type)) for one in of._schema.arguments if one.name not in but]

    for overload in packet.overloads():
        variant = getattr(packet, overload)
        written = [argument.name for argument in variant._schema.arguments if argument.is_out]
        if len(written) != len(function._schema.returns):
            continue
        if taken(variant, set(written)) == taken(function, OF_A_FACTORY):
            return variant, written
    return None
