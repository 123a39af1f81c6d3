"""generation_config.json: the sampling defaults that are read from it, and the values that are refused."""

import json
from pathlib import Path

import pytest

from cluster.arch.generation import sampling_defaults
from cluster.config import ConfigError


def test_sampling_defaults_are_read_from_generation_config(tmp_path: Path) -> None:
    assert sampling_defaults(str(tmp_path)) == {}
    config_dict = {
        "temperature": 0.6,
        "top_k": 20.0,
        "top_p": 0.95,
        "do_sample": True,
        "eos_token_id": [1],
        "min_p": None,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(config_dict))
    assert sampling_defaults(str(tmp_path)) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


@pytest.mark.parametrize(
    "config_dict", [{"temperature": -1}, {"top_k": 2.5}, {"top_p": "0.9"}, {"repetition_penalty": True}]
)
def test_invalid_sampling_defaults_are_refused_by_name(config_dict: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(config_dict))
    with pytest.raises(
        ConfigError, match=rf"{next(iter(config_dict))} must be a number in .* or set sampling_defaults to openai"
    ):
        sampling_defaults(str(tmp_path))
