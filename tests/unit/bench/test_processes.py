import subprocess
import sys
import time

import pytest

from cluster.bench.processes import memory_usage, process_tree, still_alive, wait_or_kill
from cluster.bench.server import ServerError, ServerProcess

CHILD = "import time; print(1, flush=True); time.sleep(60)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"


def test_process_tree_is_found_measured_and_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()  # the child process has started
        processes = process_tree(parent.pid)
        assert processes[0].pid == parent.pid
        assert len(processes) == 2
        memory = memory_usage(processes)
        assert memory.processes == 2
        assert 0 < memory.proportional_mib <= memory.resident_mib
        assert still_alive(processes) == processes
        assert wait_or_kill(processes, 0.0) == processes, "no process was asked to end, so both were killed"
        parent.wait(10)
    deadline = time.monotonic() + 5
    while still_alive(processes) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert still_alive(processes) == []
    assert memory_usage(processes).processes == 0
    assert wait_or_kill(processes, 0.0) == []


def test_server_process_that_cannot_start_raises_with_the_reason() -> None:
    with pytest.raises(ServerError, match="exit code 2") as captured_error, ServerProcess(["pagesize=3"]):
        pass
    assert "page_size" in str(captured_error.value)
