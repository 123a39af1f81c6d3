"""Loading leaves no threads behind, so that a step later computes with no more threads than there are cores."""

import subprocess
import sys
import threading

import pytest

from cluster.actors.loading import run_in_temporary_thread

THREADS = """
import os, threading, time
import torch
from cluster.actors.loading import run_in_temporary_thread

def count():
    return len(os.listdir("/proc/self/task"))

def compute():
    assert torch.ones(1 << 20).add(1).sum() == 2 << 20
    return count()

torch.set_num_threads(3)  # starts a thread pool of torch for the whole process
before = count()
during = run_in_temporary_thread(compute)
until = time.monotonic() + 20
while (after := count()) > before and time.monotonic() < until:
    time.sleep(0.01)  # OpenMP threads end some time after they were asked to
print(before, during, after)
"""


def test_run_in_temporary_thread_returns_the_result_or_raises_the_error() -> None:
    thread = run_in_temporary_thread(threading.current_thread)
    assert thread is not threading.current_thread() and not thread.is_alive()
    with pytest.raises(KeyError, match="missing key"):
        run_in_temporary_thread(lambda: {}["missing key"])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_run_in_temporary_thread_ends_the_openmp_threads_of_its_call() -> None:
    process = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=True, timeout=120)
    before, during, after = map(int, process.stdout.split())
    assert during == before + 3, "the call started no OpenMP threads, so the test would prove nothing"
    assert after == before
