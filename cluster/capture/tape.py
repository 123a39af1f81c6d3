"""A tape: the calls of a program, recorded once and replayed on the buffers that they had then.

It is to a CPU what a CUDA graph is to a GPU, and the graph's twin in tests: what is replayed reads and writes fixed
memory, makes no decision, and asks the device for nothing. Whoever replays puts new inputs where the old ones lay.
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
"""Faster calls for an operator, its arguments, its options and the outputs that it fills; None where there are none."""


class Tape(Generic[T]):
    """A program captured on a CPU."""

    def __init__(
        self, program: Callable[[], T], buffers: Buffers | None = None, substitute: Substitute | None = None
    ) -> None:
        """Run `program` and record it; what it makes lies in `buffers`, which others may use at other times. Calls that
        `substitute` gives are replayed in place of operators.

        Raises:
            CaptureError: it asks for a value, or takes one from the host.
        """
        lender = Buffers() if buffers is None else buffers
        before, recorder = lender.bytes, _Recorder(lender, substitute)
        with torch.inference_mode(), recorded_by(recorder), recorder:
            self.output: T = program()
        self._calls, self.buffers, self._bytes = joined(recorder.calls), recorder.used, lender.bytes - before
        self._held = recorder.held

    @property
    def bytes(self) -> int:
        """Memory by which that of all programs grew for this one."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._calls)

    def replay(self) -> None:
        """Make the recorded calls again, in order."""
        with torch.inference_mode():
            for call in self._calls:
                call()


def joined(calls: Sequence[Callable[[], object]]) -> list[Callable[[], object]]:
    """The same calls, of which neighbours are one where their functions have a `joins` that makes one of several."""
    found: list[Callable[[], object]] = []
    for joins, group in groupby(calls, lambda call: getattr(getattr(call, "func", None), "joins", None)):
        some = list(group)
        found += some if joins is None else [joins(some)]
    return found


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
"""Operators that give memory which others fill."""


def asks(function: OpOverload, args: Any, kwargs: Any) -> str | None:
    """What an operator has to know of the device's numbers before it can go on; None if nothing."""
    name: str = function._schema.name
    if name == "aten::index" and any(isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]):
        return "a count"
    if name == "aten::repeat_interleave" and kwargs.get("output_size") is None:
        return "a sum" if any(isinstance(arg, Tensor) for arg in args[1:] or args) else None
    return ASKING.get(name)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each operator that computes something. `used` are the buffers of what the program made, `held` is memory
    that calls read or write by its address alone.
    """

    def __init__(self, buffers: Buffers, substitute: Substitute | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Callable[[], object]] = []
        self.held: list[Any] = []
        self._substitute = substitute
        self._buffers, self._used = buffers, dict[int, Tensor]()

    @property
    def used(self) -> list[Tensor]:
        """Each once."""
        return list(self._used.values())

    def opaque(self, run: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        """See `recorder.opaque`."""
        with unrecorded():
            return self._answered(run, run(*given), given)

    def native(self, run: Callable[..., None], given: tuple[Any, ...]) -> None:
        """See `recorder.native`."""
        with unrecorded():
            run(*given)
            self.calls.append(partial(run, *self._lasting(given)))

    def hosted(self, run: Callable[..., Tensor | None], given: tuple[Any, ...]) -> Tensor | None:
        """See `recorder.hosted`; on a CPU the host's memory is the device's."""
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
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        if not function._schema.is_mutable:
            result = tree_map_only(Tensor, lambda one: one if _storage(one) in given else self._lent(one), result)
        outputs = [output for output in tree_leaves(result) if isinstance(output, Tensor)]
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
        """`answer`, which `run(*given)` gave, in memory that every replay fills with what it gives then."""
        made = self._lent(answer)
        held, lasting = self._lasting(given), self._buffers.lasting(made)
        self.calls.append(lambda: lasting.copy_(run(*held)))
        return made

    def _lent(self, made: Tensor) -> Tensor:
        """The same in memory of the buffers."""
        if not made.numel():
            return made
        lent, buffer = self._buffers.lend(made)
        self._used[buffer.data_ptr()] = buffer
        return lent.copy_(made)

    def _lasting(self, given: T) -> T:
        """The same with tensors that last, for calls to come: what a call held would never be lent anew."""
        lasting: T = tree_map_only(Tensor, self._buffers.lasting, given)
        return lasting


def _storage(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def _replayed(function: OpOverload, args: Any, kwargs: Any, outputs: list[Tensor]) -> Callable[[], object]:
    """A call that fills `outputs` anew: by the operator's variant for given outputs, or by a copy where it has none."""
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


OF_A_FACTORY = {"dtype", "layout", "device", "pin_memory"}


def _into(function: OpOverload) -> tuple[OpOverload, list[str]] | None:
    """The variant of an operator that writes into given outputs, and what it calls these; None if there is none."""
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
