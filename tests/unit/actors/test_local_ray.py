"""The local Ray cluster that Aerie starts itself: its end leaves nothing behind, whatever its processes do."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import ray

import psutil  # isort: skip  # Ray's own copy: importable once Ray is

from cluster.actors import local_ray
from cluster.actors.local_ray import LocalRay


class FakeFolder:
    """A fake of OwnedFolder that records whether it was removed."""

    removed = False

    def remove(self) -> None:
        self.removed = True


class FakeProcess:
    """A fake of psutil.Process that ends by itself just before `kill` is called."""

    pid = 2**22 + 1

    def children(self, recursive: bool) -> list[Any]:
        return []

    def kill(self) -> None:
        raise psutil.NoSuchProcess(self.pid)


@pytest.mark.parametrize("method", ["stop", "kill"])
@pytest.mark.parametrize("fault", [None, OSError("no")], ids=["process has ended", "wait_procs raises"])
def test_local_ray_removes_its_folder_even_when_ending_processes_fails(
    monkeypatch: pytest.MonkeyPatch, method: str, fault: Exception | None
) -> None:
    wait_timeouts: list[Any] = []

    def wait_procs(processes: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        wait_timeouts.append(timeout)
        if fault is not None and len(wait_timeouts) == 1:
            raise fault
        return [], processes

    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(local_ray.psutil, "wait_procs", wait_procs)
    folder: Any = FakeFolder()
    process: Any = FakeProcess()
    cluster = LocalRay(_folder=folder, _processes=[process])
    if fault is None:
        getattr(cluster, method)()
    else:
        with pytest.raises(OSError, match="no"):
            getattr(cluster, method)()
    assert folder.removed


def test_ray_processes_share_a_separate_process_group_and_accept_sigterm() -> None:
    services: Any = ray._private.services
    original_popen = services.ConsolePopen
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
    started: list[subprocess.Popen[bytes]] = []
    try:
        with local_ray._own_process_group():
            started += [services.ConsolePopen(command) for command in (["sleep", "60"], ["true"], ["sleep", "60"])]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert services.ConsolePopen is original_popen
    first, short_lived, last = started
    short_lived.wait()
    assert os.getpgid(first.pid) == os.getpgid(last.pid) == first.pid != os.getpgid(0)
    for process in (first, last):
        process.terminate()
        assert process.wait(10) == -signal.SIGTERM


def test_ensure_token_writes_to_home_or_else_to_the_ray_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    local_ray.ensure_token(tmp_path)
    token = (tmp_path / ".ray" / "auth_token").read_text()
    local_ray.ensure_token(tmp_path)
    assert len(token) == 64 and (tmp_path / ".ray" / "auth_token").read_text() == token
    (tmp_path / "file").write_text("")
    assert "RAY_AUTH_TOKEN_PATH" not in os.environ
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "")  # so that monkeypatch undoes what `ensure_token` sets
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    local_ray.ensure_token(tmp_path)
    token_path = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    assert (
        token_path.parent == tmp_path
        and len(token_path.read_text()) == 64
        and token_path.stat().st_mode & 0o777 == 0o600
    )
