import subprocess
import sys
import time

import pytest

from cluster.bench.processes import alive, end, memory_of, tree_of
from cluster.bench.server import ServerError, ServerProcess

CHILD = "import time; print(1, flush=True); time.sleep(60)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"


def test_a_family_is_found_weighed_and_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()  # the child is up
        family = tree_of(parent.pid)
        assert family[0].pid == parent.pid
        assert len(family) == 2
        memory = memory_of(family)
        assert memory.processes == 2
        assert 0 < memory.proportional_mib <= memory.resident_mib
        assert alive(family) == family
        assert end(family, 0.0) == family, "nobody asked them to end, so both were killed"
        parent.wait(10)
    until = time.monotonic() + 5
    while alive(family) and time.monotonic() < until:
        time.sleep(0.02)
    assert alive(family) == []
    assert memory_of(family).processes == 0
    assert end(family, 0.0) == []


def test_a_server_that_cannot_start_says_why() -> None:
    with pytest.raises(ServerError, match="exit code 2") as refused, ServerProcess(["pagesize=3"]):
        pass
    assert "page_size" in str(refused.value)
