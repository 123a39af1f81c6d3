"""The files on which a test module depends: each rule is tested in a small checkout, all rules together in this one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.verify.closure import NAMED_PROCESSES, Checkout
from tests.verify.surroundings import IGNORED, counts
from tests.verify_runs.trees import rewrite, write

ROOT = Path(__file__).resolve().parents[2]
TEST_MODULE = "tests/of/test_one.py"

DEPENDENCIES = {
    "itself": ("", TEST_MODULE),
    "an import": ("", "cluster/near.py"),
    "an import of an import": ("", "cluster/far.py"),
    "a package around an import": ("", "cluster/__init__.py"),
    "a conftest of its folder": ("", "tests/of/conftest.py"),
    "a conftest of a parent folder": ("", "tests/conftest.py"),
    "an import of a conftest": ("", "tests/shared.py"),
    "a data file of its folder": ("", "tests/of/table.json"),
    "settings of pytest": ("", "pyproject.toml"),
    "a model": ("", "models/weights.bin"),
    "an import inside a function": ("def f():\n    import cluster.apart\n", "cluster/apart.py"),
    "a relative import": ("from ..other import test_two\n", "tests/other/test_two.py"),
    "C sources of a package": ("import cluster.kernels.build\n", "cluster/kernels/c/sum.c"),
    "import_module": ("import importlib\nimportlib.import_module('cluster.apart')\n", "cluster/apart.py"),
    "a computed module name": ("import importlib\nimportlib.import_module(input())\n", "cluster/apart.py"),
    "a relative module name": ("import importlib\nimportlib.import_module('.apart', 'cluster')\n", "cluster/apart.py"),
    "the path of a package": ("from cluster import server as s\nX = s.__path__\n", "cluster/server/main.py"),
    "a package name that begins a string": ("x = f'cluster.server.{ONE}'\n", "cluster/server/main.py"),
    "the top package's name that begins a string": ("x = f'cluster.{ONE}'\n", "cluster/server/main.py"),
    "a factory": ("FACTORY = 'cluster.apart:make'\n", "cluster/apart.py"),
    "code in a string": ("CODE = 'from cluster import apart'\n", "cluster/apart.py"),
    "a process": ("import subprocess\n", "cluster/server/main.py"),
    "Ray": ("def f():\n    import ray\n", "cluster/server/main.py"),
    "a program started by os.execv": ("import os\nx = os.execv\n", "cluster/server/main.py"),
    "a page, by its path": ("PAGE = 'docs/page.md'\n", "docs/page.md"),
    "a page, by its folder": ("PAGE = ROOT / 'docs' / name\n", "docs/page.md"),
    "a page, inside a longer string": ("PAGE = f'{ROOT}/docs/page.md'\n", "docs/page.md"),
    "its own folder": ("from pathlib import Path\nX = Path(__file__).parent.glob('*.py')\n", "tests/of/__init__.py"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DEPENDENCIES)
def test_digest_changes_when_a_dependency_of_the_test_module_changes(tmp_path: Path, kind: str) -> None:
    added_source, path = DEPENDENCIES[kind]
    source = "from cluster.near import VALUE\n" + added_source
    write(tmp_path, **{TEST_MODULE: source})
    before = Checkout(tmp_path).digest(TEST_MODULE)
    assert Checkout(tmp_path).digest(TEST_MODULE) == before
    rewrite(tmp_path, {path: (tmp_path / path).read_text() + "\n# changed\n"})
    assert Checkout(tmp_path).digest(TEST_MODULE) != before


@pytest.mark.parametrize("path", ["cluster/apart.py", "cluster/server/main.py", "docs/page.md", "README.md",
                                  "tests/other/test_two.py", "cluster/kernels/c/sum.c"])  # fmt: skip
def test_digest_stays_when_an_unrelated_file_changes(tmp_path: Path, path: str) -> None:
    before = Checkout(write(tmp_path)).digest(TEST_MODULE)
    rewrite(tmp_path, {path: "CHANGED = 1\n"})
    assert Checkout(tmp_path).digest(TEST_MODULE) == before


def test_digest_changes_when_a_file_is_added_or_removed(tmp_path: Path) -> None:
    digests = [Checkout(write(tmp_path)).digest(TEST_MODULE)]
    (tmp_path / "tests/shared.py").unlink()
    digests.append(Checkout(tmp_path).digest(TEST_MODULE))
    rewrite(tmp_path, {"tests/of/more.json": "{}"})
    digests.append(Checkout(tmp_path).digest(TEST_MODULE))
    rewrite(tmp_path, {"cluster/near/__init__.py": ""})  # a package goes before a module of the same name
    digests.append(Checkout(tmp_path).digest(TEST_MODULE))
    assert len(set(digests)) == len(digests)


def test_checkout_notices_a_file_modified_after_reading(tmp_path: Path) -> None:
    checkout = Checkout(write(tmp_path))
    checkout.digest(TEST_MODULE)
    assert checkout.unchanged(checkout.closure(TEST_MODULE))
    os.utime(tmp_path / "cluster/far.py", ns=(1, 1))
    assert not checkout.unchanged(checkout.closure(TEST_MODULE))


ENVIRONMENT_READ = re.compile(r"""environ(?:\.get|\.setdefault|\.pop)?[(\[]\s*["'](\w+)["']|getenv\(\s*["'](\w+)["']""")


def test_every_environment_variable_in_sources_counts_or_is_ignored() -> None:
    sources = [path for top in ("cluster", "tests") for path in (ROOT / top).rglob("*.py")]
    matches = [pair for path in sources for pair in ENVIRONMENT_READ.findall(path.read_text(encoding="utf-8"))]
    variable_names = {name for pair in matches for name in pair if name}
    assert {"OVERLAP", "BACKEND", "CC"} <= variable_names
    assert {name for name in variable_names if not counts(name)} - IGNORED == set()


def test_files_in_named_processes_exist() -> None:
    assert [path for path in NAMED_PROCESSES if not (ROOT / path).is_file()] == []


LIST_LOADED_MODULES = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps([module.__file__ for module in list(sys.modules.values()) if getattr(module, "__file__", None)]))
"""


@pytest.mark.slow
def test_closure_contains_every_checkout_module_loaded_at_run_time() -> None:
    """Covers a test module, and a module that runs in the processes that another test module starts."""
    modules, checkout = ("tests/parity/test_planted_bugs.py", "tests/distributed/worker.py"), Checkout(ROOT)
    closure_paths = checkout.closure(modules[0]) | checkout.closure(modules[1])
    assert modules[1] in checkout.closure("tests/distributed/test_fuzz.py")
    command = [
        sys.executable,
        "-c",
        LIST_LOADED_MODULES,
        *(module.removesuffix(".py").replace("/", ".") for module in modules),
    ]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [Path(file_name) for file_name in json.loads(process.stdout.splitlines()[-1])]
    loaded = {path.relative_to(ROOT).as_posix() for path in paths if path.is_relative_to(ROOT) and path.suffix == ".py"}
    loaded = {path for path in loaded if not path.startswith(".venv/")}
    assert len(loaded) > 100
    assert loaded - closure_paths == set()
