"""Every Triton program compiles for GPUs that this machine does not have. Each fits into shared memory and spills no
register.
"""

import os
import subprocess
import sys

import pytest

from tests.triton.configurations import OTHER_PROGRAMS, SHAPES


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SHAPES, *OTHER_PROGRAMS])
def test_triton_kernel_compiles_within_shared_memory_and_registers(name: str) -> None:
    command = [sys.executable, "-m", "tests.triton.compile_all", name]
    process = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr[-2000:]
