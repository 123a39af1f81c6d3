"""The next step reuses the memory that a step frees, so that the system need not clear pages again."""

import os
import subprocess
import sys

import pytest

from cluster.engine import host_memory

STEPS = """
import ctypes, resource, runpy, sys, threading

libc = ctypes.CDLL(None)
libc.malloc.argtypes, libc.malloc.restype, libc.free.argtypes = [ctypes.c_size_t], ctypes.c_void_p, [ctypes.c_void_p]
result = runpy.run_path(sys.argv[2])["cache_freed_memory"]() if sys.argv[1] == "cached" else None

def step():
    pieces = [libc.malloc(4 << 20) for _ in range(20)]
    for piece in pieces:
        ctypes.memset(piece, 1, 4 << 20)
    for piece in pieces:
        libc.free(piece)

def steps():
    for _ in range(4):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        step()
    print(result, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

if sys.argv[3] == "thread":
    thread = threading.Thread(target=steps)
    thread.start()
    thread.join()
else:
    steps()
"""
PAGES = 4 * 20 * (4 << 20) // 4096


def run_steps(mode: str, thread: str = "main", **environment: str) -> tuple[str, int]:
    """Run eight steps that allocate and free 80 MB each, in a new process. Return the result of `cache_freed_memory`
    (called only if `mode` is "cached") and the number of pages that the system provided for the last four steps.
    """
    own_environment = {
        name: value for name, value in os.environ.items() if "MALLOC" not in name and name != "GLIBC_TUNABLES"
    }
    command = [sys.executable, "-c", STEPS, mode, host_memory.__file__, thread]
    process = subprocess.run(
        command, env={**own_environment, **environment}, capture_output=True, text=True, check=True, timeout=60
    )
    result, page_faults = process.stdout.split()
    return result, int(page_faults)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="tests malloc of the GNU C library")
@pytest.mark.parametrize(("thread", "min_uncached_faults"), [("main", PAGES // 2), ("thread", PAGES // 8)])
def test_cache_freed_memory_lets_steps_reuse_freed_memory(thread: str, min_uncached_faults: int) -> None:
    assert run_steps("uncached", thread)[1] > min_uncached_faults, (
        "the allocator keeps freed memory by itself: cache_freed_memory is not needed"
    )
    result, page_faults = run_steps("cached", thread)
    assert result == "True" and page_faults < PAGES // 100


@pytest.mark.parametrize(
    "environment", [{"MALLOC_TRIM_THRESHOLD_": "65536"}, {"GLIBC_TUNABLES": "glibc.malloc.perturb=0"}]
)
def test_cache_freed_memory_respects_malloc_environment_settings(environment: dict[str, str]) -> None:
    result, page_faults = run_steps("cached", **environment)
    assert result == "False" and page_faults > PAGES // 2


def test_cache_freed_memory_does_nothing_without_glibc_malloc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    assert not host_memory.cache_freed_memory()
