"""The one-shot all-reduce: the operator's signature, the tensors it supports, and its check against a reference."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cluster.config import ConfigError, EngineConfig
from cluster.distributed import one_shot_all_reduce
from cluster.distributed.one_shot_all_reduce import DTYPES, MAX_BYTES, OneShot, WrongSumError, check_against_reference
from cluster.distributed.process_group import Axis
from cluster.engine import build_engine
from cluster.engine.one_shot_setting import check_one_shot_setting, enable_one_shot

PARAMETERS = "Tensor symm_buffer, Tensor local_input, str reduce_op, str group_name"
CPU = torch.device("cpu")


def test_installed_torch_has_the_symmetric_memory_operators() -> None:
    assert (
        str(torch.ops.symm_mem.one_shot_all_reduce_copy.default._schema)
        == f"symm_mem::one_shot_all_reduce_copy({PARAMETERS}) -> Tensor"
    )
    symmetric = one_shot_all_reduce.import_module("torch.distributed._symmetric_memory")
    assert callable(symmetric.empty) and callable(symmetric.rendezvous)


@pytest.mark.parametrize(
    ("numbers", "dtype", "supported"),
    [
        (4, torch.float32, True),
        (8, torch.bfloat16, True),
        (4, torch.bfloat16, False),  # 8 bytes
        (5, torch.float32, False),
        (0, torch.float32, False),
        (MAX_BYTES // 4, torch.float32, True),
        (MAX_BYTES // 4 + 4, torch.float32, False),
        (8, torch.float16, False),
        (8, torch.float64, False),
        (8, torch.int64, False),
    ],
)
def test_one_shot_supports_only_small_aligned_tensors_of_its_dtypes(
    numbers: int, dtype: torch.dtype, supported: bool
) -> None:
    assert OneShot.supports(torch.zeros(1, numbers, dtype=dtype)) is supported


@pytest.fixture
def symmetric(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Replace torch's symmetric memory by a fake group of two ranks with the same rows; return the list of calls."""
    calls: list[tuple[Any, ...]] = []

    def empty(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def copy(buffer: Tensor, rows: Tensor, op: str, group: str) -> Tensor:
        assert buffer.shape == rows.shape and buffer.dtype == rows.dtype and rows.is_contiguous()
        calls.append((op, group))
        return rows + rows

    module = SimpleNamespace(empty=empty, rendezvous=lambda buffer, group: calls.append(("rendezvous", group)))
    monkeypatch.setattr(one_shot_all_reduce, "import_module", lambda name: module)
    monkeypatch.setattr(torch.ops.symm_mem, "one_shot_all_reduce_copy", copy)
    return calls


def double_rows(rows: Tensor) -> Tensor:
    return rows * 2


def repeat_rows(rows: Tensor) -> Tensor:
    return torch.cat([rows, rows])


def test_one_shot_equals_the_reference_and_axis_uses_one_shot_for_few_rows(
    symmetric: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = OneShot(SimpleNamespace(group_name="g"), 2, CPU)
    assert symmetric == [("rendezvous", "g")] * len(DTYPES)
    check_against_reference(kernel, 0, double_rows, repeat_rows, CPU)
    symmetric.clear()
    axis, rows = Axis(0, 2, direct=True, one_shot=kernel), torch.arange(8.0).view(4, 2).t()
    assert torch.equal(axis.all_reduce(rows), rows * 2) and symmetric == [("sum", "g")]
    assert axis.clock.collectives_returned == 1
    ordinary_calls: list[Tensor] = []
    monkeypatch.setattr(dist, "all_reduce", lambda rows, group: ordinary_calls.append(rows))
    unsupported = torch.zeros(5)
    assert axis.all_reduce(unsupported) is unsupported
    assert ordinary_calls == [unsupported] and symmetric == [("sum", "g")], "the fallback was not taken"


@pytest.mark.parametrize(
    ("all_reduce", "all_gather", "message"),
    [
        (lambda rows: rows * 3, repeat_rows, "not those of the ordinary"),
        (double_rows, lambda rows: torch.cat([rows, rows * (1 + 1e-6)]), "ranks get different sums"),
    ],
)
def test_one_shot_kernel_with_different_sums_is_refused(
    symmetric: list[tuple[Any, ...]],
    all_reduce: Callable[[Tensor], Tensor],
    all_gather: Callable[[Tensor], Tensor],
    message: str,
) -> None:
    with pytest.raises(WrongSumError, match=message):
        check_against_reference(OneShot(SimpleNamespace(group_name="g"), 2, CPU), 0, all_reduce, all_gather, CPU)


def test_one_shot_refuses_more_ranks_than_a_node_has() -> None:
    with pytest.raises(RuntimeError, match="9 ranks are more than 8"):
        OneShot(SimpleNamespace(group_name="g"), 9, CPU)


def config(**settings: Any) -> EngineConfig:
    return EngineConfig.from_kwargs({"model_path": "m", "one_shot_all_reduce": True, **settings})


def test_one_shot_setting_is_refused_where_unsupported() -> None:
    with pytest.raises(ConfigError, match=r"one_shot_all_reduce .* device is cpu; unset it"):
        build_engine(config(device="cpu"))
    with pytest.raises(ConfigError, match=r"one_shot_all_reduce .* tp_size is 1; unset it"):
        check_one_shot_setting(config(), torch.device("cuda"))
    mesh: Any = SimpleNamespace(world=Axis(0, 9, SimpleNamespace(group_name="g"), direct=True), attn=Axis())
    with pytest.raises(ConfigError, match=r"one_shot_all_reduce cannot be had among 9 ranks: .*; unset it"):
        enable_one_shot(config(tp_size=9), mesh, CPU)
