"""The architecture as a test: imports point down, files stay small, nothing hides in a drawer, nothing unpickles.

`LAYERS` stands in docs/architecture.md too, bottom first. A module may import its own layer and the ones before it.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "cluster"

GROUND = ("__init__", "config", "request", "status", "batch", "paths")
LAYERS = (
    "ground",
    "observability",
    "device",
    "capture",
    "distributed",
    "tokenizer",
    "grammar",
    "chat",
    "arch",
    "kernels",
    "kv",
    "attention",
    "models",
    "sampling",
    "spec",
    "dp_attention",
    "engine",
    "actors",
    "api",
    "offline",
    "tools",
    "train",
    "bench",
    "cli",
)
# The houses of a layer: what a module under the first name never imports.
HOUSES = {
    "cluster.api.core": (
        "cluster.api.openai",
        "cluster.api.anthropic",
        "cluster.api.http",
        "cluster.api.launch",
        "cluster.api.serve",
        "cluster.api.app",
    ),
    "cluster.api.openai": (
        "cluster.api.anthropic",
        "cluster.api.http",
        "cluster.api.launch",
        "cluster.api.serve",
        "cluster.api.app",
    ),
    "cluster.api.anthropic": (
        "cluster.api.openai.responses",
        "cluster.api.http",
        "cluster.api.launch",
        "cluster.api.serve",
        "cluster.api.app",
    ),
    "cluster.api.http": ("cluster.api.launch", "cluster.api.serve", "cluster.api.app"),
    "cluster.api.serve": ("cluster.api.launch", "cluster.api.app"),
    "cluster.api.launch": ("cluster.api.openai", "cluster.api.anthropic", "cluster.api.http"),
    "cluster.api.proxy": (
        "cluster.api.core",
        "cluster.api.openai",
        "cluster.api.http",
        "cluster.api.launch",
        "cluster.api.serve",
        "cluster.api.app",
    ),
    "cluster.arch.safetensors": ("cluster.arch.draft", "cluster.arch.families", "cluster.arch.read"),
}
# Where the rule is narrower than "everything before": training stands beside the engine, not on it.
MAY_IMPORT = {"train": frozenset(LAYERS[: LAYERS.index("models") + 1])}
KNOWS_RAY = frozenset({"actors", "api", "bench", "cli"})
# The only files that import by string, and why. Constant strings are held to the layers and the cycle check as well.
LATE_IMPORTS = {
    "cluster/__init__.py": "the offline door needs torch, and most who import the package don't",
    "cluster/cli.py": "a subcommand is imported only when it is chosen",
    "cluster/engine/backends.py": "Triton takes a second to load, and only GPUs need it",
    "cluster/kernels/flashinfer/library.py": "FlashInfer is an extra, and only GPUs have it",
    "cluster/actors/shard.py": "the replica names the engine's factory, so that tests can put in another",
    "cluster/tools/inspect.py": "torch is imported only where more than a summary is asked for",
    "cluster/tools/chat.py": "torch is imported only where the engine runs in this process",
    "cluster/api/serve/rest_parts.py": "a replica imports its REST side while its shards start",
    "cluster/api/launch/serve.py": "Ray starts while the application is imported",
}
DRAWERS = frozenset({"util", "utils", "common", "helper", "helpers", "misc"})
MAX_LINES = 400
MAX_FUNCTION = 60  # lines of code; Triton's kernels (gpu.py) inline everything, and are left out
ROOT_FILES = 5  # modules at the root of the package, beside __init__
ROLES = frozenset({"Size"})  # class names of a role that every module of a folder plays
UNSAFE_MODULES = frozenset({"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"})
UNSAFE_CALLS = frozenset(
    {
        "eval",
        "exec",
        "torch.load",
        "all_gather_object",
        "broadcast_object_list",
        "gather_object",
        "recv_object_list",
        "scatter_object_list",
        "send_object_list",
    }
)

SOURCES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def where(path: Path, node: ast.AST | None = None) -> str:
    line = f":{node.lineno}" if node is not None and hasattr(node, "lineno") else ""
    return f"{path.relative_to(ROOT)}{line}"


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str:
    """The layer of `cluster.x.y`; an unknown top-level name is an error, so that every new one gets a place."""
    top = module.split(".")[1] if "." in module else "__init__"
    layer = "ground" if top in GROUND else "cli" if top == "__main__" else top
    assert layer in LAYERS, f"{module} belongs to no layer; give {top!r} a place in tests/test_layers.py"
    return layer


def imports_of(path: Path, tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Every imported module by its full name; `from a import b` counts as `a.b` where that is a module of ours."""
    package = module_of(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            name = ".".join(part for part in (base, node.module) if part)
            for alias in node.names:
                inner = f"{name}.{alias.name}"
                yield node, inner if inner in MODULES else name
        elif is_import_by_string(node):
            yield from ((node, str(said.value)) for said in asked_by_string(node) if isinstance(said, ast.Constant))


MODULES = {module_of(path) for path in SOURCES}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imports_by_string(node: ast.expr) -> bool:
    return dotted(node).split(".")[-1] in {"import_module", "__import__"}


def is_import_by_string(node: ast.AST) -> TypeGuard[ast.Call]:
    """Whether a call imports what a string names, or hands the function that does to somebody else."""
    return isinstance(node, ast.Call) and any(imports_by_string(part) for part in (node.func, *node.args))


def asked_by_string(call: ast.Call) -> list[ast.expr]:
    """The expression that names the module: the first argument, or the one after the function that is handed on."""
    at = next((at for at, part in enumerate(call.args) if imports_by_string(part)), -1)
    return call.args[at + 1 : at + 2]


def is_ours(name: str) -> bool:
    return name.split(".")[0] == "cluster"


def test_modules_import_only_lower_layers() -> None:
    wrong = []
    for path in SOURCES:
        layer = layer_of(module_of(path))
        allowed = MAY_IMPORT.get(layer, frozenset(LAYERS[: LAYERS.index(layer)])) | {layer}
        for node, name in imports_of(path, tree_of(path)):
            if is_ours(name) and layer_of(name) not in allowed:
                wrong.append(f"{where(path, node)}: {layer} imports {name}")
    assert not wrong, "\n".join(wrong)


def within(module: str, house: str) -> bool:
    return module == house or module.startswith(f"{house}.")


def test_packages_do_not_import_their_forbidden_packages() -> None:
    wrong = []
    for path in SOURCES:
        forbidden = [closed for house, others in HOUSES.items() if within(module_of(path), house) for closed in others]
        for node, name in imports_of(path, tree_of(path)):
            wrong += [f"{where(path, node)}: imports {name}" for house in forbidden if within(name, house)]
    assert not wrong, "\n".join(wrong)
    assert all(any(within(module, house) for module in MODULES) for house in HOUSES)


def test_no_import_cycles() -> None:
    graph = {
        module_of(path): {name for _, name in imports_of(path, tree_of(path)) if name in MODULES} for path in SOURCES
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join([*trail[trail.index(module) :], module])
        if module not in done:
            for name in sorted(graph[module] - {module}):
                visit(name, (*trail, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


def test_functions_contain_no_imports_of_cluster_modules() -> None:
    wrong = []
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                statements = [found for found in imports_of(path, node) if isinstance(found[0], ast.stmt)]
                wrong += [where(path, found) for found, name in statements if is_ours(name)]
            elif is_import_by_string(node) and where(path) not in LATE_IMPORTS:
                names = [name for found, name in imports_of(path, node) if found is node]
                if not names or is_ours(names[0]):
                    wrong.append(where(path, node))
    assert not wrong, f"imported inside a function: {wrong}"


def test_ray_is_imported_only_above_the_engine() -> None:
    wrong = [
        where(path, node)
        for path in SOURCES
        if layer_of(module_of(path)) not in KNOWS_RAY
        for node, name in imports_of(path, tree_of(path))
        if name.split(".")[0] == "ray"
    ]
    assert not wrong, f"imports ray below the actors: {wrong}"


def test_the_engine_imports_without_ray() -> None:
    assert (PACKAGE / "engine" / "build.py").exists(), "cluster/engine/build.py does not exist"
    code = (
        "import sys, cluster.engine\n"
        "found = sorted(m for m in sys.modules if m.split('.')[0] in {'ray', 'fastapi', 'starlette', 'xgrammar'})\n"
        "sys.exit(f'import cluster.engine pulled in {found[:5]}' if found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("paths", [SOURCES, TESTS], ids=["cluster", "tests"])
def test_file_names_are_not_generic(paths: list[Path]) -> None:
    wrong = [where(path) for path in paths if DRAWERS & set(path.relative_to(ROOT).with_suffix("").parts)]
    assert not wrong, f"name a file for the noun it owns or the verb it does: {wrong}"


@pytest.mark.parametrize("paths", [SOURCES, TESTS], ids=["cluster", "tests"])
def test_files_stay_small(paths: list[Path]) -> None:
    lengths = {where(path): len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    long = {name: lines for name, lines in lengths.items() if lines > MAX_LINES}
    assert not long, f"over {MAX_LINES} lines: {long}"


def test_functions_stay_small() -> None:
    long = []
    for path in SOURCES:
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in ast.walk(tree_of(path)) if path.name != "gpu.py" else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                code = lines[node.lineno - 1 : node.end_lineno]
                said = len((ast.get_docstring(node, clean=False) or "").splitlines())
                count = len([line for line in code if line.strip() and not line.strip().startswith("#")]) - said
                if count > MAX_FUNCTION:
                    long.append(f"{where(path, node)} {node.name}: {count}")
    assert not long, f"over {MAX_FUNCTION} lines of code: {long}"


def test_package_root_holds_few_files() -> None:
    found = sorted(path.name for path in PACKAGE.glob("*.py") if path.stem != "__init__")
    assert len(found) <= ROOT_FILES, f"give these files a folder: {found}"


def test_class_names_are_unique() -> None:
    places: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef) and node.name not in ROLES:
                places.setdefault(node.name, []).append(where(path, node))
    shared = {name: found for name, found in places.items() if len(found) > 1}
    assert not shared, f"two classes with one name: {shared}"


def resumes_training(path: Path, call: ast.Call, name: str) -> bool:
    """Training may read its own optimizer state back, through the unpickler that builds tensors and nothing else."""
    safe = any(
        keyword.arg == "weights_only" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        for keyword in call.keywords
    )
    return name == "torch.load" and safe and layer_of(module_of(path)) == "train"


def test_sources_neither_unpickle_nor_evaluate_code() -> None:
    wrong = []
    for path in SOURCES:
        tree = tree_of(path)
        wrong += [
            f"{where(path, node)} imports {name}"
            for node, name in imports_of(path, tree)
            if name.split(".")[0] in UNSAFE_MODULES
        ]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "torch":
                wrong += [f"{where(path, node)} imports torch.load" for alias in node.names if alias.name == "load"]
            elif isinstance(node, ast.Call):
                name = dotted(node.func)
                if resumes_training(path, node, name):
                    continue
                if name in UNSAFE_CALLS or ("." in name and name.split(".")[-1] in UNSAFE_CALLS - {"eval", "exec"}):
                    wrong.append(f"{where(path, node)} calls {name}")
                if any(keyword.arg == "allow_pickle" for keyword in node.keywords):
                    wrong.append(f"{where(path, node)} passes allow_pickle")
    assert not wrong, "\n".join(wrong)
