"""Which other files a Python file needs, as far as its source shows. The file is parsed and not imported."""

import ast
import re
from dataclasses import dataclass

PACKAGES = ("cluster", "tests", "benchmarks")
_NAMES = "|".join(PACKAGES)
DOTTED = re.compile(rf"(?<![\w./-])(?:{_NAMES})(?:\.[A-Za-z_]\w*)+")
WHOLE_PACKAGE = re.compile(rf"\b(?:from|import)\s+({_NAMES})\b(?!\.)")
PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)*")
PROCESS_MODULES = {"subprocess", "multiprocessing", "ray", "runpy", "pty"}
"""Modules that start processes or run files. The imports of a test do not show what such a process imports."""
OS_START_FUNCTIONS = re.compile(r"exec[lv]\w*|posix_spawnp?|spawn[lv]\w*|system|popen")
"""Functions of `os` that start another program. `os.fork` is not among them: a fork runs the same program and has the
same modules.
"""
POOL = "ProcessPoolExecutor"


@dataclass(frozen=True, slots=True)
class Facts:
    """The names of modules and files in a Python file.

    `imports`: modules that import statements name, also statements inside functions. `from a import b` names `a` and
    `a.b`, because `b` may be a module. `mentions`: dotted names of modules in strings, for example the arguments of
    `import_module`, of `python -m`, and the names of factories. `packages`: packages that a string imports from,
    without naming a module. `paths`: strings that as a whole may be the path of a file. `words`: parts of longer
    strings that may be a path. `located`: modules whose path the file uses (`cluster.kernels.__file__`), to read files
    there. `starts_processes`: whether the file can start a process. `computes_imports`: whether the file imports a
    module whose name is not a constant. `reads_own_folder`: whether the file makes a path from `__file__` that is not
    the root of the checkout.
    """

    imports: frozenset[str]
    mentions: frozenset[str]
    packages: frozenset[str]
    paths: frozenset[str]
    words: frozenset[str]
    located: frozenset[str]
    starts_processes: bool
    computes_imports: bool
    reads_own_folder: bool


def facts_of(source: bytes, path: str) -> Facts:
    """Return the facts of a file, `path` relative to the root of the checkout.

    Raises:
        SyntaxError: the source is not Python.
    """
    nodes = list(ast.walk(ast.parse(source, filename=path)))
    strings = _strings(nodes)
    imports = frozenset(name for node in nodes for name in _imported(node, path))
    bound = _bound(nodes, path)
    return Facts(
        imports=imports,
        mentions=frozenset(name for text in strings for name in DOTTED.findall(text)),
        packages=frozenset(name for text in strings for name in _packages(text)),
        paths=frozenset(text.strip("/") for text in strings if PATH.fullmatch(text.strip("/"))),
        words=frozenset(word for text in strings for word in PATH.findall(text)),
        located=frozenset(name for node in nodes for name in _located(node, bound)),
        starts_processes=_starts_processes(nodes, imports),
        computes_imports=any(_is_computed_import(node) for node in nodes),
        reads_own_folder=_reads_own_folder(nodes, depth=path.count("/")),
    )


def _strings(nodes: list[ast.AST]) -> list[str]:
    """All string constants except docstrings, which have no effect."""
    documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    constants = [node for node in nodes if isinstance(node, ast.Constant) and id(node) not in documentation]
    texts = [node.value for node in constants if isinstance(node.value, str | bytes)]
    return [text if isinstance(text, str) else text.decode("latin-1") for text in texts]


def _packages(text: str) -> list[str]:
    package_prefixes = [name for name in PACKAGES if text == f"{name}."]  # the beginning of an f-string
    return package_prefixes + WHOLE_PACKAGE.findall(text)


def _imported(node: ast.AST, path: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        parent_packages = path.split("/")[: -node.level] if node.level else []
        module = ".".join([*parent_packages, *([node.module] if node.module else [])])
        return [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return []


def _starts_processes(nodes: list[ast.AST], imports: frozenset[str]) -> bool:
    if any(PROCESS_MODULES & set(name.split(".")) for name in imports):
        return True
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    os_functions = {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "os"}
    os_functions |= {name.removeprefix("os.") for name in imports if name.startswith("os.")}
    pools = any(node.attr == POOL for node in attributes) or any(name.endswith(POOL) for name in imports)
    return pools or any(OS_START_FUNCTIONS.fullmatch(name) for name in os_functions)


def _is_computed_import(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if called not in {"import_module", "__import__", "spec_from_file_location"}:
        return False
    name = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
    return not isinstance(name, str) or name.startswith(".")


def _bound(nodes: list[ast.AST], path: str) -> dict[str, str]:
    """By each name that an import statement binds: the dotted name of the module, or of the object in a module."""
    found: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            _, *names = _imported(node, path)
            found |= {alias.asname or alias.name: name for alias, name in zip(node.names, names, strict=True)}
    return found


def _located(node: ast.AST, bound: dict[str, str]) -> list[str]:
    if not (isinstance(node, ast.Attribute) and node.attr in {"__file__", "__path__"}):
        return []
    root = next((each.id for each in ast.walk(node) if isinstance(each, ast.Name)), "")
    return [bound[root]] if root in bound else []


def _reads_own_folder(nodes: list[ast.AST], depth: int) -> bool:
    """`Path(__file__).parents[depth]` is the root of the checkout; any other path starts at the folder of the file."""
    uses = sum(isinstance(node, ast.Name) and node.id == "__file__" for node in nodes)
    return uses > sum(_is_root(node, depth) for node in nodes)


def _is_root(node: ast.AST, depth: int) -> bool:
    if not (isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute)):
        return False
    is_parent_of_depth = isinstance(node.slice, ast.Constant) and node.slice.value == depth
    has_file_name = any(isinstance(each, ast.Name) and each.id == "__file__" for each in ast.walk(node.value))
    return is_parent_of_depth and node.value.attr == "parents" and has_file_name
