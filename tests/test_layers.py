"""Tests of the architecture: imports go to lower layers only, files and functions stay small, no file has a generic
name such as `utils`, and no code unpickles data.

docs/architecture.md lists `LAYERS` too, from the lowest to the highest. A module may import modules of its own layer
and of the layers before it in the list.
"""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TypeGuard

import pytest

from tests.support.sources import PACKAGE, ROOT, SOURCES, nodes_of

GROUND_MODULES = ("__init__", "config", "request", "status", "batch", "paths")
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
# For each package: the packages of the same layer that its modules must not import.
FORBIDDEN_IMPORTS = {
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
# Layers that may import fewer layers than all before them: training does not use the engine.
MAY_IMPORT = {"train": frozenset(LAYERS[: LAYERS.index("models") + 1])}
RAY_LAYERS = frozenset({"actors", "api", "bench", "cli"})
# The only files that import a module by a string, and the reason. The layer tests and the cycle test also check
# constant strings.
STRING_IMPORTS = {
    "cluster/__init__.py": "the offline API needs torch, and most importers of the package do not",
    "cluster/cli.py": "a subcommand is imported only when it is chosen",
    "cluster/engine/backends.py": "Triton takes a second to load, and only GPUs need it",
    "cluster/kernels/flashinfer/library.py": "FlashInfer is an extra, and only GPUs have it",
    "cluster/actors/shard.py": "the replica names the engine's factory, so that tests can put in another",
    "cluster/tools/inspect.py": "torch is imported only where more than a summary is asked for",
    "cluster/tools/chat.py": "torch is imported only where the engine runs in this process",
    "cluster/api/serve/rest_parts.py": "a replica imports its REST side while its shards start",
    "cluster/api/launch/serve.py": "Ray starts while the application is imported",
}
GENERIC_NAMES = frozenset({"util", "utils", "common", "helper", "helpers", "misc"})
MAX_LINES = 400
MAX_FUNCTION_LINES = 60  # lines of code; Triton kernels (files gpu.py) are excluded, because they inline everything
MAX_ROOT_FILES = 5  # modules at the root of the package, __init__ not counted
SHARED_CLASS_NAMES = frozenset({"Size"})  # class names that each module of a folder defines for itself
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

TESTS = sorted((ROOT / "tests").rglob("*.py"))


def location(path: Path, node: ast.AST | None = None) -> str:
    line = f":{node.lineno}" if node is not None and hasattr(node, "lineno") else ""
    return f"{path.relative_to(ROOT)}{line}"


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str:
    """Return the layer of the module `cluster.x.y`. An unknown `x` is an error: a new package must be added here."""
    top = module.split(".")[1] if "." in module else "__init__"
    layer = "ground" if top in GROUND_MODULES else "cli" if top == "__main__" else top
    assert layer in LAYERS, f"{module} belongs to no layer; add {top!r} to LAYERS in tests/test_layers.py"
    return layer


@cache
def imports_of(path: Path) -> list[tuple[ast.AST, str]]:
    """Return the import statements of a file."""
    return list(imports_among(path, nodes_of(path)))


def imports_among(path: Path, nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.AST, str]]:
    """Yield each import statement with the full name of the imported module.

    `from a import b` counts as `a.b` if that is a module of `cluster`.
    """
    package = module_of(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            name = ".".join(part for part in (base, node.module) if part)
            for alias in node.names:
                full_name = f"{name}.{alias.name}"
                yield node, full_name if full_name in MODULES else name
        elif is_import_by_string(node):
            yield from (
                (node, str(argument.value))
                for argument in string_import_arguments(node)
                if isinstance(argument, ast.Constant)
            )


MODULES = {module_of(path) for path in SOURCES}


def dotted_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imports_by_string(node: ast.expr) -> bool:
    return dotted_name(node).split(".")[-1] in {"import_module", "__import__"}


def is_import_by_string(node: ast.AST) -> TypeGuard[ast.Call]:
    """Return whether a call imports a module by a string, or passes `import_module` to another function."""
    return isinstance(node, ast.Call) and any(imports_by_string(expression) for expression in (node.func, *node.args))


def string_import_arguments(call: ast.Call) -> list[ast.expr]:
    """Return the argument that names the module: the first one, or the one after `import_module`."""
    position = next((position for position, expression in enumerate(call.args) if imports_by_string(expression)), -1)
    return call.args[position + 1 : position + 2]


def is_cluster_module(name: str) -> bool:
    return name.split(".")[0] == "cluster"


def test_modules_import_only_lower_layers() -> None:
    violations = []
    for path in SOURCES:
        layer = layer_of(module_of(path))
        allowed = MAY_IMPORT.get(layer, frozenset(LAYERS[: LAYERS.index(layer)])) | {layer}
        for node, name in imports_of(path):
            if is_cluster_module(name) and layer_of(name) not in allowed:
                violations.append(f"{location(path, node)}: {layer} imports {name}")
    assert not violations, "\n".join(violations)


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def test_packages_do_not_import_their_forbidden_packages() -> None:
    violations = []
    for path in SOURCES:
        forbidden = [
            forbidden_package
            for package, forbidden_packages in FORBIDDEN_IMPORTS.items()
            if within(module_of(path), package)
            for forbidden_package in forbidden_packages
        ]
        for node, name in imports_of(path):
            violations += [f"{location(path, node)}: imports {name}" for package in forbidden if within(name, package)]
    assert not violations, "\n".join(violations)
    assert all(any(within(module, package) for module in MODULES) for package in FORBIDDEN_IMPORTS)


def test_no_import_cycles() -> None:
    graph = {module_of(path): {name for _, name in imports_of(path) if name in MODULES} for path in SOURCES}
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
    violations = []
    for path in SOURCES:
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                violations += [
                    location(path, import_node)
                    for import_node, name in imports_among(path, ast.walk(node))
                    if isinstance(import_node, ast.stmt) and is_cluster_module(name)
                ]
            elif is_import_by_string(node) and location(path) not in STRING_IMPORTS:
                names = [name for _, name in imports_among(path, [node])]
                if not names or is_cluster_module(names[0]):
                    violations.append(location(path, node))
    assert not violations, f"imported inside a function: {violations}"


@pytest.mark.parametrize("name", STRING_IMPORTS)
def test_listed_files_still_import_a_module_by_a_string(name: str) -> None:
    assert (ROOT / name).is_file(), "STRING_IMPORTS lists a file that does not exist"
    assert any(is_import_by_string(node) for node in nodes_of(ROOT / name)), (
        "STRING_IMPORTS lists a file that does not import a module by a string"
    )


def test_ray_is_imported_only_above_the_engine() -> None:
    violations = [
        location(path, node)
        for path in SOURCES
        if layer_of(module_of(path)) not in RAY_LAYERS
        for node, name in imports_of(path)
        if name.split(".")[0] == "ray"
    ]
    assert not violations, f"import of ray in a layer below `actors`: {violations}"


def test_the_engine_imports_without_ray() -> None:
    assert (PACKAGE / "engine" / "build.py").exists(), "cluster/engine/build.py does not exist"
    code = (
        "import sys, cluster.engine\n"
        "found = sorted(m for m in sys.modules if m.split('.')[0] in {'ray', 'fastapi', 'starlette', 'xgrammar'})\n"
        "sys.exit(f'import cluster.engine pulled in {found[:5]}' if found else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("paths", [SOURCES, TESTS], ids=["cluster", "tests"])
def test_file_names_are_not_generic(paths: list[Path]) -> None:
    violations = [location(path) for path in paths if GENERIC_NAMES & set(path.relative_to(ROOT).with_suffix("").parts)]
    assert not violations, f"generic file names; name a file after what it contains or does: {violations}"


@pytest.mark.parametrize("paths", [SOURCES, TESTS], ids=["cluster", "tests"])
def test_files_stay_small(paths: list[Path]) -> None:
    lengths = {location(path): len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    too_long = {name: lines for name, lines in lengths.items() if lines > MAX_LINES}
    assert not too_long, f"over {MAX_LINES} lines: {too_long}"


def test_functions_stay_small() -> None:
    too_long = []
    for path in SOURCES:
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in nodes_of(path) if path.name != "gpu.py" else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                code = lines[node.lineno - 1 : node.end_lineno]
                docstring_lines = len((ast.get_docstring(node, clean=False) or "").splitlines())
                count = (
                    len([line for line in code if line.strip() and not line.strip().startswith("#")]) - docstring_lines
                )
                if count > MAX_FUNCTION_LINES:
                    too_long.append(f"{location(path, node)} {node.name}: {count}")
    assert not too_long, f"over {MAX_FUNCTION_LINES} lines of code: {too_long}"


def test_package_root_holds_few_files() -> None:
    found = sorted(path.name for path in PACKAGE.glob("*.py") if path.stem != "__init__")
    assert len(found) <= MAX_ROOT_FILES, (
        f"too many modules at the root of the package; move some into a folder: {found}"
    )


def test_class_names_are_unique() -> None:
    places: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef) and node.name not in SHARED_CLASS_NAMES:
                places.setdefault(node.name, []).append(location(path, node))
    shared = {name: found for name, found in places.items() if len(found) > 1}
    assert not shared, f"two classes with one name: {shared}"


def resumes_training(path: Path, call: ast.Call, name: str) -> bool:
    """Return whether a call is the allowed `torch.load`: training reads its own optimizer state.

    With `weights_only=True` the unpickler builds tensors and plain containers only.
    """
    safe = any(
        keyword.arg == "weights_only" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        for keyword in call.keywords
    )
    return name == "torch.load" and safe and layer_of(module_of(path)) == "train"


def test_sources_neither_unpickle_nor_evaluate_code() -> None:
    violations = []
    for path in SOURCES:
        violations += [
            f"{location(path, node)} imports {name}"
            for node, name in imports_of(path)
            if name.split(".")[0] in UNSAFE_MODULES
        ]
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and node.module == "torch":
                violations += [
                    f"{location(path, node)} imports torch.load" for alias in node.names if alias.name == "load"
                ]
            elif isinstance(node, ast.Call):
                name = dotted_name(node.func)
                if resumes_training(path, node, name):
                    continue
                if name in UNSAFE_CALLS or ("." in name and name.split(".")[-1] in UNSAFE_CALLS - {"eval", "exec"}):
                    violations.append(f"{location(path, node)} calls {name}")
                if any(keyword.arg == "allow_pickle" for keyword in node.keywords):
                    violations.append(f"{location(path, node)} passes allow_pickle")
    assert not violations, "\n".join(violations)
