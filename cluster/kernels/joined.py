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

MAX_INTEGERS, MAX_DOUBLES = 16, 2
"""The most integer (or pointer) and floating-point arguments of a kernel, as in `kernels/c/calls.c`."""
SUPPORTED_MACHINES = ("x86_64", "AMD64", "aarch64", "arm64")
"""Machines whose calling convention allows more arguments than a function takes; see `kernels/c/calls.c`."""


class CallStruct(Structure):
    """The C struct `aerie_call`, field by field."""

    _fields_ = (("run", c_void_p), ("integers", c_int64 * MAX_INTEGERS), ("doubles", c_double * MAX_DOUBLES))


class Joiner:
    """Joins calls of the functions of one library."""

    def __init__(self, shared_library: CDLL) -> None:
        self._run = shared_library.aerie_calls
        self._run.argtypes, self._run.restype = [c_void_p, c_int64], c_int64

    def __call__(self, calls: Sequence[partial[None]]) -> Callable[[], None]:
        """Return a function that makes the calls in order. It reads the memory of pointer arguments at each run.

        Raises:
            TypeError: an argument is neither a number nor a pointer.
        """
        table = (CallStruct * len(calls))(*map(_call_struct, calls))
        return _Joined(partial(self._run, ctypes.addressof(table), len(calls)), table, tuple(calls))


class _Joined:
    """Several calls made as one. The object keeps the calls and their argument structs alive, but not the tensors that
    are passed by address.
    """

    def __init__(self, run: Callable[[], int], *memory: object) -> None:
        self._run, self._memory = run, memory

    def __call__(self) -> None:
        """Make the calls.

        Raises:
            IndexError: a call was given the index of a row that its table does not have.
        """
        if missing_rows := self._run():
            raise IndexError(f"{missing_rows} row indices are outside their tables")


def joiner_of(shared_library: CDLL) -> Joiner | None:
    """Return the joiner for this library's functions; None on a machine where joining is not known to work."""
    return Joiner(shared_library) if platform.machine() in SUPPORTED_MACHINES else None


def _call_struct(call: partial[None]) -> CallStruct:
    """Return the C struct of one call: its function, and its arguments split into integers and doubles."""
    call_struct, integer_count, double_count = CallStruct(), 0, 0
    function: Any = call.func
    call_struct.run = ctypes.cast(function, c_void_p).value
    for argument_type, argument in zip(function.argtypes, call.args, strict=True):
        if argument_type is c_double:
            call_struct.doubles[double_count] = argument
            double_count += 1
        else:
            call_struct.integers[integer_count] = _address(argument) if argument_type is c_void_p else argument
            integer_count += 1
    return call_struct


def _address(argument: Any) -> int:
    """Return the address of a pointer argument, which is a number, None, or the result of `byref`."""
    if argument is None or isinstance(argument, int):
        return argument or 0
    if not hasattr(argument, "_obj"):
        raise TypeError(f"a pointer is needed, not a {type(argument).__name__}")
    return ctypes.addressof(argument._obj)
