"""The argument tuple of each Triton kernel has the names of the kernel's parameters, in the same order."""

import importlib
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
