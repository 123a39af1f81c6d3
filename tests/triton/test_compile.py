"""Every program compiles for GPUs that are not here: within shared memory, and with no register spilled."""

import os
import subprocess
import sys

import pytest

from tests.triton.configurations import OTHERS, SHAPES


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SHAPES, *OTHERS])
def test_triton_kernel_compiles_within_shared_memory_and_registers(name: str) -> None:
    command = [sys.executable, "-m", "tests.triton.compile_all", name]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
