"""The threads of the kernels: one team that stays, whatever the sizes of calls, and no memory left by threads that end.

Each case is a process of its own, with four threads whatever this machine has.
"""

import os
import subprocess
import sys

from tests.unit.kernels.library import c_library

BEGINNING = """
import os, threading, torch
from cluster.kernels.c_kernels import CKernels
from cluster.kernels.library import library
torch.set_num_threads(4)
kernels = CKernels(library())
weight = kernels.weight(torch.randn(256, 1024))
rows, many, scale = torch.randn(24, 256), torch.randn(192, 256), torch.randn(256)

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
"""
STAYS = """
before = None
for turn in range(20):
    kernels.norm(many[:65], scale, 1e-5), weight(many), kernels.norm(many[:130], scale, 1e-5), weight(rows)
    now = set(os.listdir("/proc/self/task"))
    before = now if turn == 1 else before
print(len(before), len(before ^ now))
"""
ENDS = """
def compute():
    weight(many)

def in_threads(count):
    for _ in range(count):
        one = threading.Thread(target=compute)
        one.start()
        one.join()

in_threads(10)
began = resident()
in_threads(40)
print(round((resident() - began) / 1e6))
"""
WIDE = """
weight = kernels.weight(torch.randn(513, 32768))
torch.set_num_threads(1)
many = torch.randn(192, 513)
weight(many[:12])
began = resident()
for _ in range(3):
    weight(many)
print(round((resident() - began) / 1e6))
"""


def said(program: str) -> list[int]:
    c_library()
    returned = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}  # what is large goes back as soon as it is freed
    done = subprocess.run(
        [sys.executable, "-c", BEGINNING + program],
        env=returned, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    return [int(word) for word in done.stdout.split()]


def test_kernel_calls_of_all_sizes_keep_the_same_threads() -> None:
    """GNU's runtime ends the threads that a smaller team lacks, and starts others for the next larger one."""
    threads, changed = said(STAYS)
    assert threads >= 4 and changed == 0


def test_ended_threads_release_kernel_memory() -> None:
    (megabytes,) = said(ENDS)
    assert megabytes < 10


def test_wide_product_retains_little_scratch_memory() -> None:
    """Of a head's 32,768 columns as of others: unfinished sums are those of some columns."""
    (megabytes,) = said(WIDE)
    assert megabytes < 6
