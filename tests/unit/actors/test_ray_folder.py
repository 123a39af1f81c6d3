"""The temporary folder of a local Ray cluster: private, and removed after its owner's death. Other folders stay."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cluster.actors.ray_folder import OWNER_FILE, SUBFOLDER, OwnedFolder, remove_orphans


@pytest.fixture(autouse=True)
def temp_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    short = Path(tempfile.mkdtemp(prefix="t"))
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    return short


def test_world_writable_ray_folder_lies_in_a_private_folder(temp_root: Path) -> None:
    folder = OwnedFolder()
    folder.ray_folder.chmod(0o777)  # as Ray does
    assert folder.path.parent == temp_root and folder.ray_folder.parent == folder.path
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.remove()
    folder.remove()
    assert not folder.path.exists()


def test_remove_orphans_removes_folders_of_dead_owners_only(temp_root: Path) -> None:
    code = (
        "import sys, tempfile, os, signal\n"
        "tempfile.tempdir = sys.argv[1]\n"
        "from cluster.actors.ray_folder import OwnedFolder\n"
        "folder = OwnedFolder()\n"
        "(folder.ray_folder / 'file').write_text('x')\n"
        "print(folder.path, flush=True)\n"
        "signal.pause()\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(temp_root)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        child_folder = Path(child.stdout.readline().strip())
        own_folder = OwnedFolder()
        assert remove_orphans() == []
        assert (child_folder / SUBFOLDER / "file").exists()
    finally:
        child.kill()
        child.wait()
    assert remove_orphans() == [child_folder]
    assert not child_folder.exists() and own_folder.ray_folder.exists()


def test_remove_orphans_leaves_unowned_linked_and_shared_paths(temp_root: Path) -> None:
    open_to_all = temp_root / "aerie-open"
    unowned = temp_root / "aerie-tiny-x"
    elsewhere = temp_root / "elsewhere"
    for path in (open_to_all, unowned, elsewhere):
        path.mkdir(mode=0o700)
    for path in (open_to_all, elsewhere):
        (path / OWNER_FILE).touch()
    open_to_all.chmod(0o755)
    (temp_root / "aerie-link").symlink_to(elsewhere)
    (temp_root / "aerie-file").touch()
    assert remove_orphans() == []
    assert all(path.exists() for path in (open_to_all, unowned, elsewhere, temp_root / "aerie-link"))


def test_owned_folder_refuses_a_path_too_long_for_unix_sockets(
    temp_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_path = temp_root / ("d" * 60)
    long_path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long_path))
    with pytest.raises(RuntimeError, match="set TMPDIR to a shorter one"):
        OwnedFolder()
    assert list(long_path.iterdir()) == []
