"""The signatures of what is used of FlashInfer, read from its source without importing it.

`python -m tests.flashinfer.signatures FOLDER`, where FOLDER is its package, installed or of an unpacked wheel, writes
them anew to `signatures.json`: of each argument its name, its type and whether it may be left out.
"""

import ast
import json
import sys
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("signatures.json")
PREFILL, LATENT, METADATA = (
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "MLAPlanMetadata",
)
BACKENDS = "mla/_batch_mla/_backends/_fa_common.py"
METHODS = {
    PREFILL: ("prefill.py", ("__init__", "plan", "run")),
    LATENT: ("mla/_batch_mla/_wrapper.py", ("__init__", "plan", "run")),
    METADATA: ("mla/_batch_mla/_contracts.py", ("csr",)),
}
"""Of each class the file that has it, and the methods that are called."""
NAMED = {PREFILL: "__init__.py", LATENT: "mla/_core.py", METADATA: "mla/_core.py"}
"""Where it gets its public name: in `flashinfer`, or in `flashinfer.mla`, which takes all of `_core`."""
MENTIONED = {
    "dtypes of MLA metadata": ("mla/_batch_mla/_planning.py", "_validate_metadata_tensor"),
    "dtypes of MLA queries and latents": ("mla/_batch_mla/_backends/_fa_common.py", "_validate_generated_fa_plan"),
    "head sizes of fa3": ("utils.py", "is_fa3_prefill_head_dim_supported"),
}
"""Functions that hold what is given to them to the dtypes, or the whole numbers, that they mention."""
RUNS = {
    PREFILL: (("prefill.py", PREFILL, "run"),),
    LATENT: (("mla/_batch_mla/_wrapper.py", LATENT, "run"),),
    "what MLA plans with": (
        (BACKENDS, "_BatchMLAPagedAttentionFaBackendBase", "run_from_wrapper"),
        (BACKENDS, "_BatchMLAGeneratedFaMechanics", "_run_generated_fa"),
        (BACKENDS, "_BatchMLAGeneratedFaMechanics", "_validate_run_input_dtypes"),
    ),
}
"""Of each object that launches, the methods that do so: the file, the class and the name."""


def read(package: Path) -> dict[str, Any]:
    """What a package's folder says."""
    return {
        "version": _version(_tree(package / "_build_meta.py")),
        "named": [name for name, file in NAMED.items() if _names(_tree(package / file), name)],
        "methods": {
            f"{name}.{method}": _arguments(_function(_class(_tree(package / file), name), method))
            for name, (file, methods) in METHODS.items()
            for method in methods
        },
        "mentioned": {
            what: _mentioned(_function(_tree(package / file), name)) for what, (file, name) in MENTIONED.items()
        },
        "read": {
            what: sorted(
                {
                    name
                    for file, owner, method in methods
                    for name in _read(_class(_tree(package / file), owner), method)
                }
            )
            for what, methods in RUNS.items()
        },
    }


def known() -> dict[str, Any]:
    """What is committed."""
    held: dict[str, Any] = json.loads(FILE.read_text())
    return held


def signature(name: str, method: str) -> Signature:
    """A committed signature as a call on an object is bound to it; annotations are the types in words."""
    kind, parameters = Parameter.POSITIONAL_OR_KEYWORD, []
    for said in known()["methods"][f"{name}.{method}"][1:]:
        if said.startswith("*"):
            kind = Parameter.KEYWORD_ONLY
            if said != "*":
                parameters.append(Parameter(said[1:], Parameter.VAR_POSITIONAL))
            continue
        named, _, rest = said.partition(": ")
        default = None if rest.endswith(" =") else Parameter.empty
        parameters.append(Parameter(named, kind, default=default, annotation=rest.removesuffix(" =")))
    return Signature(parameters)


def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _version(module: ast.Module) -> str:
    nodes = [node for node in module.body if isinstance(node, ast.Assign)]
    return str(ast.literal_eval(next(n.value for n in nodes if ast.unparse(n.targets[0]) == "__version__")))


def _names(module: ast.Module, name: str) -> bool:
    imports = [node for node in module.body if isinstance(node, ast.ImportFrom)]
    return any(name in (one.asname or one.name for one in node.names) for node in imports)


def _class(module: ast.Module, name: str) -> ast.ClassDef:
    return next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == name)


def _function(owner: ast.Module | ast.ClassDef, name: str) -> ast.FunctionDef:
    """The last of that name, which overloads come before."""
    return [node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == name][-1]


def _arguments(function: ast.FunctionDef) -> list[str]:
    """In words: `name: type`, with ` =` where it may be left out; those behind one that begins with * by name only."""
    args = function.args
    assert not args.posonlyargs and args.kwarg is None
    required = len(args.args) - len(args.defaults)
    said = [_said(one, at >= required) for at, one in enumerate(args.args)]
    if args.vararg is not None or args.kwonlyargs:
        said.append(f"*{'' if args.vararg is None else args.vararg.arg}")
    pairs = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    return said + [_said(one, default is not None) for one, default in pairs]


def _said(argument: ast.arg, optional: bool) -> str:
    kind = "" if argument.annotation is None else f": {ast.unparse(argument.annotation)}"
    return f"{argument.arg}{kind}{' =' if optional else ''}"


def _read(owner: ast.ClassDef, method: str) -> set[str]:
    """What a method reads of its object, the names of other methods left out."""
    found = set()
    for node in ast.walk(_function(owner, method)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self" and isinstance(node.ctx, ast.Load):
            found.add(node.attr)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and ast.unparse(node.args[0]) == "self":
            found.add(str(ast.literal_eval(node.args[1])))
    called = {
        node.func.attr
        for node in ast.walk(owner)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "self"
    }
    return found - called


def _mentioned(function: ast.FunctionDef) -> list[Any]:
    nodes = list(ast.walk(function))
    dtypes = {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch"}
    if dtypes := dtypes - {"Tensor", "device", "dtype"}:
        return sorted(dtypes)
    return sorted({node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, int)})


if __name__ == "__main__":
    FILE.write_text(json.dumps(read(Path(sys.argv[1])), indent=1) + "\n")
