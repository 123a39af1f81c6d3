"""A small checkout for tests of the ledger: a package, its tests, and a copy of the ledger itself."""

import shutil
from pathlib import Path

import tests.verify

FILES = {
    "pyproject.toml": "[tool.pytest.ini_options]\n",
    "README.md": "# Small\n",
    "docs/page.md": "one\n",
    "models/weights.bin": "1",
    "cluster/__init__.py": "",
    "cluster/near.py": "from cluster.far import VALUE\n",
    "cluster/far.py": "VALUE = 1\n",
    "cluster/apart.py": "",
    "cluster/server/__init__.py": "",
    "cluster/server/main.py": "",
    "cluster/kernels/__init__.py": "",
    "cluster/kernels/build.py": "",
    "cluster/kernels/c/sum.c": "int sum;",
    "tests/__init__.py": "",
    "tests/conftest.py": "from tests.shared import *\n",
    "tests/shared.py": "",
    "tests/of/__init__.py": "",
    "tests/of/conftest.py": "",
    "tests/of/table.json": "{}",
    "tests/of/test_one.py": "from cluster.near import VALUE\n\ndef test_a():\n    pass\n\ndef test_b():\n    pass\n",
    "tests/other/__init__.py": "",
    "tests/other/test_two.py": "def test_c():\n    pass\n",
}


def write(root: Path, **changed: str) -> Path:
    """Write the checkout, with other contents for some files."""
    return rewrite(root, FILES | changed)


def rewrite(root: Path, files: dict[str, str]) -> Path:
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content, encoding="utf-8")
    return root


def with_ledger(root: Path) -> Path:
    """Write the checkout, with the ledger, so that `pytest -p tests.verify.plugin` runs there."""
    shutil.copytree(Path(tests.verify.__file__).parent, root / "tests" / "verify")
    return write(root)
