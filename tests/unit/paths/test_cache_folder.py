"""The folder of logs and compiled kernels: in the home folder if that is writable, else a private temporary folder."""

import os
import tempfile
from pathlib import Path
from typing import NoReturn

import pytest

from cluster.config import ConfigError
from cluster.paths.cache_folder import cache_folder, default_folder_problem


@pytest.fixture(autouse=True)
def temporary_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_cache_folder_is_in_home_or_xdg_cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder() == tmp_path / "home" / ".cache" / "aerie" and cache_folder().stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "aerie" and not default_folder_problem()


def test_cache_folder_without_home_is_a_private_temporary_folder(
    temporary_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (temporary_root / "file").touch()
    monkeypatch.setenv("HOME", str(temporary_root / "file"))
    assert "Not a directory" in default_folder_problem()
    expected = temporary_root / f"aerie-cache-{os.getuid()}"
    assert cache_folder() == cache_folder() == expected and expected.stat().st_mode & 0o777 == 0o700

    def no_home() -> NoReturn:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert default_folder_problem() == "there is no home folder" and cache_folder() == expected
    monkeypatch.undo()
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert default_folder_problem().endswith("cannot be written")


def test_cache_folder_writable_by_others_is_refused(temporary_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/dev/null")
    folder = temporary_root / f"aerie-cache-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="others can write"):
        cache_folder()
    folder.rmdir()
    folder.symlink_to(temporary_root)
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME"):
        cache_folder()
