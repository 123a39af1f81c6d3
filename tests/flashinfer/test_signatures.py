"""What is passed to FlashInfer is held to the signatures of the one version that is installed with the `cuda` extra."""

import importlib.util
import re
from inspect import Parameter
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.attention.flashinfer.readers import AttentionWork, CellReader, LatentReader, PagedReader
from cluster.kernels.flashinfer import library as flashinfer_library
from cluster.kernels.flashinfer.launch import LATENT as LATENT_OWN
from cluster.kernels.flashinfer.launch import LATENT_BACKEND, PAGED, latent_launch, paged_launch
from cluster.kernels.flashinfer.library import VERSION, FlashInfer
from tests.flashinfer.signatures import LATENT, METADATA, METHODS, PREFILL, known, read, signature
from tests.flashinfer.stand_in import Latent, Paged, Planning

FOUND = importlib.util.find_spec("flashinfer")
CALLED = {(name, method) for name, (_, methods) in METHODS.items() for method in methods}


class Noted:
    """Takes every call that the signatures allow, and notes it."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, str], dict[str, Any]] = {}

    def note(self, name: str, method: str, *args: Any, **kwargs: Any) -> None:
        given = signature(name, method).bind(*args, **kwargs)
        assert not {one.kind for one in given.signature.parameters.values()} & {Parameter.VAR_KEYWORD}
        self.calls[name, method] = dict(given.arguments)

    def wrapper(self, name: str) -> Any:
        noted = self

        class Wrapper:
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                noted.note(name, "__init__", *args, **kwargs)

            def plan(self, *args: Any, **kwargs: Any) -> None:
                noted.note(name, "plan", *args, **kwargs)

            def run(self, *args: Any, **kwargs: Any) -> Any:
                noted.note(name, "run", *args, **kwargs)
                return kwargs["out"], kwargs["out"][..., 0]

        return Wrapper

    def csr(self, **kwargs: Any) -> str:
        self.note(METADATA, "csr", **kwargs)
        return "metadata"


def calls(dtype: torch.dtype = torch.bfloat16) -> dict[tuple[str, str], dict[str, Any]]:
    """All calls that the readers make."""
    noted = Noted()
    flashinfer = FlashInfer(noted.wrapper(PREFILL), noted.wrapper(LATENT), noted.csr, "fa3")
    numbers = torch.tensor([0, 3], dtype=torch.int32)
    for cell, size, value in (((2, 2, 64), 64, 64), ((1, 1, 576), 576, 512)):
        pool = torch.zeros(1, 32, *cell, dtype=dtype)
        given = flashinfer, pool, 16, 4, 0.125
        reader: CellReader = PagedReader(*given) if size == value else LatentReader(*given, value)
        wrapper = reader.wrapper()
        reader.plan(wrapper, AttentionWork([0, 3], [0, 3], [3], numbers, True))
        reader.run(wrapper, pool[0], torch.zeros(3, 4, size, dtype=dtype), torch.zeros(3, 4, value, dtype=dtype))
    return noted.calls


def test_every_flashinfer_call_matches_the_recorded_signatures() -> None:
    made = calls()
    assert made.keys() == CALLED
    plan = made[PREFILL, "plan"]
    indices = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
    assert {plan[name].dtype for name in indices} == {torch.int32}
    assert plan["q_data_type"] == plan["kv_data_type"] == torch.bfloat16
    assert {f"{one.dtype}" for one in made[METADATA, "csr"].values()} == {"torch.int32"}
    assert known()["mentioned"]["dtypes of MLA metadata"] == ["int32"]


def test_requested_head_sizes_and_dtypes_are_in_the_flashinfer_source() -> None:
    mentioned, offered = known()["mentioned"], FlashInfer(None, None, None, "fa3")  # type: ignore[arg-type]
    assert offered.head_sizes <= set(mentioned["head sizes of fa3"])
    assert {"bfloat16", "float16"} <= set(mentioned["dtypes of MLA queries and latents"])
    assert known()["named"] == [PREFILL, LATENT, METADATA]


def test_launch_comparison_covers_every_attribute_read_by_run() -> None:
    """What latents are planned with is another object after each plan: of that one, what it launches with."""
    read = known()["read"]
    assert sorted(PAGED) == read[PREFILL]
    assert sorted([*LATENT_OWN, "_planned_backend"]) == read[LATENT]
    assert sorted(LATENT_BACKEND) == read["what MLA plans with"]


@pytest.mark.parametrize(
    ("kind", "launch", "names"), [(Paged, paged_launch, PAGED), (Latent, latent_launch, LATENT_OWN)]
)
def test_each_compared_attribute_distinguishes_two_plans(kind: Any, launch: Any, names: tuple[str, ...]) -> None:
    workspace = torch.zeros(1, dtype=torch.uint8)
    given = {"kv_layout": "NHD"} if kind is Paged else {}
    wrapper = kind(workspace, backend="fa3", **given)
    wrapper._planned_backend = Planning()
    for owner, own in ((wrapper, names), (wrapper._planned_backend, LATENT_BACKEND if kind is Latent else ())):
        for name in own:
            for value in (3, [4, 5], torch.zeros(2)):
                before = launch(wrapper)
                assert before == launch(wrapper)
                setattr(owner, name, value)
                assert launch(wrapper) != before, f"{name} is not compared"


def test_flashinfer_version_is_the_same_everywhere() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    pinned = re.findall(r'"flashinfer-python==([^"]+)"', text)
    assert pinned == [VERSION] == [known()["version"]]


@pytest.mark.skipif(FOUND is None, reason="flashinfer is not installed here")
def test_installed_flashinfer_has_the_recorded_signatures() -> None:
    assert FOUND is not None and FOUND.origin is not None
    assert read(Path(FOUND.origin).parent) == known()


def test_argument_missing_from_the_signature_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    less = known()
    plan = less["methods"][f"{PREFILL}.plan"]
    plan.remove("sm_scale: Optional[float] =")
    monkeypatch.setattr("tests.flashinfer.signatures.known", lambda: less)
    with pytest.raises(TypeError, match="sm_scale"):
        calls()


def test_flashinfer_find_explains_each_failure_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> str:
        found = flashinfer_library.find(torch.device(device), dtype)
        assert isinstance(found, str)
        return found

    assert said("cpu") == "runs on a GPU and device is cpu; set attention_backend to auto"
    assert "computes in bfloat16 and float16, and dtype is float32; set one of them" in said(dtype=torch.float32)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert said() == f"is not installed; pip install flashinfer-python=={VERSION}, or set attention_backend to triton"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: FOUND or object())
    monkeypatch.setattr(flashinfer_library, "version", lambda name: "0.6.6")
    assert said().startswith(f"is written for flashinfer-python {VERSION}, and 0.6.6 is installed; pip install")
