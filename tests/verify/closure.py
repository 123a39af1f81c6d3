"""Which files of the checkout the outcome of a test module can depend on, and the digest of their content.

When in doubt the rules include a file: the record must never keep a pass that no longer holds.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.verify.facts import PACKAGES, Facts, facts_of

ALWAYS = (
    *("pyproject.toml", "constraints.txt", "setup.py", "models"),
    *("pytest.ini", "tox.ini", "setup.cfg", "conftest.py"),  # pytest would read them if there were any
)
"""Every test depends on these files and folders, where they exist."""
NAMED_PROCESSES = {
    "cluster/grammar/compiler.py": "starts `python -m` with a constant name",
    "cluster/kernels/build.py": "starts a C compiler on files of its own folder",
    "tests/kernels/test_levels.py": "starts `python -m` with a constant name",
    "tests/distributed/gang.py": "starts `python -m` with a name that its callers give as a string",
    "tests/triton/compiling.py": "starts programs of CUDA",
    "tests/triton/test_compile.py": "starts `python -m` with a constant name",
}
"""Files that start processes, each with the reason why that is safe: strings of the files that import it name the
modules that these processes run, or the processes run no Python code of the checkout. A test module that starts any
other process depends on all of `cluster`.
"""
OUTPUT_FOLDERS = {"build", "dist", "runs"}
"""Folders at the root that tools write."""
CACHES = {"__pycache__", ".pytest_cache", ".hypothesis", ".mypy_cache", ".ruff_cache"}


@dataclass(frozen=True, slots=True)
class Stamp:
    """The hash of a file's content, and the time of its last change. The time shows a later change without reading."""

    sha256: str
    changed_ns: int


REMOVED = Stamp("gone", 0)
"""The stamp of a file that was removed after its folder was listed."""


class Checkout:
    """The files of a checkout as they were when this object first read them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._stamps: dict[str, Stamp] = {}
        self._facts: dict[str, Facts | None] = {}
        self._closures: dict[str, frozenset[str]] = {}
        self._needs: dict[str, frozenset[str]] = {}
        self._data: dict[str, frozenset[str]] = {}

    @cached_property
    def entries(self) -> frozenset[str]:
        """The names of files and folders at the root, without hidden ones; `.ci` does not count as hidden."""
        return frozenset(
            entry.name for entry in self.root.iterdir()
            if (not entry.name.startswith(".") or entry.name == ".ci") and entry.name not in OUTPUT_FOLDERS
        )  # fmt: skip

    @cached_property
    def files(self) -> tuple[str, ...]:
        """All files, as sorted paths relative to the root."""
        found: list[str] = []
        for entry in sorted(self.entries):
            path = self.root / entry
            found += self._files_below(path) if path.is_dir() else [entry]
        return tuple(sorted(found))

    @cached_property
    def _file_set(self) -> frozenset[str]:
        return frozenset(self.files)

    def _files_below(self, folder: Path) -> Iterator[str]:
        for at, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if name not in CACHES and not name.endswith(".egg-info")]
            above = Path(at).relative_to(self.root).as_posix()
            yield from (f"{above}/{name}" for name in names if not name.endswith((".pyc", ".log")))

    def under(self, place: str) -> frozenset[str]:
        """The file `place`, or all files in the folder `place`."""
        if place in self._file_set:
            return frozenset({place})
        return frozenset(path for path in self.files if path.startswith(f"{place}/"))

    def stamp(self, path: str) -> Stamp:
        """The stamp of a file, as it was when this method was first called for it."""
        if path not in self._stamps:
            self._stamps[path], content = self._read(path)
            if path.endswith(".py"):
                self._facts[path] = _facts_or_none(content, path)
        return self._stamps[path]

    def _read(self, path: str) -> tuple[Stamp, bytes]:
        try:
            with (self.root / path).open("rb") as file:
                changed = os.fstat(file.fileno()).st_ctime_ns  # before reading: `unchanged` notices later changes
                content = file.read()
        except OSError:
            return REMOVED, b""
        return Stamp(hashlib.sha256(content).hexdigest(), changed), content

    def unchanged(self, paths: Iterable[str]) -> bool:
        """Whether none of these files has been written to, or removed, since it was read."""
        try:
            return all((self.root / path).stat().st_ctime_ns == self.stamp(path).changed_ns for path in paths)
        except OSError:
            return False

    def digest(self, module: str, *more: str) -> str:
        """One hash of the names and contents of all files that the test module can depend on, and of `more`."""
        lines = [*more, *(f"{path} {self.stamp(path).sha256}" for path in sorted(self.closure(module)))]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:24]

    def closure(self, module: str) -> frozenset[str]:
        """All files that the outcome of this test module can depend on."""
        if module not in self._closures:
            self._closures[module] = self._find_closure(module)
        return self._closures[module]

    def _find_closure(self, module: str) -> frozenset[str]:
        folders = [parent.as_posix() for parent in Path(module).parents]
        waiting = {module, *(f"{folder}/conftest.py" for folder in folders)}.intersection(self.files)
        for place in ALWAYS:
            waiting |= self.under(place)
        found: set[str] = set()
        while waiting:
            path = waiting.pop()
            found.add(path)
            waiting |= self.needs(path) - found
        return frozenset(found)

    def needs(self, path: str) -> frozenset[str]:
        """The files that a file names or opens itself."""
        if path not in self._needs:
            self._needs[path] = self._find_needs(path)
        return self._needs[path]

    def _find_needs(self, path: str) -> frozenset[str]:
        if not path.endswith(".py") or path.split("/")[0] not in PACKAGES:
            return frozenset()
        self.stamp(path)
        facts, found = self._facts[path], {*self._packages_above(path), *self._data_beside(path)}
        if facts is None:
            return self._file_set
        for name in facts.imports:
            found |= self._imported(name)
        for name in facts.mentions:
            found |= self._mentioned(name)
        for name in facts.packages:
            found |= self.under(name)
        for name in self._paths(path, facts):
            found |= self._files_at(name)
        for name in facts.located:
            found |= {each for file in self._imported(name) for each in self.under(file.rpartition("/")[0])}
        if facts.reads_own_folder and path.count("/") > 1:
            found |= self.under(path.rpartition("/")[0])
        if (facts.starts_processes or facts.computes_imports) and path not in NAMED_PROCESSES:
            found |= self.under("cluster")
        return frozenset(found)

    def _packages_above(self, path: str) -> Iterator[str]:
        """`__init__.py` of every package that the file is in."""
        parts = path.split("/")[:-1]
        every = ("/".join([*parts[:at], "__init__.py"]) for at in range(1, len(parts) + 1))
        return (each for each in every if each in self._file_set)

    def _data_beside(self, path: str) -> frozenset[str]:
        """Files that are not Python in the same folder of `cluster` or `tests`, such as C sources and tables."""
        top, *between = path.split("/")[:-1]
        place = "/".join([top, *between[:1]])
        if place in self._data:
            return self._data[place]
        below = (each for each in self.under(place) if not each.endswith(".py"))
        loose = frozenset(each for each in below if between or each.count("/") == 1)
        self._data[place] = loose
        return loose

    def _imported(self, name: str) -> set[str]:
        """The file of a module, or of the module that defines a name: `cluster.kv.pool.Pool` is in
        `cluster/kv/pool.py`.
        """
        while name.split(".")[0] in PACKAGES:
            path = name.replace(".", "/")
            if found := {f"{path}.py", f"{path}/__init__.py"} & self._file_set:
                return found
            name = name.rpartition(".")[0]
        return set()

    def _mentioned(self, name: str) -> set[str]:
        """As `_imported`, but all files of a package, because a string may be only the beginning of a name."""
        found = self._imported(name)
        return {file for path in found for file in self._files_of_module(path)}

    def _files_of_module(self, path: str) -> frozenset[str]:
        return self.under(path.removesuffix("/__init__.py")) if path.endswith("/__init__.py") else frozenset({path})

    def _paths(self, path: str, facts: Facts) -> set[str]:
        """The strings of a file that may be paths of files at the root of the checkout.

        The product has words such as `cluster` and `docs` as strings for other reasons: a logger's name, a URL.
        """
        found = set(facts.paths)
        if path.startswith("cluster/"):
            found = {each for each in found if "/" in each or "." in each}
        if path.startswith("tests/"):
            found |= {word for word in facts.words if "/" in word or facts.starts_processes}
        return {place for each in found for place in [each.removeprefix("./")] if place.split("/")[0] in self.entries}

    def _files_at(self, place: str) -> frozenset[str]:
        """The file or files at a path; if the path does not exist, those at its nearest parent that exists."""
        while not (found := self.under(place)) and "/" in place:
            place = place.rpartition("/")[0]
        return found


def _facts_or_none(source: bytes, path: str) -> Facts | None:
    """The facts of a source; None if it is not Python, so that its needs are unknown."""
    try:
        return facts_of(source, path)
    except (SyntaxError, ValueError):  # ValueError: the source has null bytes
        return None
