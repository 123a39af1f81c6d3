"""Starts that must fail, each with a message that names the setting and the remedy."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cluster.api.core.tokenizer import ChatTokenizer
from cluster.config import ConfigError, EngineConfig
from cluster.config.tree_shape import tree_shape
from tests.api.scripted import save_tokenizer

EAGLE = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "draft"}

# name: (settings beside model_path, words of the message)
SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "a typo": ({"page_sise": 16}, "unknown setting 'page_sise'; did you mean 'page_size'?"),
    "a typo in vLLM's spelling": ({"max_model_length": 99}, "did you mean 'max_model_len'?"),
    "a typo in speculative_config": (
        {"speculative_config": {"methd": "eagle3"}},
        "unknown setting 'speculative_config.methd'; did you mean 'method'?",
    ),
    "speculative_config is a string": ({"speculative_config": "eagle3"}, "speculative_config must be a mapping"),
    "one setting in two spellings": ({"page_size": 16, "block_size": 16}, "'block_size' sets 'page_size'"),
    "page_size is zero": ({"page_size": 0}, "page_size"),
    "page_size is text": ({"page_size": "big"}, "page_size"),
    "a dtype nobody has": ({"dtype": "int3"}, "dtype"),
    "chunked_prefill_size is zero": ({"chunked_prefill_size": 0}, "chunked_prefill_size must be positive"),
    "a negative queue": ({"max_queued_tokens": -1}, "max_queued_tokens"),
    "depth without a draft": ({"speculative_num_steps": 3}, "needs speculative_draft_model_path"),
    "an algorithm without a draft": ({"speculative_algorithm": "EAGLE3"}, "needs speculative_draft_model_path"),
    "an unknown algorithm": ({"speculative_algorithm": "MEDUSA"}, "speculative_algorithm"),
    "a chain of the wrong size": (
        {**EAGLE, "speculative_num_steps": 3, "speculative_num_draft_tokens": 9},
        "must be speculative_num_steps + 1 = 4",
    ),
    "more nodes than the levels give": (
        {**EAGLE, "speculative_num_steps": 2, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 9},
        "lower it",
    ),
    "ranks that do not divide": ({"tp_size": 4, "attn_dp_size": 3}, "attn_dp_size 3 must divide tp_size 4"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str) -> None:
    settings, words = SETTINGS[name]
    with pytest.raises((ConfigError, ValidationError)) as refused:
        tree_shape(EngineConfig.from_kwargs({"model_path": "target", **settings}))
    assert words in str(refused.value)


# name: (what happens to a good tokenizer folder, words of the message)
TOKENIZERS: dict[str, tuple[dict[str, bytes | None], str]] = {
    "no tokenizer": ({"tokenizer.json": None}, "set tokenizer_path to a folder that holds tokenizer.json"),
    "cut off": ({"tokenizer.json": b'{"version": "1.0", "mod'}, "is not a tokenizer this version can read"),
    "another kind of file": ({"tokenizer.json": b"\x89PNG"}, "is not a tokenizer this version can read"),
    "settings that are no object": ({"tokenizer_config.json": b"[]"}, "is not a JSON object"),
    "settings that are not text": ({"tokenizer_config.json": b"\xff\xfe"}, "is not a JSON object"),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizer_folder(tmp_path: Path, name: str) -> None:
    files, words = TOKENIZERS[name]
    save_tokenizer(tmp_path)
    for file, content in files.items():
        if content is None:
            (tmp_path / file).unlink()
        else:
            (tmp_path / file).write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        ChatTokenizer.load(str(tmp_path))
    assert words in str(refused.value)
    assert str(tmp_path) in str(refused.value)


def test_a_tokenizer_that_wants_code_gets_none(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    ran = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: pass\n")
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(
        json.dumps({**config, "tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": [None, "evil.Evil"]}})
    )
    try:
        ChatTokenizer.load(str(tmp_path))
    except ConfigError as error:
        assert str(tmp_path) in str(error)
    assert not ran.exists()
