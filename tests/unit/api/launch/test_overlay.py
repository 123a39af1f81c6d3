"""What `--set` lays over a config; most of it is in tests/actors/test_settings.py."""

from cluster.api.launch.overlay import lay_over, llm_entry
from cluster.config import EngineConfig


def parts(*overrides: str) -> int:
    """The `ep_size` of two ranks with these settings, in turn."""
    given = llm_entry(lay_over({}, ["model_path=m", "tensor_parallel_size=2", *overrides]))["engine_kwargs"]
    return EngineConfig.from_kwargs({"model_path": "m", **given}).ep_size


def test_a_switch_of_vllm_stays_one() -> None:
    assert parts("enable_expert_parallel=true") == 2
    assert parts("ep_size=2", "engine_kwargs.enable_expert_parallel=false") == 1
    assert parts("enable_expert_parallel=false", "ep_size=2") == 2
