"""Compiles programs of Triton as they are started, for a GPU that is not here, and says what they take of it.

What is started is found by running the kernels themselves with another start: so what is compiled is what would run.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import cluster.kernels.launch

KINDS = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.bool: "i1",
}
OPTIONS = ("num_warps", "num_stages")
SHARED_MEMORY = 227 << 10  # bytes that one block may have on sm_90 and sm_100


class Compiled(NamedTuple):
    """What one program takes: bytes of shared memory of a block, registers of a thread, bytes that did not fit, and
    how many instructions copy to shared memory meanwhile.
    """

    name: str
    shared: int
    registers: int
    spilled: int
    copies: int


class Started(NamedTuple):
    """A program as it was started."""

    program: Any
    given: tuple[Any, ...]
    constants: dict[str, Any]


@contextmanager
def watching() -> Iterator[list[Started]]:
    """Notes what is started instead of starting it. Only where programs are not interpreted."""
    assert not cluster.kernels.launch.INTERPRETED, "an interpreted program cannot be compiled; set TRITON_INTERPRET=0"
    seen: list[Started] = []
    kept = cluster.kernels.launch._launch_kernel

    def noted(program: Any, grid: Any, given: tuple[Any, ...], constants: dict[str, Any]) -> None:
        seen.append(Started(program, given, constants))

    cluster.kernels.launch._launch_kernel = noted
    try:
        yield seen
    finally:
        cluster.kernels.launch._launch_kernel = kept


def compiled(started: Started, capability: int) -> Compiled:
    """For a GPU of that compute capability (90: H100 and H200, 100: B200)."""
    program, given, constants = started
    options = {name: value for name, value in constants.items() if name in OPTIONS}
    fixed = {name: value for name, value in constants.items() if name not in OPTIONS}
    names, signature, attributes = program.arg_names, dict.fromkeys(fixed, "constexpr"), {}
    for at, (name, value) in enumerate(zip(names, given, strict=False)):
        if value is None:
            fixed[name], signature[name] = None, "constexpr"
            continue
        signature[name] = kind_of(value)
        whole = isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)
        if whole and name not in program.do_not_specialize:
            attributes[at,] = [["tt.divisibility", 16]]
    places = {(names.index(name),): value for name, value in fixed.items()}
    source = ASTSource(program, signature, places, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    said = assembled(made.asm["ptx"], capability)
    return Compiled(program.__name__, made.metadata.shared, *said, made.asm["ptx"].count("cp.async.c"))


def kind_of(value: Any) -> str:
    """The type of an argument, in Triton's words."""
    if isinstance(value, Tensor):
        return f"*{KINDS[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    return "i32" if abs(value) < 2**31 else "i64"


def assembled(ptx: str, capability: int) -> tuple[int, int]:
    """Registers of a thread, and bytes spilled, as NVIDIA's assembler says."""
    name = "ptxas-blackwell" if capability >= 100 else "ptxas"
    path = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    target = re.search(r"\.target (sm_\w+)", ptx)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "program.ptx"
        source.write_text(ptx)
        command = [path, "-v", f"-arch={target[1]}", source, "-o", source.with_suffix(".cubin")]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spills = re.search(r"Used (\d+) registers", told), re.findall(r"(\d+) bytes spill", told)
    assert registers is not None and spills, told
    return int(registers[1]), sum(map(int, spills))
