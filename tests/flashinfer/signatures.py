"""The signatures of the FlashInfer functions that Aerie uses. They are read from FlashInfer's source, without importing
it, and recorded in `signatures.json`: the name and type of each argument, and whether it is optional.

`python -m tests.flashinfer.signatures FOLDER` writes `signatures.json` again. FOLDER is FlashInfer's package folder, of
an installation or of an unpacked wheel.
"""

import ast
import json
import sys
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

SIGNATURES_FILE = Path(__file__).with_name("signatures.json")
PREFILL, LATENT, METADATA = (
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "MLAPlanMetadata",
)
FA_BACKEND_FILE = "mla/_batch_mla/_backends/_fa_common.py"
METHODS = {
    PREFILL: ("prefill.py", ("__init__", "plan", "run")),
    LATENT: ("mla/_batch_mla/_wrapper.py", ("__init__", "plan", "run")),
    METADATA: ("mla/_batch_mla/_contracts.py", ("csr",)),
}
"""By class: the file that defines it, and the methods that Aerie calls."""
PUBLIC_NAME_FILES = {PREFILL: "__init__.py", LATENT: "mla/_core.py", METADATA: "mla/_core.py"}
"""By class: the file that makes it public, in `flashinfer` or in `flashinfer.mla` (which exports all of `_core`)."""
CHECKING_FUNCTIONS = {
    "dtypes of MLA metadata": ("mla/_batch_mla/_planning.py", "_validate_metadata_tensor"),
    "dtypes of MLA queries and latents": ("mla/_batch_mla/_backends/_fa_common.py", "_validate_generated_fa_plan"),
    "head sizes of fa3": ("utils.py", "is_fa3_prefill_head_dim_supported"),
}
"""FlashInfer functions that check their arguments. The dtypes or integers in their source are the accepted ones."""
LAUNCH_METHODS = {
    PREFILL: (("prefill.py", PREFILL, "run"),),
    LATENT: (("mla/_batch_mla/_wrapper.py", LATENT, "run"),),
    "what MLA plans with": (
        (FA_BACKEND_FILE, "_BatchMLAPagedAttentionFaBackendBase", "run_from_wrapper"),
        (FA_BACKEND_FILE, "_BatchMLAGeneratedFaMechanics", "_run_generated_fa"),
        (FA_BACKEND_FILE, "_BatchMLAGeneratedFaMechanics", "_validate_run_input_dtypes"),
    ),
}
"""By object that launches kernels: its launching methods, each as (file, class, method)."""


def read_signatures(package: Path) -> dict[str, Any]:
    """Read the signatures from the source in a package folder of FlashInfer."""
    return {
        "version": _version(_tree(package / "_build_meta.py")),
        "named": [name for name, file in PUBLIC_NAME_FILES.items() if _imports_name(_tree(package / file), name)],
        "methods": {
            f"{name}.{method}": _arguments(_function(_class(_tree(package / file), name), method))
            for name, (file, methods) in METHODS.items()
            for method in methods
        },
        "mentioned": {
            what: _mentioned_constants(_function(_tree(package / file), name))
            for what, (file, name) in CHECKING_FUNCTIONS.items()
        },
        "read": {
            what: sorted(
                {
                    name
                    for file, owner, method in methods
                    for name in _attributes_read(_class(_tree(package / file), owner), method)
                }
            )
            for what, methods in LAUNCH_METHODS.items()
        },
    }


def recorded_signatures() -> dict[str, Any]:
    """Return the content of `signatures.json`."""
    recorded: dict[str, Any] = json.loads(SIGNATURES_FILE.read_text())
    return recorded


def signature(name: str, method: str) -> Signature:
    """Return a recorded signature without `self`, for binding the arguments of a call. Annotations are type names."""
    parameter_kind, parameters = Parameter.POSITIONAL_OR_KEYWORD, []
    for argument_text in recorded_signatures()["methods"][f"{name}.{method}"][1:]:
        if argument_text.startswith("*"):
            parameter_kind = Parameter.KEYWORD_ONLY
            if argument_text != "*":
                parameters.append(Parameter(argument_text[1:], Parameter.VAR_POSITIONAL))
            continue
        argument_name, _, type_text = argument_text.partition(": ")
        default = None if type_text.endswith(" =") else Parameter.empty
        parameters.append(
            Parameter(argument_name, parameter_kind, default=default, annotation=type_text.removesuffix(" ="))
        )
    return Signature(parameters)


def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _version(module: ast.Module) -> str:
    nodes = [node for node in module.body if isinstance(node, ast.Assign)]
    return str(ast.literal_eval(next(n.value for n in nodes if ast.unparse(n.targets[0]) == "__version__")))


def _imports_name(module: ast.Module, name: str) -> bool:
    imports = [node for node in module.body if isinstance(node, ast.ImportFrom)]
    return any(name in (alias.asname or alias.name for alias in node.names) for node in imports)


def _class(module: ast.Module, name: str) -> ast.ClassDef:
    return next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == name)


def _function(owner: ast.Module | ast.ClassDef, name: str) -> ast.FunctionDef:
    """Return the last function of that name: the ones before it are overloads."""
    return [node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == name][-1]


def _arguments(function: ast.FunctionDef) -> list[str]:
    """Return each argument as text: `name: type`, with ` =` behind it if it is optional. The arguments after an entry
    that begins with * are keyword-only.
    """
    args = function.args
    assert not args.posonlyargs and args.kwarg is None
    required = len(args.args) - len(args.defaults)
    argument_texts = [_argument_text(argument, index >= required) for index, argument in enumerate(args.args)]
    if args.vararg is not None or args.kwonlyargs:
        argument_texts.append(f"*{'' if args.vararg is None else args.vararg.arg}")
    pairs = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    return argument_texts + [_argument_text(argument, default is not None) for argument, default in pairs]


def _argument_text(argument: ast.arg, optional: bool) -> str:
    type_text = "" if argument.annotation is None else f": {ast.unparse(argument.annotation)}"
    return f"{argument.arg}{type_text}{' =' if optional else ''}"


def _attributes_read(owner: ast.ClassDef, method: str) -> set[str]:
    """Return the attributes of `self` that a method reads, without the names of methods."""
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


def _mentioned_constants(function: ast.FunctionDef) -> list[Any]:
    nodes = list(ast.walk(function))
    dtypes = {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch"}
    if dtypes := dtypes - {"Tensor", "device", "dtype"}:
        return sorted(dtypes)
    return sorted({node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, int)})


if __name__ == "__main__":
    SIGNATURES_FILE.write_text(json.dumps(read_signatures(Path(sys.argv[1])), indent=1) + "\n")
