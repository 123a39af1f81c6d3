"""How `--set` overrides the settings of a config; most tests of it are in tests/serving/actors/test_settings.py."""

from pathlib import Path

from cluster.api.launch.overlay import apply_overrides, llm_entry
from cluster.config import EngineConfig


def ep_size_of(*overrides: str) -> int:
    """The `ep_size` of two ranks after these overrides, applied one after another."""
    engine_kwargs = llm_entry(apply_overrides({}, ["model_path=m", "tensor_parallel_size=2", *overrides]))[
        "engine_kwargs"
    ]
    return EngineConfig.from_kwargs({"model_path": "m", **engine_kwargs}).ep_size


def test_last_override_of_expert_parallelism_wins() -> None:
    assert ep_size_of("enable_expert_parallel=true") == 2
    assert ep_size_of("ep_size=2", "engine_kwargs.enable_expert_parallel=false") == 1
    assert ep_size_of("enable_expert_parallel=false", "ep_size=2") == 2


def model_id_of(folder: Path) -> str:
    folder.mkdir(parents=True)
    return str(llm_entry(apply_overrides({}, [("model_source", str(folder))]))["model_loading_config"]["model_id"])


def test_default_model_id_is_the_folder_name_or_the_hub_name(tmp_path: Path) -> None:
    assert model_id_of(tmp_path / "Llama-3.2-1B") == "Llama-3.2-1B"
    assert (
        model_id_of(tmp_path / "models--meta-llama--Llama-3.2-1B" / "snapshots" / "5f0b") == "meta-llama/Llama-3.2-1B"
    )
    assert model_id_of(tmp_path / "models--gpt2" / "snapshots" / "5f0b") == "gpt2"
    assert model_id_of(tmp_path / "models" / "snapshots" / "5f0b") == "5f0b"
