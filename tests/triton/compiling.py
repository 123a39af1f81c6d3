"""Compiles Triton programs for a GPU that this machine does not have, and measures the resources that they need.

The kernels themselves run with a replaced launch function, which records each launch. So the compiled programs are
those that a GPU would run.
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

TRITON_TYPES = {
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


class CompiledProgram(NamedTuple):
    """The resources of one compiled program: `shared` memory of a block in bytes, `registers` of a thread,
    `spilled_bytes` that did not fit into registers, and the number of instructions that copy to shared memory
    asynchronously.
    """

    name: str
    shared: int
    registers: int
    spilled_bytes: int
    async_copies: int


class StartedProgram(NamedTuple):
    """One launch of a Triton program: the program, its arguments and its constants."""

    program: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


@contextmanager
def record_launches() -> Iterator[list[StartedProgram]]:
    """Record launches and do not run them; yield the list of launches. Triton must not interpret its programs."""
    assert not cluster.kernels.launch.INTERPRETED, "an interpreted program cannot be compiled; set TRITON_INTERPRET=0"
    started_programs: list[StartedProgram] = []
    original_launch = cluster.kernels.launch._launch_kernel

    def record_launch(program: Any, grid: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        started_programs.append(StartedProgram(program, arguments, constants))

    cluster.kernels.launch._launch_kernel = record_launch
    try:
        yield started_programs
    finally:
        cluster.kernels.launch._launch_kernel = original_launch


def compile_program(launch: StartedProgram, capability: int) -> CompiledProgram:
    """Compile the program of a launch for a GPU of a compute capability (90: H100 and H200, 100: B200)."""
    program, arguments, constants = launch
    options = {name: value for name, value in constants.items() if name in OPTIONS}
    fixed = {name: value for name, value in constants.items() if name not in OPTIONS}
    names, signature, attributes = program.arg_names, dict.fromkeys(fixed, "constexpr"), {}
    for position, (name, value) in enumerate(zip(names, arguments, strict=False)):
        if value is None:
            fixed[name], signature[name] = None, "constexpr"
            continue
        signature[name] = triton_type_of(value)
        is_divisible = isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)
        if is_divisible and name not in program.do_not_specialize:
            attributes[position,] = [["tt.divisibility", 16]]
    constants_by_position = {(names.index(name),): value for name, value in fixed.items()}
    source = ASTSource(program, signature, constants_by_position, attributes)
    compiled_kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers_and_spills = assemble(compiled_kernel.asm["ptx"], capability)
    return CompiledProgram(
        program.__name__,
        compiled_kernel.metadata.shared,
        *registers_and_spills,
        compiled_kernel.asm["ptx"].count("cp.async.c"),
    )


def triton_type_of(value: Any) -> str:
    """The name that Triton gives to the type of an argument."""
    if isinstance(value, Tensor):
        return f"*{TRITON_TYPES[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    return "i32" if abs(value) < 2**31 else "i64"


def assemble(ptx: str, capability: int) -> tuple[int, int]:
    """Assemble a program with NVIDIA's assembler; return the registers of a thread and the spilled bytes."""
    name = "ptxas-blackwell" if capability >= 100 else "ptxas"
    path = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    target = re.search(r"\.target (sm_\w+)", ptx)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "program.ptx"
        source.write_text(ptx)
        command = [path, "-v", f"-arch={target[1]}", source, "-o", source.with_suffix(".cubin")]
        assembler_output = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spills = (
        re.search(r"Used (\d+) registers", assembler_output),
        re.findall(r"(\d+) bytes spill", assembler_output),
    )
    assert registers is not None and spills, assembler_output
    return int(registers[1]), sum(map(int, spills))
