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
        parent.stdout.readline()  # the child is up
        family = process_tree(parent.pid)
        assert family[0].pid == parent.pid
        assert len(family) == 2
        memory = memory_usage(family)
        assert memory.processes == 2
        assert 0 < memory.proportional_mib <= memory.resident_mib
        assert still_alive(family) == family
        assert wait_or_kill(family, 0.0) == family, "nobody asked them to end, so both were killed"
        parent.wait(10)
    until = time.monotonic() + 5
    while still_alive(family) and time.monotonic() < until:
        time.sleep(0.02)
    assert still_alive(family) == []
    assert memory_usage(family).processes == 0
    assert wait_or_kill(family, 0.0) == []


def test_server_process_that_cannot_start_raises_with_the_reason() -> None:
    with pytest.raises(ServerError, match="exit code 2") as refused, ServerProcess(["pagesize=3"]):
        pass
    assert "page_size" in str(refused.value)
