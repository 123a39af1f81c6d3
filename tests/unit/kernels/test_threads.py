"""The threads of the C kernels: calls of all sizes use the same threads, and ended threads leave no memory behind.

Each program runs in a process of its own, with four threads on any machine.
"""

import os
import subprocess
import sys

import pytest

from tests.unit.kernels.library import c_library

IMPORTS = """
import os, sys, threading, torch
from cluster.kernels.c_kernels import CKernels
from cluster.kernels.library import library
"""
FORKS = """
for program in sys.argv[2:]:
    child = os.fork()
    if not child:
        exec(sys.argv[1] + program)
        sys.stdout.flush()
        os._exit(0)
    assert not os.waitpid(child, 0)[1]
"""
SETUP = """
torch.set_num_threads(4)
kernels = CKernels(library())
weight = kernels.weight(torch.randn(256, 1024))
rows, many, scale = torch.randn(24, 256), torch.randn(192, 256), torch.randn(256)

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
"""
CALLS_OF_ALL_SIZES = """
before = None
for turn in range(20):
    kernels.norm(many[:65], scale, 1e-5), weight(many), kernels.norm(many[:130], scale, 1e-5), weight(rows)
    now = set(os.listdir("/proc/self/task"))
    before = now if turn == 1 else before
print(len(before), len(before ^ now))
"""
THREADS_THAT_END = """
def compute():
    weight(many)

def in_threads(count):
    for _ in range(count):
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()

in_threads(10)
before = resident()
in_threads(40)
print(round((resident() - before) / 1e6))
"""
WIDE_PRODUCT = """
weight = kernels.weight(torch.randn(513, 32768))
torch.set_num_threads(1)
many = torch.randn(192, 513)
weight(many[:12])
before = resident()
for _ in range(3):
    weight(many)
print(round((resident() - before) / 1e6))
"""
PROGRAMS = CALLS_OF_ALL_SIZES, THREADS_THAT_END, WIDE_PRODUCT


@pytest.fixture(scope="module")
def outputs() -> dict[str, list[int]]:
    """Return the numbers that each program prints. The programs are forks of one process, which has no threads yet."""
    c_library()
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}  # large memory is returned when freed
    process = subprocess.run(
        [sys.executable, "-c", IMPORTS + FORKS, SETUP, *PROGRAMS],
        env=environment, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    lines = process.stdout.splitlines()
    return {program: [int(number) for number in line.split()] for program, line in zip(PROGRAMS, lines, strict=True)}


def test_kernel_calls_of_all_sizes_keep_the_same_threads(outputs: dict[str, list[int]]) -> None:
    """GNU's OpenMP runtime ends threads when a team gets smaller, and starts new threads for the next larger team."""
    threads, changed = outputs[CALLS_OF_ALL_SIZES]
    assert threads >= 4 and changed == 0


def test_ended_threads_release_kernel_memory(outputs: dict[str, list[int]]) -> None:
    (megabytes,) = outputs[THREADS_THAT_END]
    assert megabytes < 10


def test_wide_product_retains_little_scratch_memory(outputs: dict[str, list[int]]) -> None:
    """The partial sums that the product retains are those of only some of the 32,768 columns."""
    (megabytes,) = outputs[WIDE_PRODUCT]
    assert megabytes < 6
