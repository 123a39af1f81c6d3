"""A wheel contains all that an installation outside the checkout needs: the package, its web page, and the C kernels
compiled for every level.
"""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from cluster.kernels.build import LEVELS, compiler
from cluster.kernels.library import library

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="without a compiler a wheel has no libraries")
def test_wheel_works_outside_the_checkout_with_all_kernel_levels(tmp_path: Path) -> None:
    """A Python process without access to the checkout loads the libraries of the wheel, and they have all functions."""
    sources = tmp_path / "sources"
    shutil.copytree(ROOT / "cluster", sources / "cluster", ignore=shutil.ignore_patterns("__pycache__", "compiled"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    build_command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(tmp_path),
        str(sources),
    ]
    subprocess.run(build_command, check=True, timeout=280)
    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    site = tmp_path / "site"
    libraries = {path.name.split("-")[1] for path in (site / "cluster/kernels/compiled").glob("*.so")}
    assert libraries == set(LEVELS)
    for source in (sources / "cluster").rglob("*"):
        if source.suffix in (".py", ".pyi", ".typed", ".c", ".h", ".js", ".css", ".html", ".svg"):
            assert (site / source.relative_to(sources)).read_bytes() == source.read_bytes(), source
    check = (
        "import cluster, cluster.kernels.library as kernels; found = kernels.library(); "
        "print(cluster.__file__, found.path, sorted({name for name, _ in found.functions}), sep='\\n')"
    )
    output_lines = subprocess.run(
        [sys.executable, "-P", "-c", check], cwd=tmp_path, env={"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin"},
        check=True, capture_output=True, text=True, timeout=120,
    ).stdout.splitlines()  # fmt: skip
    assert output_lines[0].startswith(str(site)) and output_lines[1].startswith(str(site)), output_lines
    local_library = library()
    assert local_library is not None and output_lines[2] == str(sorted({name for name, _ in local_library.functions}))
