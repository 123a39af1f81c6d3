"""A wheel has what an installation away from the checkout needs: the package, its page, compiled C of every level."""

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
    """Read in a Python that sees nothing of the checkout, its libraries load and have all functions."""
    sources = tmp_path / "sources"
    shutil.copytree(ROOT / "cluster", sources / "cluster", ignore=shutil.ignore_patterns("__pycache__", "compiled"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    made = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(sources)]
    subprocess.run(made, check=True, timeout=280)
    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as held:
        held.extractall(tmp_path / "site")
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
    said = subprocess.run(
        [sys.executable, "-P", "-c", check], cwd=tmp_path, env={"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin"},
        check=True, capture_output=True, text=True, timeout=120,
    ).stdout.splitlines()  # fmt: skip
    assert said[0].startswith(str(site)) and said[1].startswith(str(site)), said
    here = library()
    assert here is not None and said[2] == str(sorted({name for name, _ in here.functions}))
