"""Memory that a step frees is there for the next one, without the system having to clear it."""

import os
import subprocess
import sys

import pytest

from cluster.engine import host_memory

STEPS = """
import ctypes, resource, runpy, sys, threading

libc = ctypes.CDLL(None)
libc.malloc.argtypes, libc.malloc.restype, libc.free.argtypes = [ctypes.c_size_t], ctypes.c_void_p, [ctypes.c_void_p]
said = runpy.run_path(sys.argv[2])["cache_freed_memory"]() if sys.argv[1] == "kept" else None

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
    print(said, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

if sys.argv[3] == "thread":
    thread = threading.Thread(target=steps)
    thread.start()
    thread.join()
else:
    steps()
"""
PAGES = 4 * 20 * (4 << 20) // 4096


def steps(how: str, where: str = "main", **environment: str) -> tuple[str, int]:
    """What `cache_freed_memory` said, and the pages that the system gave to four steps of 80 MB after such steps."""
    mine = {name: value for name, value in os.environ.items() if "MALLOC" not in name and name != "GLIBC_TUNABLES"}
    command = [sys.executable, "-c", STEPS, how, host_memory.__file__, where]
    done = subprocess.run(command, env={**mine, **environment}, capture_output=True, text=True, check=True, timeout=60)
    said, pages = done.stdout.split()
    return said, int(pages)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of the GNU C library")
@pytest.mark.parametrize(("where", "given_back"), [("main", PAGES // 2), ("thread", PAGES // 8)])
def test_cache_freed_memory_lets_steps_reuse_freed_memory(where: str, given_back: int) -> None:
    assert steps("as it is", where)[1] > given_back, (
        "the allocator keeps it by itself: cache_freed_memory is not needed"
    )
    said, pages = steps("kept", where)
    assert said == "True" and pages < PAGES // 100


@pytest.mark.parametrize(
    "environment", [{"MALLOC_TRIM_THRESHOLD_": "65536"}, {"GLIBC_TUNABLES": "glibc.malloc.perturb=0"}]
)
def test_cache_freed_memory_respects_malloc_environment_settings(environment: dict[str, str]) -> None:
    said, pages = steps("kept", **environment)
    assert said == "False" and pages > PAGES // 2


def test_cache_freed_memory_does_nothing_without_glibc_malloc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    assert not host_memory.cache_freed_memory()
