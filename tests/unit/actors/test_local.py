"""The end of a Ray of one's own: nothing of it stays, whatever its processes do meanwhile."""

from typing import Any

import psutil  # Ray's own copy, as in `cluster.actors.local`
import pytest
import ray

from cluster.actors import local
from cluster.actors.local import LocalRay


class Folder:
    """Notes that it was removed."""

    removed = False

    def remove(self) -> None:
        self.removed = True


class Process:
    """Ends by itself between the look at it and its kill."""

    pid = 2**22 + 1

    def children(self, recursive: bool) -> list[Any]:
        return []

    def kill(self) -> None:
        raise psutil.NoSuchProcess(self.pid)


@pytest.mark.parametrize("way", ["stop", "kill"])
@pytest.mark.parametrize("fault", [None, OSError("no")], ids=["gone", "fault"])
def test_the_folder_goes_whatever_happens(monkeypatch: pytest.MonkeyPatch, way: str, fault: Exception | None) -> None:
    waited: list[Any] = []

    def wait_procs(processes: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        waited.append(timeout)
        if fault is not None and len(waited) == 1:
            raise fault
        return [], processes

    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(local.psutil, "wait_procs", wait_procs)
    folder: Any = Folder()
    process: Any = Process()
    cluster = LocalRay(_folder=folder, _processes=[process])
    if fault is None:
        getattr(cluster, way)()
    else:
        with pytest.raises(OSError, match="no"):
            getattr(cluster, way)()
    assert folder.removed
