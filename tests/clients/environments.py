"""The environments in which clients run: a folder of its own for each, with packages of PyPI, of npm, or of neither."""

import json
import os
import re
import shutil
import subprocess
import venv
from dataclasses import dataclass
from pathlib import Path


class Missing(ValueError):
    """This machine lacks a program that a client needs; the message says what to install."""


@dataclass(frozen=True)
class Packages:
    """What is installed for a client.

    `pip` and `npm` are names as these programs take them, perhaps with a version. `removes` are packages of PyPI that
    others bring along and that must not be there. `copies` are files that have to lie beside `node_modules`, because
    node looks there for what they import.
    """

    pip: tuple[str, ...] = ()
    npm: tuple[str, ...] = ()
    removes: tuple[str, ...] = ()
    copies: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Environment:
    """A folder with the packages of a client."""

    folder: Path
    packages: Packages

    def make(self) -> None:
        """Install the packages, unless the folder has these already. The newest versions come; then they stay.

        Raises:
            Missing: there is no npm.
        """
        listed = json.dumps([self.packages.pip, self.packages.npm, self.packages.removes])
        mark = self.folder / "installed"
        if not mark.exists() or mark.read_text() != listed:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            if self.packages.pip:
                self._install_pip()
            if self.packages.npm:
                self._install_npm()
            mark.write_text(listed)
        for file in self.packages.copies:
            shutil.copy(file, self.folder)

    def program(self, name: str) -> str:
        """The path of a program: that of the environment, else that of the machine.

        Raises:
            Missing: neither has it.
        """
        places = [str(self.folder / "bin"), str(self.folder / "node_modules" / ".bin"), os.environ.get("PATH", "")]
        found = shutil.which(name, path=os.pathsep.join(places))
        if found is None:
            raise Missing(f"no {name!r} on the PATH; install it")
        return found

    def versions(self) -> list[str]:
        """`NAME VERSION` of each package that was asked for."""
        asked = "import sys, importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in sys.argv[1:]), sep='\\n')"
        said = []
        if self.packages.pip:
            command = [str(self.folder / "bin" / "python"), "-c", asked, *map(_bare, self.packages.pip)]
            said += subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
        for name in map(_bare, self.packages.npm):
            about = json.loads((self.folder / "node_modules" / name / "package.json").read_text())
            said.append(f"{name} {about['version']}")
        return said

    def _install_pip(self) -> None:
        venv.create(self.folder, with_pip=True)
        pip = [str(self.folder / "bin" / "python"), "-m", "pip", "-q"]
        subprocess.run([*pip, "install", *self.packages.pip], check=True)
        if self.packages.removes:
            subprocess.run([*pip, "uninstall", "-y", *self.packages.removes], check=True)

    def _install_npm(self) -> None:
        npm = shutil.which("npm")
        if npm is None:
            raise Missing("no npm on the PATH; install it (Debian: npm)")
        (self.folder / "package.json").write_text(json.dumps({"private": True}))
        command = [npm, "install", "--no-audit", "--no-fund", "--loglevel=error", *self.packages.npm]
        subprocess.run(command, cwd=self.folder, check=True)


def _bare(package: str) -> str:
    """The name of a package without version and extras: `ai` of `ai@latest`, `aiperf` of `aiperf[x]>=1`."""
    found = re.match(r"@?[^@\[<>=!~]+", package)
    assert found is not None, package
    return found.group()
