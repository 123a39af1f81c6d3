"""Joins several calls of C kernels into one call, for captured programs on a CPU.

A call through ctypes takes about a microsecond, and a step of a small model makes hundreds of calls, of a few
microseconds each.
"""

import ctypes
import platform
from collections.abc import Callable, Sequence
from ctypes import CDLL, Structure, c_double, c_int64, c_void_p
from functools import partial
from typing import Any

WHOLES, FLOATS = 16, 2
"""The most integer (or pointer) and floating-point arguments of a kernel, as in `kernels/c/calls.c`."""
MACHINES = ("x86_64", "AMD64", "aarch64", "arm64")
"""Machines whose calling convention allows more arguments than a function takes; see `kernels/c/calls.c`."""


class CallStruct(Structure):
    """The C struct `aerie_call`, field by field."""

    _fields_ = (("run", c_void_p), ("wholes", c_int64 * WHOLES), ("floats", c_double * FLOATS))


class Joiner:
    """Joins calls of the functions of one library."""

    def __init__(self, held: CDLL) -> None:
        self._run = held.aerie_calls
        self._run.argtypes, self._run.restype = [c_void_p, c_int64], c_int64

    def __call__(self, calls: Sequence[partial[None]]) -> Callable[[], None]:
        """Return a function that makes the calls in order. It reads the memory of pointer arguments at each run.

        Raises:
            TypeError: an argument is neither a number nor a pointer.
        """
        table = (CallStruct * len(calls))(*map(_call, calls))
        return _Joined(partial(self._run, ctypes.addressof(table), len(calls)), table, tuple(calls))


class _Joined:
    """Several calls made as one. The object keeps the memory of their arguments alive."""

    def __init__(self, run: Callable[[], int], *memory: object) -> None:
        self._run, self._memory = run, memory

    def __call__(self) -> None:
        """Make the calls.

        Raises:
            IndexError: a call was given the index of a row that its table does not have.
        """
        if missing := self._run():
            raise IndexError(f"{missing} rows of tables were asked for that the tables do not have")


def joiner_of(held: CDLL) -> Joiner | None:
    """Return the joiner for this library's functions; None on a machine where joining is not known to work."""
    return Joiner(held) if platform.machine() in MACHINES else None


def _call(call: partial[None]) -> CallStruct:
    """Return the C struct of one call: its function, and its arguments split into integers and doubles."""
    found, wholes, floats = CallStruct(), 0, 0
    function: Any = call.func
    found.run = ctypes.cast(function, c_void_p).value
    for kind, given in zip(function.argtypes, call.args, strict=True):
        if kind is c_double:
            found.floats[floats] = given
            floats += 1
        else:
            found.wholes[wholes] = _address(given) if kind is c_void_p else given
            wholes += 1
    return found


def _address(given: Any) -> int:
    """Return the address of a pointer argument, which is a number, None, or the result of `byref`."""
    if given is None or isinstance(given, int):
        return given or 0
    if not hasattr(given, "_obj"):
        raise TypeError(f"a pointer is needed, not a {type(given).__name__}")
    return ctypes.addressof(given._obj)
