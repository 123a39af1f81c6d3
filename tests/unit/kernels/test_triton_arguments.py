"""The argument tuple of each Triton kernel has the names of the kernel's parameters, in the same order."""

import ast
import importlib
import inspect
import pkgutil
from inspect import Parameter, signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cluster.kernels

pytest.importorskip("triton")
from cluster.kernels import launch
from cluster.kernels.move.gpu import MoveArguments
from cluster.kernels.norm.gpu import AddNormArguments
from cluster.kernels.store.gpu import StoreArguments


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


def launch_refusal(arguments: Any, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Return the error of a launch with these arguments, or None if the kernel is launched."""
    launched = []
    monkeypatch.setattr(launch, "_launch_kernel", lambda *args: launched.append(args))
    try:
        launch.launch(SimpleNamespace(__name__="kernel"), (1,), arguments)
    except ValueError as error:
        assert not launched
        return str(error)
    assert len(launched) == 1
    return None


def test_launches_refuse_views_that_a_kernel_would_misread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel gets an address only. In a step without trees, the slots to write are a column of the windows: a kernel
    that took this view for a contiguous tensor wrote the keys and values of most requests to wrong cells.
    """
    numbers, windows = torch.zeros(4, 8), torch.zeros(4, 16, dtype=torch.int64)
    column = windows[:, :1].view(-1)
    assert column.stride() == (16,)
    refusal = launch_refusal(StoreArguments(numbers, column, numbers, column.int(), 8), monkeypatch)
    assert refusal is not None and "write_slots" in refusal and "write_slots.contiguous()" in refusal
    assert launch_refusal(StoreArguments(numbers, column.contiguous(), numbers, column.int(), 8), monkeypatch) is None


def test_launches_accept_views_whose_strides_are_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, slots = torch.zeros(4, 16), torch.zeros(4, dtype=torch.int64)
    view, dense = wide[:, :8], torch.zeros(4, 8)
    assert launch_refusal(StoreArguments(view, slots, dense, slots.int(), 16), monkeypatch) is None
    fields = dict.fromkeys(AddNormArguments._fields, dense) | {"stride": 16}
    first, second = AddNormArguments._fields[:2]
    assert launch_refusal(AddNormArguments(**fields | {first: view}), monkeypatch) is None
    assert launch_refusal(AddNormArguments(**fields | {second: view}), monkeypatch) is not None
    fields = dict.fromkeys(MoveArguments._fields, dense) | {"layer_stride": 16}
    assert launch_refusal(MoveArguments(**fields | {MoveArguments._fields[0]: view}), monkeypatch) is not None
