"""Compiles the C kernels where the package is built; everything else is in pyproject.toml.

A wheel gets those for every level of vector instructions. Without a compiler it gets none: torch serves in their place.
"""

import importlib.util
import sys
from pathlib import Path

from setuptools import Distribution, setup
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


class WithLibraries(Distribution):
    """A package whose wheels are for one platform."""

    def has_ext_modules(self) -> bool:
        """Asked by setuptools."""
        return True


setup(cmdclass={"build_py": BuildWithKernels}, distclass=WithLibraries)
