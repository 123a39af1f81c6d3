"""A copy of the checkout in which faults are planted, and what results depend on."""

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
OWN = "tests/planted/"  # the faults themselves and what plants them decide no result
LEFT_OUT = ("__pycache__", "build", "dist", "runs")  # folders that nobody wrote by hand; hidden ones are left out too


def files() -> list[str]:
    """The files of the checkout, from its root, the compiled kernels among them."""
    found = []
    for folder, inner, names in os.walk(ROOT):
        inner[:] = [name for name in inner if name not in LEFT_OUT and not name.startswith(".")]
        found += [(Path(folder) / name).relative_to(ROOT).as_posix() for name in names if name != ".git"]
    return sorted(found)


@cache
def content_digest(name: str) -> bytes:
    """A checksum of a file of the checkout."""
    return hashlib.sha256((ROOT / name).read_bytes()).digest()


def tree_digest(names: list[str], tests: tuple[str, ...]) -> str:
    """A checksum of the files on which the result of running `tests` depends.

    These are the product, the settings of pytest, the tests' own helpers, and of the test files the selected ones.
    """
    made = hashlib.sha256()
    for name in names:
        is_test = Path(name).name.startswith("test_")
        selected = any(name == test or name.startswith(f"{test}/") for test in tests)
        if name.startswith((OWN, COMPILED)) or not name.startswith(("cluster/", "tests/", "pyproject.toml")):
            continue
        if selected or not is_test:
            made.update(name.encode() + b"\0" + content_digest(name))
    return made.hexdigest()[:16]


class Copy:
    """A copy of the checkout in `root`, without its environment and its history."""

    def __init__(self, root: Path, names: list[str]) -> None:
        """Copy the files `names`. Kernels compiled from the same sources are used again, here as in the checkout."""
        self.root = root
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name, follow_symlinks=False)

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """While this lasts the copy has the fault."""
        path = self.root / fault.file
        true = path.read_text(encoding="utf-8")
        self._write(path, fault.plant(true))
        try:
            yield
        finally:
            self._write(path, true)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        """Write a source file. Its bytecode goes: Python compares the time in seconds and the size, which may agree."""
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()
        path.write_text(text, encoding="utf-8")

    def environment(self, **more: str) -> dict[str, str]:
        """Variables for a process that imports from the copy, as do the processes that it starts."""
        return {**os.environ, "PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1", **more}

    def compile_kernels(self, objects: Path, limit_s: float) -> str:
        """Compile the C kernels of the copy for this CPU; return the compiler's complaint, or an empty string.

        Objects whose preprocessed source is known come from the folder `objects`.

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
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=self.root,
            env=self.environment(CC=str(wrapper), PLANTED_OBJECTS=str(objects)),
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
        return "" if done.returncode == 0 else done.stderr
