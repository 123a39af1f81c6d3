"""Which files a test module depends on: each rule on a small checkout, and the whole of it on this one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ledger.closure import NAMED_PROCESSES, Checkout
from tests.ledger.surroundings import IGNORED, counts
from tests.unit.ledger.trees import rewrite, write

ROOT = Path(__file__).resolve().parents[3]
ONE = "tests/of/test_one.py"

NEEDED = {
    "itself": ("", ONE),
    "an import": ("", "cluster/near.py"),
    "an import of an import": ("", "cluster/far.py"),
    "a package around an import": ("", "cluster/__init__.py"),
    "a conftest beside": ("", "tests/of/conftest.py"),
    "a conftest above": ("", "tests/conftest.py"),
    "an import of a conftest": ("", "tests/shared.py"),
    "data beside": ("", "tests/of/table.json"),
    "settings of pytest": ("", "pyproject.toml"),
    "a model": ("", "models/weights.bin"),
    "an import inside a function": ("def f():\n    import cluster.apart\n", "cluster/apart.py"),
    "a relative import": ("from ..other import test_two\n", "tests/other/test_two.py"),
    "C sources of a package": ("import cluster.kernels.build\n", "cluster/kernels/c/sum.c"),
    "import_module": ("import importlib\nimportlib.import_module('cluster.apart')\n", "cluster/apart.py"),
    "a name that is computed": ("import importlib\nimportlib.import_module(input())\n", "cluster/apart.py"),
    "a name that is relative": ("import importlib\nimportlib.import_module('.apart', 'cluster')\n", "cluster/apart.py"),
    "the place of a package": ("from cluster import server as s\nX = s.__path__\n", "cluster/server/main.py"),
    "a name of a package that goes on": ("x = f'cluster.server.{ONE}'\n", "cluster/server/main.py"),
    "a name of this package that goes on": ("x = f'cluster.{ONE}'\n", "cluster/server/main.py"),
    "a factory": ("FACTORY = 'cluster.apart:make'\n", "cluster/apart.py"),
    "code in a string": ("CODE = 'from cluster import apart'\n", "cluster/apart.py"),
    "a process": ("import subprocess\n", "cluster/server/main.py"),
    "Ray": ("def f():\n    import ray\n", "cluster/server/main.py"),
    "a program in place of this one": ("import os\nx = os.execv\n", "cluster/server/main.py"),
    "a page, by its path": ("PAGE = 'docs/page.md'\n", "docs/page.md"),
    "a page, by its folder": ("PAGE = ROOT / 'docs' / name\n", "docs/page.md"),
    "a page, amid a string": ("PAGE = f'{ROOT}/docs/page.md'\n", "docs/page.md"),
    "its own folder": ("from pathlib import Path\nX = Path(__file__).parent.glob('*.py')\n", "tests/of/__init__.py"),
}  # fmt: skip


@pytest.mark.parametrize("kind", NEEDED)
def test_digest_changes_when_a_dependency_of_the_test_module_changes(tmp_path: Path, kind: str) -> None:
    added, path = NEEDED[kind]
    source = "from cluster.near import VALUE\n" + added
    write(tmp_path, **{ONE: source})
    before = Checkout(tmp_path).digest(ONE)
    assert Checkout(tmp_path).digest(ONE) == before
    rewrite(tmp_path, {path: (tmp_path / path).read_text() + "\n# changed\n"})
    assert Checkout(tmp_path).digest(ONE) != before


@pytest.mark.parametrize("path", ["cluster/apart.py", "cluster/server/main.py", "docs/page.md", "README.md",
                                  "tests/other/test_two.py", "cluster/kernels/c/sum.c"])  # fmt: skip
def test_digest_stays_when_an_unrelated_file_changes(tmp_path: Path, path: str) -> None:
    before = Checkout(write(tmp_path)).digest(ONE)
    rewrite(tmp_path, {path: "CHANGED = 1\n"})
    assert Checkout(tmp_path).digest(ONE) == before


def test_digest_changes_when_a_file_is_added_or_removed(tmp_path: Path) -> None:
    digests = [Checkout(write(tmp_path)).digest(ONE)]
    (tmp_path / "tests/shared.py").unlink()
    digests.append(Checkout(tmp_path).digest(ONE))
    rewrite(tmp_path, {"tests/of/more.json": "{}"})
    digests.append(Checkout(tmp_path).digest(ONE))
    rewrite(tmp_path, {"cluster/near/__init__.py": ""})  # a package goes before a module of the same name
    digests.append(Checkout(tmp_path).digest(ONE))
    assert len(set(digests)) == len(digests)


def test_checkout_notices_a_file_modified_after_reading(tmp_path: Path) -> None:
    checkout = Checkout(write(tmp_path))
    checkout.digest(ONE)
    assert checkout.unchanged(checkout.closure(ONE))
    os.utime(tmp_path / "cluster/far.py", ns=(1, 1))
    assert not checkout.unchanged(checkout.closure(ONE))


READ = re.compile(r"""environ(?:\.get|\.setdefault|\.pop)?[(\[]\s*["'](\w+)["']|getenv\(\s*["'](\w+)["']""")


def test_every_environment_variable_in_sources_counts_or_is_ignored() -> None:
    sources = [path for top in ("cluster", "tests") for path in (ROOT / top).rglob("*.py")]
    found = [pair for path in sources for pair in READ.findall(path.read_text(encoding="utf-8"))]
    read = {name for pair in found for name in pair if name}
    assert {"OVERLAP", "BACKEND", "CC"} <= read
    assert {name for name in read if not counts(name)} - IGNORED == set()


def test_files_in_named_processes_exist() -> None:
    assert [path for path in NAMED_PROCESSES if not (ROOT / path).is_file()] == []


LOADED = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps([module.__file__ for module in list(sys.modules.values()) if getattr(module, "__file__", None)]))
"""


@pytest.mark.slow
def test_closure_contains_every_checkout_module_loaded_at_run_time() -> None:
    """A module of tests, and what the processes run that another module of tests starts."""
    modules, checkout = ("tests/parity/test_planted_bugs.py", "tests/ranks/worker.py"), Checkout(ROOT)
    found = checkout.closure(modules[0]) | checkout.closure(modules[1])
    assert modules[1] in checkout.closure("tests/ranks/test_fuzz.py")
    command = [sys.executable, "-c", LOADED, *(module.removesuffix(".py").replace("/", ".") for module in modules)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [Path(each) for each in json.loads(done.stdout.splitlines()[-1])]
    loaded = {path.relative_to(ROOT).as_posix() for path in paths if path.is_relative_to(ROOT) and path.suffix == ".py"}
    loaded = {path for path in loaded if not path.startswith(".venv/")}
    assert len(loaded) > 100
    assert loaded - found == set()
