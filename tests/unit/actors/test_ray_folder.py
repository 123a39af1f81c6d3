"""The temporary folder of a Ray of one's own: closed to others, gone with its owner, and no other is touched."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cluster.actors.ray_folder import OWNER_FILE, SUBFOLDER, OwnedFolder, remove_orphans


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    short = Path(tempfile.mkdtemp(prefix="t"))
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    return short


def test_world_writable_ray_folder_lies_in_a_private_folder(temporary: Path) -> None:
    folder = OwnedFolder()
    folder.ray_folder.chmod(0o777)  # as Ray does
    assert folder.path.parent == temporary and folder.ray_folder.parent == folder.path
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.remove()
    folder.remove()
    assert not folder.path.exists()


def test_remove_orphans_removes_folders_of_dead_owners_only(temporary: Path) -> None:
    code = (
        "import sys, tempfile, os, signal\n"
        "tempfile.tempdir = sys.argv[1]\n"
        "from cluster.actors.ray_folder import OwnedFolder\n"
        "folder = OwnedFolder()\n"
        "(folder.ray_folder / 'file').write_text('x')\n"
        "print(folder.path, flush=True)\n"
        "signal.pause()\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(temporary)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        theirs = Path(child.stdout.readline().strip())
        ours = OwnedFolder()
        assert remove_orphans() == []
        assert (theirs / SUBFOLDER / "file").exists()
    finally:
        child.kill()
        child.wait()
    assert remove_orphans() == [theirs]
    assert not theirs.exists() and ours.ray_folder.exists()


def test_remove_orphans_leaves_unowned_linked_and_shared_paths(temporary: Path) -> None:
    open_to_all = temporary / "aerie-open"
    unowned = temporary / "aerie-tiny-x"
    elsewhere = temporary / "elsewhere"
    for path in (open_to_all, unowned, elsewhere):
        path.mkdir(mode=0o700)
    for path in (open_to_all, elsewhere):
        (path / OWNER_FILE).touch()
    open_to_all.chmod(0o755)
    (temporary / "aerie-link").symlink_to(elsewhere)
    (temporary / "aerie-file").touch()
    assert remove_orphans() == []
    assert all(path.exists() for path in (open_to_all, unowned, elsewhere, temporary / "aerie-link"))


def test_owned_folder_refuses_a_path_too_long_for_unix_sockets(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = temporary / ("d" * 60)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(RuntimeError, match="set TMPDIR to a shorter one"):
        OwnedFolder()
    assert list(deep.iterdir()) == []
