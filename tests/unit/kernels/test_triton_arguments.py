"""The argument tuple of each Triton kernel has the names of the kernel's parameters, in the same order."""

import ast
import importlib
import inspect
import pkgutil
from inspect import Parameter, signature
from typing import Any

import pytest

import cluster.kernels

pytest.importorskip("triton")


def kernels_and_arguments() -> dict[str, tuple[Any, Any]]:
    """Return each kernel with the `NamedTuple` of its arguments, by the name of the `NamedTuple`."""
    pairs = {}
    for folder in pkgutil.iter_modules(cluster.kernels.__path__, "cluster.kernels."):
        if not folder.ispkg or importlib.util.find_spec(f"{folder.name}.gpu") is None:
            continue
        module = importlib.import_module(f"{folder.name}.gpu")
        kernels = {name.title().replace("_", "") + "Arguments": value for name, value in vars(module).items()}
        pairs |= {
            name: (kernels[name], value)
            for name, value in vars(module).items()
            if name.endswith("Arguments") and value.__module__ == module.__name__
        }
    return pairs


PAIRS = kernels_and_arguments()


def test_argument_tuples_of_all_triton_kernels_are_found() -> None:
    assert len(PAIRS) == 19


@pytest.mark.parametrize("name", PAIRS)
def test_argument_tuple_fields_match_kernel_parameters_in_order(name: str) -> None:
    kernel, arguments = PAIRS[name]
    parameters = signature(kernel.fn).parameters.items()
    assert arguments._fields == tuple(name for name, parameter in parameters if parameter.annotation is Parameter.empty)


def test_do_not_specialize_lists_only_parameters_of_its_kernel() -> None:
    """Triton ignores other names: it would compile the kernel again for values that change from step to step."""
    listed_names = 0
    for module in {inspect.getmodule(arguments) for _, arguments in PAIRS.values()}:
        for function in ast.parse(inspect.getsource(module)).body:
            if not isinstance(function, ast.FunctionDef):
                continue
            for option in [
                option
                for decorator in function.decorator_list
                if isinstance(decorator, ast.Call)
                for option in decorator.keywords
                if option.arg == "do_not_specialize"
            ]:
                value = option.value
                names = getattr(module, value.id) if isinstance(value, ast.Name) else ast.literal_eval(value)
                listed_names += len(names)
                assert set(names) <= {parameter.arg for parameter in function.args.args}, function.name
    assert listed_names > 0
