"""The environments of the clients: each client has a folder with its packages from PyPI and from npm, if it has any."""

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
    """The packages that a client needs.

    `pip` and `npm` are package names for these programs, with an optional version. `removes` are packages from PyPI
    that other packages install and that must not be there. `copies` are files that must lie beside `node_modules`,
    because node looks there for the packages that these files import.
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
        """Install the newest versions of the packages, unless the folder has these packages already.

        Raises:
            Missing: there is no npm.
        """
        packages_json = json.dumps([self.packages.pip, self.packages.npm, self.packages.removes])
        stamp_file = self.folder / "installed"
        if not stamp_file.exists() or stamp_file.read_text() != packages_json:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            if self.packages.pip:
                self._install_pip()
            if self.packages.npm:
                self._install_npm()
            stamp_file.write_text(packages_json)
        for file in self.packages.copies:
            shutil.copy(file, self.folder)

    def program(self, name: str) -> str:
        """The path of a program in the environment, or else on the machine's PATH.

        Raises:
            Missing: the program is in neither.
        """
        search_path = [str(self.folder / "bin"), str(self.folder / "node_modules" / ".bin"), os.environ.get("PATH", "")]
        program_path = shutil.which(name, path=os.pathsep.join(search_path))
        if program_path is None:
            raise Missing(f"no {name!r} on the PATH; install it")
        return program_path

    def versions(self) -> list[str]:
        """`NAME VERSION` of each package in `packages.pip` and `packages.npm`."""
        version_code = (
            "import sys, importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in sys.argv[1:]), sep='\\n')"
        )
        names_with_versions = []
        if self.packages.pip:
            command = [str(self.folder / "bin" / "python"), "-c", version_code, *map(_package_name, self.packages.pip)]
            names_with_versions += subprocess.run(
                command, check=True, stdout=subprocess.PIPE, text=True
            ).stdout.splitlines()
        for name in map(_package_name, self.packages.npm):
            package_json = json.loads((self.folder / "node_modules" / name / "package.json").read_text())
            names_with_versions.append(f"{name} {package_json['version']}")
        return names_with_versions

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


def _package_name(package: str) -> str:
    """The name of a package without version and extras: `ai` of `ai@latest`, `aiperf` of `aiperf[x]>=1`."""
    name_match = re.match(r"@?[^@\[<>=!~]+", package)
    assert name_match is not None, package
    return name_match.group()
