"""A copy of the checkout in which faults are planted, and a checksum of the files on which a result depends."""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tests.planted.fault import Fault

ROOT = Path(__file__).resolve().parents[2]
COMPILED = "cluster/kernels/compiled/"
OWN_FOLDER = "tests/planted/"  # no result depends on the files of this folder
IGNORED_FOLDERS = ("__pycache__", "build", "dist", "runs")  # generated folders; hidden folders are left out too


def files() -> list[str]:
    """The files of the checkout, as sorted paths relative to its root. The compiled kernels are among them."""
    found = []
    for folder, inner, names in os.walk(ROOT):
        inner[:] = [name for name in inner if name not in IGNORED_FOLDERS and not name.startswith(".")]
        found += [(Path(folder) / name).relative_to(ROOT).as_posix() for name in names if name != ".git"]
    return sorted(found)


@cache
def content_digest(name: str) -> bytes:
    """A checksum of a file of the checkout."""
    return hashlib.sha256((ROOT / name).read_bytes()).digest()


def tree_digest(names: list[str], tests: tuple[str, ...]) -> str:
    """A checksum of the files on which the result of running `tests` depends.

    These are the product, the settings of pytest, the helpers of all tests, and the test files in `tests`.
    """
    digest = hashlib.sha256()
    for name in names:
        is_test = Path(name).name.startswith("test_")
        selected = any(name == test or name.startswith(f"{test}/") for test in tests)
        if name.startswith((OWN_FOLDER, COMPILED)) or not name.startswith(("cluster/", "tests/", "pyproject.toml")):
            continue
        if selected or not is_test:
            digest.update(name.encode() + b"\0" + content_digest(name))
    return digest.hexdigest()[:16]


class Copy:
    """A copy of the checkout in `root`, without its environment and its history."""

    def __init__(self, root: Path, names: list[str]) -> None:
        """Copy the files `names`. The compiled kernels among them are used again as long as their sources
        are the same.
        """
        self.root = root
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name, follow_symlinks=False)

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """Plant the fault in the copy; remove it again on exit."""
        path = self.root / fault.file
        original_text = path.read_text(encoding="utf-8")
        self._write(path, fault.plant(original_text))
        try:
            yield
        finally:
            self._write(path, original_text)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        """Write a source file and delete its bytecode. Python would reuse the bytecode if the source's size and its
        time of change in whole seconds were the same as before.
        """
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()
        path.write_text(text, encoding="utf-8")

    def environment(self, **extra_variables: str) -> dict[str, str]:
        """The environment of a process that must import from the copy. The processes that it starts do so too."""
        return {**os.environ, "PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1", **extra_variables}

    def compile_kernels(self, objects: Path, limit_s: float) -> str:
        """Compile the C kernels of the copy for this CPU; return the compiler's error output, or an empty string.

        An object is taken from the folder `objects` if its preprocessed source was compiled before.

        Raises:
            subprocess.TimeoutExpired: it took longer than `limit_s` seconds.
        """
        wrapper = self.root / "cc"
        wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.planted.objects "$@"\n')
        wrapper.chmod(0o755)
        program = (
            "from cluster.kernels.build import COMPILED, compile_level; "
            "from cluster.kernels.library import level_of_cpu; compile_level(level_of_cpu(), COMPILED)"
        )
        process = subprocess.run(
            [sys.executable, "-c", program],
            cwd=self.root,
            env=self.environment(CC=str(wrapper), PLANTED_OBJECTS=str(objects)),
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
        return "" if process.returncode == 0 else process.stderr
