"""Every call of FlashInfer is checked against the signatures of the version that the `cuda` extra installs."""

import importlib.util
import re
import sys
from inspect import Parameter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from cluster.attention.flashinfer.readers import AttentionWork, CellReader, LatentReader, PagedReader
from cluster.kernels.flashinfer import library as flashinfer_library
from cluster.kernels.flashinfer.launch import LATENT as LATENT_OWN
from cluster.kernels.flashinfer.launch import LATENT_BACKEND, PAGED, latent_launch, paged_launch
from cluster.kernels.flashinfer.library import VERSION, FlashInfer
from tests.flashinfer.signatures import (
    LATENT,
    METADATA,
    METHODS,
    PREFILL,
    read_signatures,
    recorded_signatures,
    signature,
)
from tests.flashinfer.stand_in import LatentWrapper, MlaPlanState, PagedWrapper

FLASHINFER_SPEC = importlib.util.find_spec("flashinfer")
EXPECTED_CALLS = {(name, method) for name, (_, methods) in METHODS.items() for method in methods}


class CallRecorder:
    """Stands in for FlashInfer: binds every call to its recorded signature and records the bound arguments."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, str], dict[str, Any]] = {}

    def record(self, name: str, method: str, *args: Any, **kwargs: Any) -> None:
        bound_arguments = signature(name, method).bind(*args, **kwargs)
        assert not {parameter.kind for parameter in bound_arguments.signature.parameters.values()} & {
            Parameter.VAR_KEYWORD
        }
        self.calls[name, method] = dict(bound_arguments.arguments)

    def wrapper(self, name: str) -> Any:
        recorder = self

        class Wrapper:
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                recorder.record(name, "__init__", *args, **kwargs)

            def plan(self, *args: Any, **kwargs: Any) -> None:
                recorder.record(name, "plan", *args, **kwargs)

            def run(self, *args: Any, **kwargs: Any) -> Any:
                recorder.record(name, "run", *args, **kwargs)
                return kwargs["out"], kwargs["out"][..., 0]

        return Wrapper

    def csr(self, **kwargs: Any) -> str:
        self.record(METADATA, "csr", **kwargs)
        return "metadata"


def calls(dtype: torch.dtype = torch.bfloat16) -> dict[tuple[str, str], dict[str, Any]]:
    """Plan and run once with each reader; return the arguments of all calls of FlashInfer, by (class, method)."""
    recorder = CallRecorder()
    flashinfer = FlashInfer(recorder.wrapper(PREFILL), recorder.wrapper(LATENT), recorder.csr, "fa3")
    indptr = torch.tensor([0, 3], dtype=torch.int32)
    for cell_shape, head_size, value_size in (((2, 2, 64), 64, 64), ((1, 1, 576), 576, 512)):
        pool = torch.zeros(1, 32, *cell_shape, dtype=dtype)
        reader_arguments = flashinfer, pool, 16, 4, 0.125
        reader: CellReader = (
            PagedReader(*reader_arguments) if head_size == value_size else LatentReader(*reader_arguments, value_size)
        )
        wrapper = reader.wrapper()
        reader.plan(wrapper, AttentionWork([0, 3], [0, 3], [3], indptr, True))
        reader.run(
            wrapper, pool[0], torch.zeros(3, 4, head_size, dtype=dtype), torch.zeros(3, 4, value_size, dtype=dtype)
        )
    return recorder.calls


def test_every_flashinfer_call_matches_the_recorded_signatures() -> None:
    recorded_calls = calls()
    assert recorded_calls.keys() == EXPECTED_CALLS
    plan = recorded_calls[PREFILL, "plan"]
    indices = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
    assert {plan[name].dtype for name in indices} == {torch.int32}
    assert plan["q_data_type"] == plan["kv_data_type"] == torch.bfloat16
    assert {f"{tensor.dtype}" for tensor in recorded_calls[METADATA, "csr"].values()} == {"torch.int32"}
    assert recorded_signatures()["mentioned"]["dtypes of MLA metadata"] == ["int32"]


def test_requested_head_sizes_and_dtypes_are_in_the_flashinfer_source() -> None:
    mentioned, flashinfer = recorded_signatures()["mentioned"], FlashInfer(None, None, None, "fa3")  # type: ignore[arg-type]
    assert flashinfer.head_sizes <= set(mentioned["head sizes of fa3"])
    assert {"bfloat16", "float16"} <= set(mentioned["dtypes of MLA queries and latents"])
    assert recorded_signatures()["named"] == [PREFILL, LATENT, METADATA]


def test_launch_comparison_covers_every_attribute_read_by_run() -> None:
    """The wrapper for latents makes a new backend object (`_planned_backend`) with each plan. So the attributes that
    this object reads at a launch are compared too.
    """
    read_attributes = recorded_signatures()["read"]
    assert sorted(PAGED) == read_attributes[PREFILL]
    assert sorted([*LATENT_OWN, "_planned_backend"]) == read_attributes[LATENT]
    assert sorted(LATENT_BACKEND) == read_attributes["what MLA plans with"]


@pytest.mark.parametrize(
    ("kind", "launch", "names"), [(PagedWrapper, paged_launch, PAGED), (LatentWrapper, latent_launch, LATENT_OWN)]
)
def test_each_compared_attribute_distinguishes_two_plans(kind: Any, launch: Any, names: tuple[str, ...]) -> None:
    workspace = torch.zeros(1, dtype=torch.uint8)
    extra_arguments = {"kv_layout": "NHD"} if kind is PagedWrapper else {}
    wrapper = kind(workspace, backend="fa3", **extra_arguments)
    wrapper._planned_backend = MlaPlanState()
    for owner, attribute_names in (
        (wrapper, names),
        (wrapper._planned_backend, LATENT_BACKEND if kind is LatentWrapper else ()),
    ):
        for name in attribute_names:
            for value in (3, [4, 5], torch.zeros(2)):
                before = launch(wrapper)
                assert before == launch(wrapper)
                setattr(owner, name, value)
                assert launch(wrapper) != before, f"{name} is not compared"


def test_flashinfer_version_is_the_same_everywhere() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    pinned = re.findall(r'"flashinfer-python==([^"]+)"', text)
    assert pinned == [VERSION] == [recorded_signatures()["version"]]


@pytest.mark.skipif(FLASHINFER_SPEC is None, reason="flashinfer is not installed here")
def test_installed_flashinfer_has_the_recorded_signatures() -> None:
    assert FLASHINFER_SPEC is not None and FLASHINFER_SPEC.origin is not None
    assert read_signatures(Path(FLASHINFER_SPEC.origin).parent) == recorded_signatures()


def test_argument_missing_from_the_signature_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    reduced_signatures = recorded_signatures()
    plan = reduced_signatures["methods"][f"{PREFILL}.plan"]
    plan.remove("sm_scale: Optional[float] =")
    monkeypatch.setattr("tests.flashinfer.signatures.recorded_signatures", lambda: reduced_signatures)
    with pytest.raises(TypeError, match="sm_scale"):
        calls()


def test_flashinfer_find_explains_each_failure_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_failure(device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> str:
        reason = flashinfer_library.find(torch.device(device), dtype)
        assert isinstance(reason, str)
        return reason

    assert find_failure("cpu") == "runs on a GPU and device is cpu; set attention_backend to auto"
    assert "computes in bfloat16 and float16, and dtype is float32; set one of them" in find_failure(
        dtype=torch.float32
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert (
        find_failure()
        == f"is not installed; pip install flashinfer-python=={VERSION}, or set attention_backend to triton"
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: FLASHINFER_SPEC or object())
    monkeypatch.setattr(flashinfer_library, "version", lambda name: "0.6.6")
    assert find_failure().startswith(f"is written for flashinfer-python {VERSION}, and 0.6.6 is installed; pip install")


def class_with_recorded_methods(name: str) -> type:
    """Make a class of FlashInfer that has only the methods in `METHODS`, as static functions without a body."""
    return type(name, (), {method: staticmethod(lambda *_, **__: None) for method in METHODS[name][1]})


@pytest.mark.parametrize(("capability", "variant"), [((9, 0), "fa3"), ((8, 0), "fa2"), ((10, 0), "fa2")])
def test_flashinfer_find_returns_the_recorded_classes_and_methods(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], variant: str
) -> None:
    """The modules stand in for FlashInfer. They have only the recorded names, so `find` fails if it uses another."""
    classes = {name: class_with_recorded_methods(name) for name in METHODS}
    modules = {name: ModuleType(name) for name in ("flashinfer", "flashinfer.mla")}
    setattr(modules["flashinfer"], PREFILL, classes[PREFILL])
    for name in (LATENT, METADATA):
        setattr(modules["flashinfer.mla"], name, classes[name])
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(flashinfer_library, "version", lambda name: VERSION)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = flashinfer_library.find(torch.device("cuda"), torch.bfloat16)
    assert isinstance(found, FlashInfer), found
    assert (found.paged, found.latent, found.variant) == (classes[PREFILL], classes[LATENT], variant)
    assert found.make_metadata is vars(classes[METADATA])["csr"].__func__
