"""Compiles the C kernels where the package is built; everything else is in pyproject.toml.

A wheel gets those for every level of vector instructions, and fits every Python: ctypes loads them. Without a compiler
it gets none: torch serves in their place.
"""

import importlib.util
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNELS = "cluster/kernels"


class BuildWithKernels(build_py):
    """Copies the package, and compiles its kernels into the copy; of an editable installation into the checkout."""

    def run(self) -> None:
        """Called by setuptools."""
        super().run()
        spec = importlib.util.spec_from_file_location(
            "aerie_kernels_build", Path(__file__).parent / KERNELS / "build.py"
        )
        assert spec is not None and spec.loader is not None
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        folder = build.COMPILED if self.editable_mode else Path(self.build_lib) / KERNELS / "compiled"
        try:
            build.compile_all(folder)
        except (build.BuildError, OSError) as error:
            print(f"warning: no C kernels are compiled: {error}", file=sys.stderr)


class WheelOfAnyPython(bdist_wheel):
    """A wheel for one platform, but not for one Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Called by setuptools: the parts of the wheel's name that say what it fits."""
        return "py3", "none", super().get_tag()[2]


class WithLibraries(Distribution):
    """A package whose wheels are for one platform."""

    def has_ext_modules(self) -> bool:
        """Asked by setuptools."""
        return True


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelOfAnyPython}, distclass=WithLibraries)
