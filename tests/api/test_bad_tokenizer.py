"""Folders of a tokenizer that must not start, each with a message that names the folder and the remedy."""

import json
from pathlib import Path

import pytest

from cluster.api.core.tokenizer import ChatTokenizer
from cluster.config import ConfigError
from tests.api.scripted import save_tokenizer

# name: (what happens to a good tokenizer folder, words of the message)
TOKENIZERS: dict[str, tuple[dict[str, bytes | None], str]] = {
    "no tokenizer": ({"tokenizer.json": None}, "set tokenizer_path to a folder that holds tokenizer.json"),
    "cut off": ({"tokenizer.json": b'{"version": "1.0", "mod'}, "is not a tokenizer this version can read"),
    "another kind of file": ({"tokenizer.json": b"\x89PNG"}, "is not a tokenizer this version can read"),
    "settings that are no object": ({"tokenizer_config.json": b"[]"}, "is not a JSON object"),
    "settings that are not text": ({"tokenizer_config.json": b"\xff\xfe"}, "is not a JSON object"),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_broken_tokenizer_folder_is_refused_with_its_path_and_the_cause(tmp_path: Path, name: str) -> None:
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


def test_loading_a_tokenizer_runs_no_code_from_its_folder(tmp_path: Path) -> None:
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
